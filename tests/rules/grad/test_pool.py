"""The gradients of pooling's backward operators."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.op import grad as backward

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
    machine = relax.VirtualMachine(tvm.compile(bb.get(), target="llvm"), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(first), tvm.runtime.tensor(data)).numpy()


def of_rank(rank):
    """Attributes, shape of the data and shape of the result."""
    attrs = {
        "pool_size": [3, 2, 1][:rank],
        "strides": [2, 2, 3][:rank],
        "padding": [[1, 0], [1, 0, 0, 1], [1, 0, 0, 0, 1, 0]][rank - 1],
    }
    return attrs, (2, 2, 6, 5, 4)[: rank + 2], (2, 2, 3, 3, 2)[: rank + 2]


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_max_pool_jvp_is_the_transpose(kind, rank):
    """Of ties and NaN too, both choose the same element."""
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
    found = apply(getattr(backward, f"max_pool{rank}d_jvp"), tangent, data, **attrs)
    np.testing.assert_allclose(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_third_order(kind, rank):
    """Of a function whose third derivative is not 0: the cube of a pooling of a product."""
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
    """Also where the two arguments of a direct call differ."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=SHAPE if name.endswith("jvp") else OUT_SHAPE)
    inputs = [first.astype("float16"), rng.permutation(120).reshape(SHAPE).astype("float32")]
    check_gradients(f"relax.grad.{name}", inputs, wrt=[0], order=2, **ATTRS)
