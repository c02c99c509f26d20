"""Tensor expressions of the gradients of pooling."""

from __future__ import annotations
