"""Gradients of indexing."""

from __future__ import annotations
