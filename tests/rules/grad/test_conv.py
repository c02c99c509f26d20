"""Gradients of the backward operators of convolution."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax.op import grad as backward

from relax_grad.testing import check_against_torch, check_gradients

DATA, WEIGHT, OUTPUT = (2, 4, 7, 6), (6, 2, 3, 2), (2, 6, 4, 2)
ATTRS = {"strides": (2, 3), "padding": (1, 0, 1, 0), "dilation": (1, 2), "groups": 2}


def normal(*shapes, dtype="float64"):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def transpose(array, plain, layout):
    return array.transpose([plain.index(name) for name in layout])


def test_same_as_torch(torch):
    grad, data, weight = normal(OUTPUT, DATA, WEIGHT)
    geometry = ((2, 3), (1, 0), (1, 2), 2)
    check_against_torch(
        lambda g, w: backward.conv2d_backward_data(g, DATA, w, **ATTRS),
        [grad, weight],
        lambda torch, g, w: torch.nn.grad.conv2d_input(DATA, w, g, *geometry),
    )
    check_against_torch(
        lambda g, x: backward.conv2d_backward_weight(g, x, WEIGHT, **ATTRS),
        [grad, data],
        lambda torch, g, x: torch.nn.grad.conv2d_weight(x, WEIGHT, g, *geometry),
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_same_as_torch_at_other_ranks(torch, rank):
    data, weight, output = (2, 4, 7, 4, 3), (6, 2, 3, 1, 2), (2, 6, 4, 2, 3)
    data, weight, output = (shape[: rank + 2] for shape in (data, weight, output))
    geometry = ((2, 3, 1)[:rank], (1, 1, 1)[:rank], (1, 2, 2)[:rank], 2)
    attrs = dict(zip(("strides", "padding", "dilation", "groups"), geometry, strict=True))
    names = f"conv{rank}d_backward_data", f"conv{rank}d_backward_weight"
    backward_data, backward_weight = (getattr(backward, name) for name in names)
    torch_data, torch_weight = (
        getattr(torch.nn.grad, f"conv{rank}d_{name}") for name in ("input", "weight")
    )
    grad, x, w = normal(output, data, weight)
    check_against_torch(
        lambda g, w: backward_data(g, data, w, **attrs),
        [grad, w],
        lambda torch, g, w: torch_data(data, w, g, *geometry),
    )
    check_against_torch(
        lambda g, x: backward_weight(g, x, weight, **attrs),
        [grad, x],
        lambda torch, g, x: torch_weight(x, weight, g, *geometry),
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_order_2(dtype):
    grad, data, weight = normal(OUTPUT, DATA, WEIGHT, dtype=dtype)
    check_gradients("relax.grad.conv2d_backward_data", [grad, DATA, weight], order=2, **ATTRS)
    check_gradients("relax.grad.conv2d_backward_weight", [grad, data, WEIGHT], order=2, **ATTRS)


@pytest.mark.parametrize(
    ("data_layout", "kernel_layout", "out_layout"),
    [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC"), ("CWNH", "IWHO", "HNCW")],
)
def test_layouts(data_layout, kernel_layout, out_layout):
    """The cases include an out_layout that differs from the data's layout."""
    layouts = {
        "data_layout": data_layout,
        "kernel_layout": kernel_layout,
        "out_layout": out_layout,
    }
    grad, data, weight = normal(OUTPUT, DATA, WEIGHT)
    grad = transpose(grad, "NCHW", out_layout)
    data = transpose(data, "NCHW", data_layout)
    weight = transpose(weight, "OIHW", kernel_layout)
    operator = "relax.grad.conv2d_backward_data"
    check_gradients(operator, [grad, data.shape, weight], **ATTRS, **layouts)
    operator = "relax.grad.conv2d_backward_weight"
    check_gradients(operator, [grad, data, weight.shape], **ATTRS, **layouts)


@pytest.mark.parametrize(
    ("shape", "through"),
    [
        (relax.op.shape_of, "relax_grad"),
        (relax.op.shape_of, "tvm"),
        (lambda x: x.ty.shape, "relax_grad"),  # written out; TVM's pass cannot differentiate it
    ],
    ids=["read", "read, through tvm", "written out"],
)
def test_symbolic_shapes_at_order_2(shape, through):
    grad, data, weight = normal(OUTPUT, DATA, WEIGHT)
    symbolic = {0: {0: "n"}, 1: {0: "n"}}

    def backward_data(g, x, w):
        return backward.conv2d_backward_data(g, shape(x), w, **ATTRS)

    def backward_weight(g, x, w):
        return backward.conv2d_backward_weight(g, x, shape(w), **ATTRS)

    inputs = [grad, data, weight]
    settings = {"order": 2, "symbolic": symbolic, "through": through}
    check_gradients(backward_data, inputs, wrt=[0, 2], **settings)
    check_gradients(backward_weight, inputs, wrt=[0, 1], **settings)


def test_dtypes_of_their_own():
    """Each gradient has the dtype of its argument; check_gradients compares the types."""
    grad, data, weight = normal(OUTPUT, DATA, WEIGHT, dtype="float16")
    attrs = {**ATTRS, "out_dtype": "float32"}
    check_gradients("relax.grad.conv2d_backward_data", [grad, DATA, weight], **attrs)
    check_gradients("relax.grad.conv2d_backward_weight", [grad, data, WEIGHT], **attrs)
