"""The differentiation pass and its parts."""
