"""Tensor expressions of the gradients of padding."""
