"""Tensor expressions of the gradients of vision operators."""
