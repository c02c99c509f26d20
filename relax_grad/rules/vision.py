"""Gradients of vision operators."""
