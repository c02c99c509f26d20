"""Gradients of element-wise functions of two or more arguments."""
