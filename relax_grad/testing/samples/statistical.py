"""Samples of reductions and scans."""

from __future__ import annotations
