"""The backward operators of sorting."""
