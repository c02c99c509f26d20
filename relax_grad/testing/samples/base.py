"""Samples of the operators that only pass tensors on."""
