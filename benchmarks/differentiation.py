"""Time of differentiation and size of adjoints, beside TVM's pass.

The functions are chains of operators, and functions that split a tensor into many parts.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable

from _benchmark import Benchmark
from tvm import IRModule, relax

import relax_grad

PASSES = {"relax_grad": relax_grad.transform.Gradient, "TVM": relax.transform.Gradient}


def chain(length: int) -> IRModule:
    """Return a function with a chain of ``length`` bindings."""
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    steps = [
        relax.op.tanh,
        lambda y: relax.op.add(y, x),
        lambda y: relax.op.multiply(y, y),
        lambda y: relax.op.matmul(y, x),
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            y = x
            for i in range(length):
                y = bb.emit(steps[i % len(steps)](y))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    return bb.get()


def parts(count: int) -> IRModule:
    """Return a function that splits a tensor into ``count`` parts and uses each of them."""
    x = relax.Var("x", relax.TensorType((count, 4), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            split = bb.emit(relax.op.split(x, count))
            total = bb.emit(relax.TupleGetItem(split, 0))
            for i in range(1, count):
                total = bb.emit(relax.op.add(total, bb.emit(relax.TupleGetItem(split, i))))
            loss = bb.emit_output(relax.op.sum(total))
        bb.emit_func_output(loss)
    return bb.get()


def measured(row: tuple[Callable, int], args: Namespace) -> dict[str, dict]:
    """Return the least seconds and the bindings of the adjoint function for each pass, which run in
    turn."""
    make, count = row
    module = make(count)
    found = {name: {"s": math.inf, "bindings": 0} for name in PASSES}
    for _ in range(args.repeats):
        for name, gradient in PASSES.items():
            start = time.perf_counter()
            adjoint = gradient("main")(module)["main_adjoint"]
            spent = time.perf_counter() - start
            bindings = sum(len(block.bindings) for block in adjoint.body.blocks)
            found[name] = {"s": round(min(spent, found[name]["s"]), 4), "bindings": bindings}
    return found


BENCHMARK = Benchmark(
    rows=lambda args: {
        f"{make.__name__} {count}": (make, count)
        for make, counts in ((chain, (100, 1000, 10000)), (parts, (8, 32, 128)))
        for count in counts
    },
    measure=measured,
    repeats=3,
)
