"""Recurrent layers become kernels: the calls that do, and those that do not."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import HOST, check_dispatch, kernels_in
from machines import of_halves
from tvm import relax, tirx
from tvm.relax.op import grad as backward

from relax_grad.testing._program import numpy_dtype
from relax_grad.transform import DispatchKernels, Gradient

T, B, H = (tirx.Var(name, "int64") for name in "tbh")


def lstm(steps, batch, size, dtype="float32"):
    shapes = [(steps, batch, 4 * size), (batch, size), (batch, size), (4 * size, size)]
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    return build(params, backward.lstm)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_symbolic_steps_and_batch(dtype, rtol):
    rng = np.random.default_rng(0)
    shapes = [(4, 3, 20), (3, 5), (3, 5), (20, 5)]
    values = [rng.normal(size=shape).astype(numpy_dtype(dtype)) for shape in shapes]
    check_dispatch(lstm(T, B, 5, dtype), "main", values, ["grad_lstm_kernel"], rtol)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_needs_no_casts(dtype):
    module = DispatchKernels(HOST)(lstm(3, 2, 5, dtype))
    assert kernels_in(module) == ["grad_lstm_kernel"]
    assert "astype" not in module.script()


def test_layers_of_float32_keep_the_casts_of_their_operands():
    """A kernel of bfloat16 may round the states that it multiplies."""
    shapes = [(3, 2, 20), (2, 5), (2, 5), (20, 5)]
    params = [tensor(f"x{i}", shape, "bfloat16") for i, shape in enumerate(shapes)]

    def widened(*arguments):
        return backward.lstm(*(relax.op.astype(x, "float32") for x in arguments))

    module = DispatchKernels(HOST)(build(params, widened))
    assert module.script().count("R.astype") == 4


@pytest.mark.parametrize(
    "module",
    [
        lstm(3, 2, 5, "float64"),
        lstm(3, 2, H),
        lstm(0, 2, 5),
        lstm(3, 2, 9000),
        lstm(2**13, 2**8, 2**8 - 20),
    ],
    ids=["float64", "a symbolic size", "no steps", "a large weight", "slopes beyond int32"],
)
def test_calls_without_a_kernel(module):
    assert "grad_lstm_kernel" not in kernels_in(DispatchKernels(HOST)(module))


def test_slopes_that_nothing_reads_are_not_written():
    """The results of a tuple that leaves the block are all written."""
    shapes = [(3, 2, 20), (2, 5), (2, 5), (20, 5)]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float32") for shape in shapes]
    functions = []
    for elements in ([0], [0, 2], None):

        def chosen(*arguments, elements=elements):
            results = backward.lstm(*arguments)
            if elements is None:
                return results
            bound = relax.BlockBuilder.current().emit(results)
            parts = [relax.TupleGetItem(bound, i) for i in elements]
            return parts[0] if len(parts) == 1 else relax.Tuple(parts)

        params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
        module = build(params, chosen)
        check_dispatch(module, "main", values, ["grad_lstm_kernel"], 1e-5)
        functions.append(DispatchKernels(HOST)(module)["grad_lstm_kernel"].script())
    lengths = [len(text.splitlines()) for text in functions]
    assert lengths[0] < lengths[1] < lengths[2]


def test_all_products_of_a_step_are_in_tiles():
    """Of a layer and of its gradients: with each step's state, and over all steps (AMX)."""
    target, shapes = of_halves("amx"), [(8, 40, 64), (64, 192), (40, 48), (40, 48), (192, 48)]
    params = [tensor(f"x{i}", shape, "bfloat16") for i, shape in enumerate(shapes)]

    def loss(data, own, *others):
        product = relax.BlockBuilder.current().emit(relax.op.matmul(data, own))
        states = relax.BlockBuilder.current().emit(backward.lstm(product, *others))
        return relax.op.mean(relax.op.astype(relax.TupleGetItem(states, 0), "float32"))

    module = DispatchKernels(target)(Gradient("main")(build(params, loss)))
    products = "matmul", "lstm", "recurrent"
    kernels = [
        function
        for variable, function in module.functions_items()
        if any(name in variable.name_hint for name in products)
    ]
    assert len(kernels) >= 5
    assert all("relax_grad_tiles_add" in str(kernel) for kernel in kernels)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_steps_before_are_copied(dtype):
    rng = np.random.default_rng(0)
    shapes, symbolic = [(4, 3, 5), (3, 5)], [(T, B, 5), (B, 5)]
    values = [rng.normal(size=shape).astype(numpy_dtype(dtype)) for shape in shapes]
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(symbolic)]
    module = build(params, backward.previous_steps)
    check_dispatch(module, "main", values, ["grad_previous_steps_kernel"], rtol=0)
