"""Gradients of image operators."""
