"""Tensor expressions of the gradients of indexing."""

from __future__ import annotations
