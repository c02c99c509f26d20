"""Gradients of the normalisations."""

from __future__ import annotations
