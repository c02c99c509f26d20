"""Legalization of the backward operators of image operators."""
