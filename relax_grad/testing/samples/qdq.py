"""Samples of quantization."""
