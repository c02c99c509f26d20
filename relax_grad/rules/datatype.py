"""Gradients of changes of dtype."""
