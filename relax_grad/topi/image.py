"""Tensor expressions of the gradients of image operators."""
