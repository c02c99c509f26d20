"""Gradients of the backward operators of attention."""
