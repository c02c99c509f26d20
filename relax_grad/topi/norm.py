"""Tensor expressions of the gradients of the normalisations."""
