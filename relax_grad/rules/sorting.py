"""Gradients of sorting."""
