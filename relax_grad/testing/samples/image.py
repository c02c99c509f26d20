"""Samples of image operators."""
