"""Gradients of the backward operators of the normalisations."""
