"""The backward operators of vision operators."""
