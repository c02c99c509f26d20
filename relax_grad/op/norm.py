"""The backward operators of the normalisations."""
