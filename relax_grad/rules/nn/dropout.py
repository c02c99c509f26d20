"""Gradients of dropout."""
