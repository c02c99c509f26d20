"""The gradients of pooling's backward operators."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax
from tvm.relax.op import grad as backward
from versions import UNEVEN_WINDOWS

from relax_grad.testing import check_gradients

ATTRS = {"pool_size": [3, 2], "strides": [2, 2], "padding": [1, 0, 0, 1]}
SHAPE, OUT_SHAPE = (2, 2, 6, 5), (2, 2, 3, 3)


def apply(builder, first, data, **attrs):
    params = [
        relax.Var(name, relax.TensorType(value.shape, value.dtype.name))
        for name, value in (("first", first), ("data", data))
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(builder(*params, **attrs))
        bb.emit_func_output(out)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), target=TARGET), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(first), tvm.runtime.tensor(data)).numpy()


def of_rank(rank):
    """Return the attributes, the shape of the data and the shape of the result."""
    attrs = {
        "pool_size": [3, 2, 1][:rank],
        "strides": [2, 2, 3][:rank],
        "padding": [[1, 0], [1, 0, 0, 1], [1, 0, 0, 0, 1, 0]][rank - 1],
    }
    return attrs, (2, 2, 6, 5, 4)[: rank + 2], (2, 2, 3, 3, 2)[: rank + 2]


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_max_pool_jvp_is_the_transpose(kind, rank):
    """For ties and NaN too, both choose the same element."""
    attrs, shape, out_shape = of_rank(rank)
    rng = np.random.default_rng(0)
    data = {
        "normal": rng.normal(size=shape),
        "ties": rng.integers(0, 2, shape).astype("float64"),
        "special": rng.choice([0.0, np.nan, np.inf, -np.inf], shape),
    }[kind]
    tangent, grad = rng.normal(size=shape), rng.normal(size=out_shape)
    pushed = apply(getattr(backward, f"max_pool{rank}d_jvp"), tangent, data, **attrs)
    pulled = apply(getattr(backward, f"max_pool{rank}d_backward"), grad, data, **attrs)
    np.testing.assert_allclose((pushed * grad).sum(), (tangent * pulled).sum(), rtol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_pool_jvp_is_the_derivative(rank):
    attrs, shape, _ = of_rank(rank)
    pool = getattr(relax.op.nn, f"max_pool{rank}d")
    rng = np.random.default_rng(0)
    data, tangent = rng.normal(size=shape), rng.normal(size=shape)
    step = 1e-6
    ends = [
        apply(lambda _, x: pool(x, **attrs), data, data + sign * step * tangent) for sign in (1, -1)
    ]
    tangent_of_result = apply(getattr(backward, f"max_pool{rank}d_jvp"), tangent, data, **attrs)
    np.testing.assert_allclose(
        tangent_of_result, (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-9
    )


each_pooling = pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param(
            kind, rank, marks=UNEVEN_WINDOWS if (kind, rank) == ("adaptive_avg", 3) else ()
        )
        for kind in ("max", "avg", "adaptive_avg")
        for rank in (1, 2, 3)
    ],
)


@each_pooling
def test_third_order(kind, rank):
    """The test differentiates a function whose third derivative is not 0: the cube of a pooling of
    a product."""
    attrs = {"output_size": (3, 2, 1)[:rank]} if kind == "adaptive_avg" else of_rank(rank)[0]

    def cube(x, w):
        builder = getattr(relax.op.nn, f"{kind}_pool{rank}d")
        pooled = builder(relax.op.multiply(x, w), **attrs)
        return relax.op.multiply(pooled, relax.op.multiply(pooled, pooled))

    rng = np.random.default_rng(0)
    shape = (1, 1, 4, 3, 2)[: rank + 2]
    check_gradients(cube, [rng.normal(size=shape), rng.normal(size=shape)], order=3)


@pytest.mark.parametrize("op", ["relax.nn.max_pool2d", "relax.nn.avg_pool2d"])
def test_symbolic_third_order(op):
    def cube(x, w):
        builder = getattr(relax.op.nn, op.rpartition(".")[2])
        pooled = builder(relax.op.multiply(x, w), **ATTRS)
        return relax.op.multiply(pooled, relax.op.multiply(pooled, pooled))

    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(2, 1, 4, 3)), rng.normal(size=(2, 1, 4, 3))]
    symbolic = {i: {0: "n", 2: "h"} for i in range(2)}
    check_gradients(cube, inputs, order=3, symbolic=symbolic)


@pytest.mark.parametrize("name", ["max_pool2d_backward", "avg_pool2d_backward", "max_pool2d_jvp"])
def test_partial_has_the_dtype_of_its_argument(name):
    """The dtypes of the two arguments differ in these direct calls."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=SHAPE if name.endswith("jvp") else OUT_SHAPE)
    inputs = [first.astype("float16"), rng.permutation(120).reshape(SHAPE).astype("float32")]
    check_gradients(f"relax.grad.{name}", inputs, wrt=[0], order=2, **ATTRS)


def layouts_of(kind, rank, split):
    """Return the attributes and the stored shape of the data, for a pooling between different
    layouts."""
    spatial, extents = "DHW"[-rank:], (4, 3, 2)[:rank]
    attrs = {"output_size": (3, 2, 1)[:rank]} if kind == "adaptive_avg" else of_rank(rank)[0]
    layout, out_layout = f"N{spatial}C2c", f"NC{spatial}4c"
    if not split:
        layout, out_layout = f"N{spatial}C", f"C{spatial}N"
    shape = (1, *extents, 3, 2) if split else (1, *extents, 3)
    return {**attrs, "layout": layout, "out_layout": out_layout}, shape


@each_pooling
def test_second_order_of_split_channels(kind, rank):
    """The number of channels is not divisible by the part that the result's layout splits off."""
    attrs, shape = layouts_of(kind, rank, split=True)
    data = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / 10
    check_gradients(f"relax.nn.{kind}_pool{rank}d", [data], order=2, **attrs)


@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_symbolic_number_of_split_channels(kind):
    attrs, shape = layouts_of(kind, 1, split=True)
    data = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / 10
    symbolic = {0: {0: "n", 2: "c"}}
    check_gradients(f"relax.nn.{kind}_pool1d", [data], order=2, symbolic=symbolic, **attrs)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_the_second_order_is_one_operator(kind, rank, split, partials_of):
    """It gathers along the same windows in the same layouts: the jvp for a maximum, the pooling for
    an average."""
    attrs, shape = layouts_of(kind, rank, split)
    data = relax.TensorType(shape, "float32")
    pool = getattr(relax.op.nn, f"{kind}_pool{rank}d")
    result = relax.BlockBuilder().normalize(pool(relax.Var("x", data), **attrs))
    name = f"{kind}_pool{rank}d"
    builder = getattr(backward, f"{name}_backward")
    rule = tvm.ir.Op.get(f"relax.grad.{name}_backward").get_attr("FPrimalGradient")
    body = partials_of(lambda g, x: builder(g, x, **attrs), rule, [result.ty, data]).body
    calls = [binding.value for block in body.blocks for binding in block.bindings]
    call, *others = (call for call in calls if isinstance(call, relax.Call))
    assert call.op.name == (f"relax.grad.{name}_jvp" if kind == "max" else f"relax.nn.{name}")
    tvm.ir.assert_structural_equal(call.attrs, result.attrs)
    tvm.ir.assert_structural_equal(call.ty, result.ty)
    assert [call.op.name for call in others] == ["relax.grad.no_grad"]
