"""Legalization of the backward operators of the operators that move elements about."""

from __future__ import annotations
