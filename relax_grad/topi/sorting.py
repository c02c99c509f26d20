"""Tensor expressions of the gradients of sorting."""
