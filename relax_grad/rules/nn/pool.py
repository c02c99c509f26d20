"""Gradients of pooling."""

from __future__ import annotations
