"""Samples of changes of dtype."""
