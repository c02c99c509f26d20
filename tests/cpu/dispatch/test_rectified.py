"""Kernels of normalisations apply a ReLU behind them, with the bits of a separate call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from dispatched import HOST, kernels_in
from programs import build, run, tensor
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

import relax_grad
from relax_grad.ir.dtypes import HALVES
from relax_grad.transform import DispatchKernels

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def relu(bb, x):
    return op.nn.relu(x)


def selection(bb, x):
    """ReLU as imported models have it."""
    zero = relax.const(0.0, x.ty.dtype)
    return op.where(bb.emit(op.less_equal(x, zero)), zero, x)


def batch_norm(bb, x, *parameters):
    return bb.emit(bb.emit(op.nn.batch_norm(x, *parameters, 1, training=True))[0])


#: The shapes of the operands, and the normalisation.
NORMS: dict[str, tuple[list, Callable]] = {
    "batch_norm": ([(3, 5, 7, 9), (5,), (5,), (5,), (5,)], batch_norm),
    "batch_norm of symbolic batches": ([(N, 6, 21), (6,), (6,), (6,), (6,)], batch_norm),
    "group_norm": (
        [(2, 6, 3, 11), (6,), (6,)],
        lambda bb, *x: bb.emit(op.nn.group_norm(*x, 3, 1, [2, 3])),
    ),
    "instance_norm": (
        [(2, 5, 4, 8), (5,), (5,)],
        lambda bb, *x: bb.emit(op.nn.instance_norm(*x, 1, [2, 3])),
    ),
    "layer_norm": (
        [(4, 3, 37), (37,), (37,)],
        lambda bb, *x: bb.emit(op.nn.layer_norm(*x, [-1])),
    ),
}


def calls_in(module, name="main"):
    """Return the names of the operators that remain beside kernels."""
    return [
        binding.value.op.name.removeprefix("relax.")
        for block in DispatchKernels(HOST)(module)[name].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op != Op.get("relax.call_tir")
    ]


def values_of(shapes):
    return [
        RNG.uniform(0.5, 2.0, shape).astype("float32")
        if len(shape) == 1
        else RNG.normal(size=[4 if extent is N else extent for extent in shape]).astype("float32")
        for shape in shapes
    ]


def module_of(shapes, body):
    return build([tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)], body)


@pytest.mark.parametrize("behind", [relu, selection])
def test_the_kernel_applies_relu(behind):
    for name, (shapes, norm) in NORMS.items():
        module = module_of(shapes, lambda bb, *x, norm=norm: behind(bb, norm(bb, *x)))
        plain = module_of(shapes, lambda bb, *x, norm=norm: norm(bb, *x))
        assert len(kernels_in(module)) == 1, name
        assert calls_in(module) == [], name
        values = values_of(shapes)
        ours, before = (
            run(mod, "main", *values, target=HOST, pipeline="relax_grad") for mod in (module, plain)
        )
        wanted = np.where(before <= 0, np.float32(0), before)
        assert ours.tobytes() == wanted.tobytes(), name


def test_a_mask_behind_it_and_nan():
    """Comparisons with 0 read the result; a channel with NaN stays NaN."""
    shapes, norm = NORMS["batch_norm"]
    zero = relax.const(0.0, "float32")

    def body(bb, *x):
        y = norm(bb, *x)
        masks = [bb.emit(op.greater(y, zero)), bb.emit(op.less_equal(y, zero))]
        return relax.Tuple([bb.emit(op.nn.relu(y)), *masks])

    module = module_of(shapes, body)
    assert sorted(calls_in(module)) == ["greater", "less_equal"]
    values = values_of(shapes)
    values[0][1, 2, 3, 4] = np.nan
    result, is_open, is_closed = run(module, "main", *values, target=HOST, pipeline="relax_grad")
    before = run(module_of(shapes, norm), "main", *values, target=HOST, pipeline="relax_grad")
    assert np.isnan(result[:, 2]).all()
    np.testing.assert_array_equal(is_open, before > 0)
    np.testing.assert_array_equal(is_closed, before <= 0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("behind", [relu, selection])
def test_relu_behind_a_cast(behind, dtype):
    """Normalisations of networks in half precision round their results before ReLU; a cast with
    another use keeps it."""
    for name, (shapes, norm) in NORMS.items():

        def rounded(bb, *x, norm=norm):
            return bb.emit(op.astype(norm(bb, *x), dtype))

        module = module_of(shapes, lambda bb, *x: behind(bb, rounded(bb, *x)))
        kept = module_of(
            shapes, lambda bb, *x: relax.Tuple([bb.emit(behind(bb, y := rounded(bb, *x))), y])
        )
        assert len(kernels_in(module)) == 1, name
        assert calls_in(module) == [], name
        assert {"nn.relu", "where"} & set(calls_in(kept)), name
        values = values_of(shapes)
        ours = run(module, "main", *values, target=HOST, pipeline="relax_grad")
        wanted, _ = run(kept, "main", *values, target=HOST, pipeline="relax_grad")
        assert ours.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(lambda bb, y: op.add(bb.emit(op.nn.relu(y)), y), id="another use"),
        pytest.param(lambda bb, y: relax.Tuple([bb.emit(op.nn.relu(y)), y]), id="a result"),
        pytest.param(
            lambda bb, y: op.where(
                bb.emit(op.less_equal(y, relax.const(0.5, "float32"))),
                relax.const(0.0, "float32"),
                y,
            ),
            id="another limit",
        ),
        pytest.param(
            lambda bb, y: op.where(
                bb.emit(op.less_equal(y, relax.const(0.0, "float32"))),
                relax.const(0.5, "float32"),
                y,
            ),
            id="another number",
        ),
        pytest.param(
            lambda bb, y: op.where(
                bb.emit(op.less_equal(bb.emit(op.negative(y)), relax.const(0.0, "float32"))),
                relax.const(0.0, "float32"),
                y,
            ),
            id="another mask",
        ),
        pytest.param(
            lambda bb, y: op.nn.relu(bb.match_cast(y, y.ty)),
            id="behind a match_cast",
        ),
    ],
)
def test_other_calls_stay(behind):
    shapes, norm = NORMS["batch_norm"]
    module = module_of(shapes, lambda bb, *x: behind(bb, norm(bb, *x)))
    assert {"nn.relu", "where"} & set(calls_in(module))


def test_two_elements_of_one_tuple_keep_relu():
    """The first result is read twice, once without ReLU."""
    shapes, _ = NORMS["batch_norm"]

    def body(bb, *x):
        both = bb.emit(op.nn.batch_norm(*x, 1, training=True))
        first = bb.emit(relax.TupleGetItem(both, 0))
        second = bb.emit(relax.TupleGetItem(both, 0))
        return op.add(bb.emit(op.nn.relu(first)), second)

    assert "nn.relu" in calls_in(module_of(shapes, body))


@pytest.mark.parametrize("behind", [relu, selection])
def test_a_gradient_step(behind):
    """The kernels that a step calls, and its gradients, as TVM's pipeline computes them."""
    shapes = [(2, 3, 8, 9), (5, 3, 3, 3), (5,), (5,), (5,), (5,)]

    def body(bb, x, w, *parameters):
        y = batch_norm(bb, bb.emit(op.nn.conv2d(x, w, padding=1)), *parameters)
        y = bb.emit(behind(bb, y))
        return op.sum(bb.emit(op.multiply(y, y)))

    module = relax_grad.value_and_grad(module_of(shapes, body), "main", ["x0", "x1", "x2", "x3"])
    del module["main"]
    names = calls_in(module, "main_adjoint")
    assert "nn.relu" not in names
    assert names.count("where") == 1  # the mask of the gradient
    values = values_of(shapes)
    ours = run(module, "main_adjoint", *values, target=HOST, pipeline="relax_grad")
    stock = run(module, "main_adjoint", *values)
    for result, wanted in zip([ours[0], *ours[1]], [stock[0], *stock[1]], strict=True):
        np.testing.assert_allclose(result, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())
