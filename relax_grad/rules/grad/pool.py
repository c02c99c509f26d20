"""Gradients of the backward operators of pooling."""

from __future__ import annotations
