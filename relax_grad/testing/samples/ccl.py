"""Samples of collective communication.

The checks run with one worker, and the samples replace the runtime's collectives by collectives of
one worker. Differences between workers are therefore not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.ir import Op, Range
from tvm.relax.distributed import DeviceMesh, Placement
from tvm.relax.op import distributed as dist
from tvm.relax.op import grad as backward

from ._sample import Sample, register_samples

_N = {0: {0: "n"}}


@contextmanager
def _one_worker() -> Iterator[None]:
    """Replace the collectives of the runtime by collectives of a single worker, and make
    annotations compile."""

    def copy(data: Any, *rest: Any) -> None:
        result = rest[-1]
        result.copyfrom(data.numpy().reshape(result.shape))

    names = ("allgather", "allreduce", "broadcast_from_worker0", "scatter_from_worker0")
    single = {
        **dict.fromkeys(names, copy),
        "worker_id": lambda: tvm_ffi.Shape((0,)),
    }
    replaced = {name: tvm.get_global_func(f"runtime.disco.{name}") for name in single}
    annotate = Op.get("relax.dist.annotate_sharding")
    annotate.set_attr("FLegalize", lambda bb, call: call.args[0], 11)
    try:
        for name, function in single.items():
            tvm_ffi.register_global_func(f"runtime.disco.{name}", function, override=True)
        yield
    finally:
        for name, function in replaced.items():
            tvm_ffi.register_global_func(f"runtime.disco.{name}", function, override=True)
        annotate.reset_attr("FLegalize")


def _sample(
    function: Any, rng: np.random.Generator, shape: Sequence[int], note: str = "", **attrs: Any
) -> Sample:
    return Sample([rng.normal(size=shape)], attrs, function=function, within=_one_worker, note=note)


@register_samples("relax.ccl.allreduce")
def allreduce(rng: np.random.Generator) -> Iterator[Sample]:
    for op_type in ("sum", "avg", "min", "max"):
        yield Sample(
            [rng.normal(size=(2, 3))],
            {"op_type": op_type},
            symbolic=_N,
            within=_one_worker,
            note=op_type,
        )


@register_samples("relax.ccl.allgather")
def allgather(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 3))], {"num_workers": 1}, symbolic=_N, within=_one_worker)


@register_samples("relax.ccl.broadcast_from_worker0")
def broadcast_from_worker0(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 3))], symbolic=_N, within=_one_worker)


@register_samples("relax.ccl.scatter_from_worker0")
def scatter_from_worker0(rng: np.random.Generator) -> Iterator[Sample]:
    for axis in (0, 1):
        yield Sample(
            [rng.normal(size=(2, 3))],
            {"num_workers": 1, "axis": axis},
            symbolic=_N if axis == 1 else None,
            within=_one_worker,
            note=f"axis {axis}",
        )


@register_samples("relax.dist.redistribute_replica_to_shard")
def redistribute_replica_to_shard(rng: np.random.Generator) -> Iterator[Sample]:
    yield _sample(dist.redistribute_replica_to_shard, rng, (2, 3), num_workers=1, axis=1)


@register_samples("relax.dist.annotate_sharding")
def annotate_sharding(rng: np.random.Generator) -> Iterator[Sample]:
    mesh, placement = DeviceMesh((2,), Range(0, 2)), Placement.from_text("S[0]")
    yield _sample(lambda x: dist.annotate_sharding(x, mesh, placement), rng, (2, 3))


@register_samples("relax.grad.allgather_backward_x")
def allgather_backward_x(rng: np.random.Generator) -> Iterator[Sample]:
    yield _sample(lambda grad: backward.allgather_backward_x(grad, (2, 3), 1), rng, (2, 3))


@register_samples("relax.grad.broadcast_from_worker0_backward_x")
def broadcast_from_worker0_backward_x(rng: np.random.Generator) -> Iterator[Sample]:
    yield _sample(backward.broadcast_from_worker0_backward_x, rng, (2, 3))


@register_samples("relax.grad.scatter_from_worker0_backward_x")
def scatter_from_worker0_backward_x(rng: np.random.Generator) -> Iterator[Sample]:
    yield _sample(
        lambda grad: backward.scatter_from_worker0_backward_x(grad, (2, 3), 1, 1), rng, (2, 3)
    )


@register_samples("relax.grad.redistribute_replica_to_shard_backward_input")
def redistribute_replica_to_shard_backward_input(rng: np.random.Generator) -> Iterator[Sample]:
    yield _sample(
        lambda grad: backward.redistribute_replica_to_shard_backward_input(grad, (2, 3), 1, 0),
        rng,
        (2, 3),
    )


@register_samples("relax.grad.copy_to_tensor_parallel")
def copy_to_tensor_parallel(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 3))], symbolic=_N, within=_one_worker)


@register_samples("relax.grad.reduce_from_tensor_parallel")
def reduce_from_tensor_parallel(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([rng.normal(size=(2, 3))], symbolic=_N, within=_one_worker)
