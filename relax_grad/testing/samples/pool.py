"""Samples of pooling."""

from __future__ import annotations
