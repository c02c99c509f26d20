"""The backward operators of collective communication."""
