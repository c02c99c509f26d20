"""Samples of attention."""
