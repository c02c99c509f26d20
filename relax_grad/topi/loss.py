"""Tensor expressions of the gradients of the losses."""

from __future__ import annotations
