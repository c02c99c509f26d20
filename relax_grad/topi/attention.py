"""Tensor expressions of the gradients of attention."""
