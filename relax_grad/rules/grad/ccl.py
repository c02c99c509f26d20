"""Gradients of the backward operators of collective communication."""
