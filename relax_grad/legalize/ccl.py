"""Legalization of the backward operators of collective communication."""
