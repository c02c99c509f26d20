"""Legalization of the backward operators of linear algebra."""
