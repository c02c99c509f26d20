"""Legalization of the backward operators of attention."""
