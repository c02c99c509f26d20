"""Samples of dropout."""
