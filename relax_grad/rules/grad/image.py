"""Gradients of the backward operators of image operators."""
