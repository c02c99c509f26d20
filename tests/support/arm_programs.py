"""Programs of every operator that the tests for AArch64 run: values and gradients, losses, random
numbers, updates."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import tvm
from programs import build, tensor
from tvm import relax

from relax_grad.frontend import random
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve, select_wrt
from relax_grad.testing.samples import Sample, sampled_operators, samples
from relax_grad.testing.samples._sample import cast
from relax_grad.transform import Gradient

#: A module with ``main`` or ``main_adjoint``, and the arguments of both.
Case = tuple[tvm.IRModule, list[np.ndarray]]


def adjoints(dtype: str, operators: Iterable[str] = (), most: int = 1) -> dict[str, Case]:
    """Return the first samples of operators (by default of all), with random cotangents and
    gradients.

    Samples that need a session of Disco are left out.
    """
    cases = {}
    for op in operators or sampled_operators():
        for i, sample in enumerate(samples(op)[:most]):
            if sample.within is nullcontext and dtype in ("float64", *sample.dtypes):
                cases[f"{op} {i} {dtype}"] = _adjoint(sample, dtype)
    return cases


def _adjoint(sample: Sample, dtype: str) -> Case:
    _, function = resolve(sample.function or sample.op)
    arguments = _program.make_arguments(cast(sample.inputs, dtype), None, {})
    rng = np.random.default_rng(0)
    program = _program.first_order(function, arguments, sample.attrs, rng)
    module = _program.differentiate(program, select_wrt(program.arguments, sample.wrt))
    return module, program.values()


def losses() -> dict[str, Case]:
    """Return cross entropies with their gradients, which one kernel computes."""
    cases = {}
    rng = np.random.default_rng(0)
    values = [
        rng.normal(size=(9, 21)).astype("float32"),
        rng.integers(0, 21, 9),
        rng.random(21).astype("float32"),
    ]
    kinds = [("x", (9, 21), "float32"), ("labels", (9,), "int64"), ("weights", (21,), "float32")]
    for number in (2, 3):
        for reduction in ("mean", "sum"):
            params = [tensor(*kind) for kind in kinds[:number]]
            module = build(
                params,
                lambda bb, x, *more, r=reduction: relax.op.nn.nll_loss(
                    bb.emit(relax.op.nn.log_softmax(x)), *more, reduction=r
                ),
            )
            name = f"cross entropy {number} {reduction}"
            cases[name] = Gradient("main", [params[0]])(module), values[:number]
    return cases


def updates() -> dict[str, Case]:
    """Return an update of a weight, whose gradient is a product that is not stored."""
    rng = np.random.default_rng(1)
    shapes = {"x": (24, 70), "y": (24, 51), "w": (70, 51)}
    params = [tensor(name, shape, "float32") for name, shape in shapes.items()]

    def body(bb, x, y, w) -> relax.Expr:
        product = bb.emit(relax.op.matmul(bb.emit(relax.op.permute_dims(x)), y))
        return relax.op.subtract(w, relax.op.multiply(product, relax.const(0.1)))

    values = [rng.normal(size=shape).astype("float32") for shape in shapes.values()]
    return {"update": (build(params, body), values)}


def random_numbers() -> dict[str, Case]:
    """Return programs of every distribution of ``relax_grad.frontend.random``."""
    made = {
        "bits": lambda bb, seed: random.bits(bb, seed, 0, (70,)),
        "uniform": lambda bb, seed: random.uniform(bb, seed, 1, (70,)),
        "normal": lambda bb, seed: random.normal(bb, seed, 2, (70,)),
        "exponential": lambda bb, seed: random.exponential(bb, seed, 3, (70,)),
        "bernoulli": lambda bb, seed: random.bernoulli(bb, seed, 4, (70,), 0.25),
        "randint": lambda bb, seed: random.randint(bb, seed, 5, -9, 9, (70,)),
    }
    seed = [np.array(11, "int64")]
    return {name: (build([tensor("seed", (), "int64")], body), seed) for name, body in made.items()}
