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


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_max_pool2d_jvp_is_the_transpose(kind):
    """Of ties and NaN too, both choose the same element."""
    rng = np.random.default_rng(0)
    data = {
        "normal": rng.normal(size=SHAPE),
        "ties": rng.integers(0, 2, SHAPE).astype("float64"),
        "special": rng.choice([0.0, np.nan, np.inf, -np.inf], SHAPE),
    }[kind]
    tangent, grad = rng.normal(size=SHAPE), rng.normal(size=OUT_SHAPE)
    pushed = apply(backward.max_pool2d_jvp, tangent, data, **ATTRS)
    pulled = apply(backward.max_pool2d_backward, grad, data, **ATTRS)
    np.testing.assert_allclose((pushed * grad).sum(), (tangent * pulled).sum(), rtol=1e-12)


def test_max_pool2d_jvp_is_the_derivative():
    rng = np.random.default_rng(0)
    data, tangent = rng.normal(size=SHAPE), rng.normal(size=SHAPE)
    step = 1e-6
    ends = [
        apply(lambda _, x: relax.op.nn.max_pool2d(x, **ATTRS), data, data + sign * step * tangent)
        for sign in (1, -1)
    ]
    found = apply(backward.max_pool2d_jvp, tangent, data, **ATTRS)
    np.testing.assert_allclose(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("op", ["relax.nn.max_pool2d", "relax.nn.avg_pool2d"])
def test_third_order(op):
    """Of a function whose third derivative is not 0: the cube of a pooling of a product."""

    def cube(x, w):
        builder = getattr(relax.op.nn, op.rpartition(".")[2])
        pooled = builder(relax.op.multiply(x, w), **ATTRS)
        return relax.op.multiply(pooled, relax.op.multiply(pooled, pooled))

    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(1, 1, 4, 3)), rng.normal(size=(1, 1, 4, 3))]
    check_gradients(cube, inputs, order=3)


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
