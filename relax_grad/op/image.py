"""The backward operators of image operators."""
