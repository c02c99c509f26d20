"""Samples of element-wise functions of one argument."""
