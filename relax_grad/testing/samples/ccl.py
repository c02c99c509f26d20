"""Samples of collective communication."""
