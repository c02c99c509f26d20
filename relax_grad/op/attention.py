"""The backward operators of attention."""
