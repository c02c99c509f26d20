"""The arithmetic of symbolic extents that a graph computes."""
