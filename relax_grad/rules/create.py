"""Gradients of the operators that create tensors."""
