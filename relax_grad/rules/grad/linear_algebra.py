"""Gradients of the backward operators of linear algebra."""
