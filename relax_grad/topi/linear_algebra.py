"""Tensor expressions of the gradients of linear algebra."""
