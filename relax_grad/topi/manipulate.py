"""Tensor expressions of the gradients of the operators that move elements about."""

from __future__ import annotations
