"""Samples of sorting."""
