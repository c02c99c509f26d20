"""Gradients of collective communication."""
