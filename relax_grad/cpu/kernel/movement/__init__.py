"""Copies, and scatter-adds."""
