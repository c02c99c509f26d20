"""Gradients of padding."""
