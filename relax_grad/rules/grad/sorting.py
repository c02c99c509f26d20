"""Gradients of the backward operators of sorting."""
