"""The entry of the passes for GPUs into the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import tvm

from ..cpu.pipeline import register_stages

#: The kinds of targets of these passes.
KINDS = ("cuda",)


def _passes(target: tvm.target.Target) -> Iterator[tvm.transform.Pass]:
    from .stages import passes  # the import takes a while

    yield from passes(target)


for _kind in KINDS:
    register_stages(_kind, _passes)
