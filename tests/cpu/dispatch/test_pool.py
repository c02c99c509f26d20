"""Pooling of planes becomes kernels, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from tvm import relax, tirx

import relax_grad  # noqa: F401  (corrects the operators)

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")
CASES = {
    "overlapping": ({"pool_size": (3, 3), "strides": (2, 2), "padding": (1, 1)}, (9, 11), (5, 6)),
    "cut off": (
        {"pool_size": (2, 3), "strides": (2, 1), "padding": (0, 1, 1, 0), "ceil_mode": True},
        (9, 11),
        (5, 10),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [2, N])
def test_kernels(case, batch):
    attrs, size, out_size = CASES[case]
    x = tensor("x", (batch, 3, *size), "float32")
    dy = tensor("dy", (batch, 3, *out_size), "float32")
    values = [RNG.normal(size=(2, 3, *extents)).astype("float32") for extents in (out_size, size)]
    module = build([x], lambda x: relax.op.nn.max_pool2d(x, **attrs))
    check_dispatch(module, "main", values[1:], ["nn_max_pool2d_kernel"])
    for kind, more in (
        ("max", {}),
        ("avg", {"count_include_pad": True}),
        ("avg", {"count_include_pad": False}),
    ):
        backward = getattr(relax.op.grad, f"{kind}_pool2d_backward")
        module = build([dy, x], lambda dy, x, f=backward, m=more: f(dy, x, **attrs, **m))
        check_dispatch(module, "main", values, [f"grad_{kind}_pool2d_backward_kernel"])
        if kind == "avg":
            module = build([x], lambda x, m=more: relax.op.nn.avg_pool2d(x, **attrs, **m))
            check_dispatch(module, "main", values[1:], ["nn_avg_pool2d_kernel"])


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(kind, rank):
    attrs = {"pool_size": 3, "strides": 2, "padding": 1, "ceil_mode": True}
    shapes = (2, 6, *(5, 6, 8)[-rank:]), (2, 6, *(3, 4, 5)[-rank:])
    x, dy = (
        tensor("x", (N, *shapes[0][1:]), "float32"),
        tensor("dy", (N, *shapes[1][1:]), "float32"),
    )
    values = [RNG.normal(size=shape).astype("float32") for shape in shapes]
    forward = getattr(relax.op.nn, f"{kind}_pool{rank}d")
    backward = getattr(relax.op.grad, f"{kind}_pool{rank}d_backward")
    module = build([x], lambda x: forward(x, **attrs))
    check_dispatch(module, "main", values[:1], [f"nn_{kind}_pool{rank}d_kernel"])
    module = build([dy, x], lambda dy, x: backward(dy, x, **attrs))
    check_dispatch(module, "main", values[::-1], [f"grad_{kind}_pool{rank}d_backward_kernel"])


@pytest.mark.parametrize(
    "attrs",
    [{"layout": "NHWC"}, {"strides": (5, 5)}, {"padding": (3, 3)}],
    ids=str,
)
def test_unsupported_layouts_strides_and_padding_have_no_kernel(attrs):
    x = tensor("x", (2, 9, 9, 9), "float32")
    module = build([x], lambda x: relax.op.nn.max_pool2d(x, (3, 3), **attrs))
    assert kernels_in(module) == []


@pytest.mark.parametrize("with_forward", [False, True])
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize(
    ("grad", "data", "expected"),
    [
        ((1, 1, 1, 1), (8, 8, 9, 9), r"\(8, 8, 7, 7\)"),
        ((tirx.Var("m", "int64"), 8, 7, 7), (N, 8, 9, 9), r"\(n, 8, 7, 7\)"),
    ],
)
def test_an_output_gradient_of_another_shape_is_refused(grad, data, expected, kind, with_forward):
    """TVM infers the types of these two calls without checking its shape, and a kernel would read
    out of bounds."""
    forward = getattr(relax.op.nn, f"{kind}_pool2d")
    backward = getattr(relax.op.grad, f"{kind}_pool2d_backward")

    def body(dy, x):
        dx = backward(dy, x, (3, 3))
        return relax.Tuple([forward(x, (3, 3)), dx]) if with_forward else dx

    module = build([tensor("dy", grad, "float32"), tensor("x", data, "float32")], body)
    message = f"relax.grad.{kind}_pool2d_backward: output_grad must have the shape {expected}"
    with pytest.raises(ValueError, match=message):
        kernels_in(module)
