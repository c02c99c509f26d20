"""Tensor expressions of the gradients of the operators that write at indices."""
