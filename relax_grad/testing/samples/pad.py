"""Samples of padding."""
