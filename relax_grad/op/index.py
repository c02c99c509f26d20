"""The backward operators of indexing."""

from __future__ import annotations
