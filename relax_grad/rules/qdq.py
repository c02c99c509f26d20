"""Gradients of quantization."""
