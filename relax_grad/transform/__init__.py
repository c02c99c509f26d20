"""Passes over Relax modules."""

from .gradient import Gradient

__all__ = ["Gradient"]
