"""The time of differentiation and the size of the adjoint function, as a function grows.

``python benchmarks/differentiation.py`` differentiates chains of operators, and functions that
split a tensor into many parts, with ``relax_grad.transform.Gradient`` and with TVM's pass in turn.
The table gives the least of a few times in seconds, and the number of bindings of the adjoint
function.
"""

from __future__ import annotations

import argparse
import time

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


def measure(module: IRModule, repeats: int) -> dict[str, tuple[float, int]]:
    """Return the least time and the size of the adjoint function for each pass, measured in
    turn."""
    times = {name: [] for name in PASSES}
    sizes = {}
    for _ in range(repeats):
        for name, gradient in PASSES.items():
            start = time.perf_counter()
            adjoint = gradient("main")(module)["main_adjoint"]
            times[name].append(time.perf_counter() - start)
            sizes[name] = sum(len(block.bindings) for block in adjoint.body.blocks)
    return {name: (min(times[name]), sizes[name]) for name in PASSES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="times to measure (default: 3)")
    arguments = parser.parse_args()
    columns = "".join(f"{name:>14} s{'bindings':>12}" for name in PASSES)
    print(f"{'function':<10}{'n':>8}{columns}")
    for make, counts in ((chain, (100, 1000, 10000)), (parts, (8, 32, 128))):
        for count in counts:
            measured = measure(make(count), arguments.repeats)
            columns = "".join(f"{seconds:>16.3f}{size:>12}" for seconds, size in measured.values())
            print(f"{make.__name__:<10}{count:>8}{columns}")


if __name__ == "__main__":
    main()
