"""Samples of vision operators."""
