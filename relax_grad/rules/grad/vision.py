"""Gradients of the backward operators of vision operators."""
