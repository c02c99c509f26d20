"""The passes of the pipeline: TVM's stages for a GPU, and between them the optimizations for any
processor."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm.relax.backend.cuda import pipeline as stages

from ..cpu import passes as own
from ..cpu.passes.donate import WriteToDonated
from ..cpu.passes.reserve import reserve_memory
from ..cpu.passes.unused import remove_unused
from ..cpu.passes.updates import place_updates
from ..cpu.stages import (
    allocate_empty_constants,
    joining_passes,
    legalize_passes,
    view_reshapes,
)
from .graphs import add_graphs
from .halves import widen_halves, widen_scans
from .in_place import name_pairs
from .siblings import fuse_siblings

#: TVM's pass that schedules the functions of loops, and the passes that have another place here.
_SCHEDULES, _VIEWS = "ApplyDefaultSchedule", "RewriteDataflowReshape"


def passes(target: tvm.target.Target) -> Iterator[tvm.transform.Pass]:
    """Yield the passes of the pipeline.

    Parameters
    ----------
    target : tvm.target.Target
        A target of CUDA.
    """
    yield from joining_passes()
    yield widen_scans
    yield from stages.library_dispatch_passes(target)
    steps = stages.legalize_passes(target)
    yield from legalize_passes(step for step in steps if step.info.name != _SCHEDULES)
    yield widen_halves
    # Before the schedules: TVM recognises no copy, and no element-wise function, after them.
    yield view_reshapes
    yield place_updates
    yield fuse_siblings
    yield own.ReorderForPeakMemory()
    yield allocate_empty_constants
    yield from (step for step in steps if step.info.name == _SCHEDULES)
    yield name_pairs
    for step in stages.dataflow_lower_passes(target):
        if step.info.name != _VIEWS:
            yield step
    yield WriteToDonated()
    yield remove_unused
    for step in stages.finalize_passes(target):
        yield step
        if step.info.name == "KillAfterLastUse":
            yield add_graphs
            yield reserve_memory
