"""Legalization of the backward operators of vision operators."""
