"""Samples of linear algebra."""
