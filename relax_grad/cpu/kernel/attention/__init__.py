"""Attention without a matrix of scores in memory, and its gradient."""
