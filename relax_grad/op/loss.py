"""The backward operators of the losses."""

from __future__ import annotations
