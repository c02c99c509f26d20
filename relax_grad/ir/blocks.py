"""Blocks of tensor functions."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from .compat import SBlock


def allocating(block: SBlock, buffers: Sequence[tirx.Var]) -> SBlock:
    """Return a block that allocates these buffers and no others."""
    return _remade(block, block.init, buffers)


def with_init(block: SBlock, init: tirx.Stmt) -> SBlock:
    """Return a block whose reduction begins with another statement."""
    return _remade(block, init, block.alloc_buffers)


def _remade(block: SBlock, init: tirx.Stmt | None, buffers: Sequence[tirx.Var]) -> SBlock:
    return SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        init,
        list(buffers),
        block.match_buffers,
        block.annotations,
    )
