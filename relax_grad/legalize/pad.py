"""Legalization of the backward operators of padding."""
