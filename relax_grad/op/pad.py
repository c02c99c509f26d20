"""The backward operators of padding."""
