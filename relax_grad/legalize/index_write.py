"""Legalization of the backward operators of the operators that write at indices."""
