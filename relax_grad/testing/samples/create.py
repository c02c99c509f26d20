"""Samples of the operators that create tensors."""
