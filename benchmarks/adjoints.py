"""Time of adjoints of tensor functions of TOPI, relative to the functions.

A limit is 2 for functions that are element-wise or move elements, and 4 for reductions and
scatters; a ratio above it is marked.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from _benchmark import Benchmark
from _paired import digits, median_ratio
from _timing import measure
from tvm import relax, te, tirx, topi
from tvm.relax import VirtualMachine

import relax_grad
from relax_grad.tir import adjoint

MOVES, SUMS = 2.0, 4.0

_ROWS = (1024, 1024)
_IMAGES = (8, 32, 56, 56)

#: Integers from 0 to 511.
_PLACES = ("int64", 1024, 1024)

#: The function, the shapes of its arguments and the limit of the ratio, by name.
CASES: dict[str, tuple] = {
    "exp": (topi.exp, [_ROWS], MOVES),
    "multiply": (topi.multiply, [_ROWS, _ROWS], MOVES),
    "clip": (lambda x: topi.clip(x, -0.5, 0.5), [_ROWS], MOVES),
    "sigmoid": (topi.sigmoid, [_ROWS], MOVES),
    "select": (lambda x, y: topi.where(topi.greater(x, y), x, y), [_ROWS, _ROWS], MOVES),
    "transpose": (topi.transpose, [_ROWS], MOVES),
    "reshape": (lambda x: topi.reshape(x, (512, 2048)), [_ROWS], MOVES),
    "pad": (lambda x: topi.nn.pad(x, [0, 0, 1, 1], [0, 0, 1, 1]), [_IMAGES], MOVES),
    "mirror_pad": (
        lambda x: topi.nn.mirror_pad(x, [0, 0, 1, 1], [0, 0, 1, 1], "REFLECT"),
        [_IMAGES],
        MOVES,
    ),
    "slice": (lambda x: topi.strided_slice(x, [0, 8], [1024, 1016], [1, 1]), [_ROWS], MOVES),
    "strided slice": (lambda x: topi.strided_slice(x, [0, 0], _ROWS, [2, 2]), [_ROWS], MOVES),
    "flip": (lambda x: topi.flip(x, 1), [_ROWS], MOVES),
    "concatenate": (lambda x, y: topi.concatenate([x, y], 0), [_ROWS, _ROWS], MOVES),
    "tile": (lambda x: topi.tile(x, (2, 2)), [(512, 512)], MOVES),
    "sum": (lambda x: topi.sum(x, 1), [_ROWS], SUMS),
    "max": (lambda x: topi.max(x, 1), [_ROWS], SUMS),
    "prod": (lambda x: topi.prod(x, 1), [_ROWS], SUMS),
    "broadcast add": (topi.add, [_ROWS, (1024,)], SUMS),
    "softmax": (topi.nn.softmax, [_ROWS], SUMS),
    "avg_pool2d": (
        lambda x: topi.nn.pool2d(x, (2, 2), (2, 2), (1, 1), (0, 0, 0, 0), "avg"),
        [_IMAGES],
        SUMS,
    ),
    "max_pool2d": (
        lambda x: topi.nn.pool2d(x, (2, 2), (2, 2), (1, 1), (0, 0, 0, 0), "max"),
        [_IMAGES],
        SUMS,
    ),
    "take": (lambda x: topi.take(x, _indices(1024), 0), [_ROWS], SUMS),
    "gather": (lambda x, i: topi.gather(x, 0, i), [_ROWS, _PLACES], SUMS),
    "scatter_add": (
        lambda x, y, i: topi.scatter_elements(x, i, y, 0, "add"),
        [_ROWS, _ROWS, _PLACES],
        SUMS,
    ),
    "cumsum": (lambda x: topi.cumsum(x, 1), [_ROWS], SUMS),
}


def _indices(number: int) -> te.Tensor:
    """Return indices that hit some rows several times."""
    return te.compute((number,), lambda i: tirx.floormod(i * 7, number // 2), "indices")


def function_of(build: Callable, shapes: Sequence[Sequence]) -> tirx.PrimFunc:
    """Return the tensor function of a case."""
    # The shapes of Relax, and so those of all functions that its importers write, count in 64 bits.
    tensors = []
    for i, shape in enumerate(shapes):
        dtype, extents = (shape[0], shape[1:]) if shape == _PLACES else ("float32", shape)
        extents = [tirx.IntImm("int64", extent) for extent in extents]
        tensors.append(te.placeholder(extents, dtype, f"x{i}"))
    return te.create_prim_func([*tensors, build(*tensors)])


def _compiled(function: tirx.PrimFunc, num_results: int) -> Callable[[], object]:
    """Return a call of a tensor function, compiled with the pipeline, on random numbers."""
    bb = relax.BlockBuilder()
    callee = bb.add_func(function.without_attr("global_symbol"), "function")
    types = [
        relax.TensorType([int(extent) for extent in param.shape], str(param.dtype))
        for param in function.params
    ]
    params = [relax.Var(f"p{i}", kind) for i, kind in enumerate(types[:-num_results])]
    results = types[-num_results:]
    with bb.function("main", params):
        with bb.dataflow():
            kind = results[0] if num_results == 1 else results
            out = bb.emit_output(relax.op.call_tir(callee, params, kind))
        bb.emit_func_output(out)
    target = relax_grad.target.host()
    built = tvm.compile(bb.get(), target, relax_pipeline=relax_grad.pipeline(target))
    machine = VirtualMachine(built, tvm.cpu())
    rng = np.random.default_rng(0)
    values = []
    for kind in types[:-num_results]:
        shape, dtype = [int(extent) for extent in kind.shape.values], str(kind.dtype.dtype)
        numbers = rng.normal(size=shape) if "float" in dtype else rng.integers(0, 512, shape)
        values.append(tvm.runtime.tensor(numbers.astype(dtype)))
    main = machine["main"]
    return lambda: main(*values)


def measured(name: str, args: Namespace) -> dict:
    """Return the microseconds of a function and of its adjoint, the ratio, and the limit."""
    build, shapes, limit = CASES[name]
    function = function_of(build, shapes)
    derivative = adjoint(function)
    calls = {
        "forward": _compiled(function, 1),
        "adjoint": _compiled(derivative.function, len(derivative.wrt)),
    }
    samples = measure(calls, args.repeats, args.seconds)
    ratio = median_ratio(samples["adjoint"], samples["forward"])
    return {
        "us": round(statistics.median(samples["forward"]) * 1e6),
        "adjoint_us": round(statistics.median(samples["adjoint"]) * 1e6),
        "ratio": ratio,
        "least": digits(min(samples["adjoint"]) / min(samples["forward"])),
        "limit": limit,
        **({"above": True} if ratio > limit else {}),
    }


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in CASES}, measure=measured, repeats=15
)
