"""Gradients of the backward operators of padding."""
