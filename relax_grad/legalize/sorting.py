"""Legalization of the backward operators of sorting."""
