"""Samples of selection and search."""

from __future__ import annotations
