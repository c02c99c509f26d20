"""Legalization of pooling and its backward operators: checks, default attributes and
corrections."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import run
from sweep import TARGET
from tvm import relax, tirx

M, N = (tirx.Var(name, "int64") for name in "mn")
BACKWARD = [relax.op.grad.max_pool2d_backward, relax.op.grad.avg_pool2d_backward]


def tensor(*shape, name="x"):
    return relax.Var(name, relax.TensorType(list(shape), "float32"))


def module_of(make, grad, data, *attrs, **named):
    bb = relax.BlockBuilder()
    with bb.function("main", [grad, data]):
        with bb.dataflow():
            out = bb.emit_output(make(grad, data, *attrs, **named))
        bb.emit_func_output(out)
    return bb.get()


@pytest.mark.parametrize("make", BACKWARD)
@pytest.mark.parametrize(
    ("grad", "data", "attrs", "message"),
    [
        ((1, 2, 2, 2), (1, 2, 6, 6), {}, r"output_grad must have the shape \(1, 2, 3, 3\)"),
        (
            (M, 2, 3, 3),
            (N, 2, 6, 6),
            {},
            r"\(n, 2, 3, 3\) .* it has \(m, 2, 3, 3\), which may differ",
        ),
        ((2, 3, 3), (1, 2, 6, 6), {}, "output_grad must have 4 dimensions"),
        ((1, 2, 3, 3), (2, 6, 6), {}, "do not fit relax.nn.max_pool2d"),
        ((1, 2, 3, 3, 4), (1, 2, 6, 6, 4), {"layout": "NCHW4h"}, "layout must have the axes"),
        ((1, 2, 3, 3), (1, 2, 6, 6), {"strides": [0, 2]}, "strides must be positive"),
        ((1, 2, 3, 3), (1, 2, 6, 6), {"strides": [2, 2, 2]}, "strides must hold 1 or 2 integers"),
        ((1, 2, 3, 3), (1, 2, 6, 6), {"padding": [0, 0, 0]}, "padding must hold 1 or 2 or 4"),
    ],
)
def test_refuses(make, grad, data, attrs, message):
    attrs = {"pool_size": [2, 2], "strides": [2, 2], **attrs}
    module = module_of(make, tensor(*grad, name="g"), tensor(*data), **attrs)
    with pytest.raises(ValueError, match=message) as caught:
        relax.transform.LegalizeOps()(module)
    assert f"relax.grad.{make.__name__}" in str(caught.value)


@pytest.mark.parametrize("make", BACKWARD)
def test_attributes_are_completed_as_those_of_the_forward_operator(make):
    def legalized(*attrs):
        module = module_of(make, tensor(1, 2, 4, 4, name="g"), tensor(1, 2, 6, 6), *attrs)
        return relax.transform.LegalizeOps()(module)

    short, full = legalized([2], [2], [1], [1]), legalized([2] * 2, [2] * 2, [1] * 4, [1] * 2)
    tvm.ir.assert_structural_equal(short, full)


@pytest.mark.parametrize("make", BACKWARD)
def test_symbolic_extents(make):
    """One compiled module serves every extent."""
    n, h = tirx.Var("n", "int64"), tirx.Var("h", "int64")
    data = tensor(n, 1, h, 5)
    attrs = {"pool_size": [3, 2], "strides": [2, 3], "padding": [1, 1, 0, 1]}
    forward = relax.BlockBuilder().normalize(relax.op.nn.max_pool2d(data, **attrs)).ty
    module = module_of(make, relax.Var("g", forward), data, **attrs)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    rng = np.random.default_rng(0)
    for size in ((1, 6), (3, 9), (2, 2)):
        shape = (size[0], 1, size[1], 5)
        static = tensor(*shape)
        grad_type = relax.BlockBuilder().normalize(relax.op.nn.max_pool2d(static, **attrs)).ty
        x = rng.normal(size=shape).astype("float32")
        g = rng.normal(size=[int(d) for d in grad_type.shape.values]).astype("float32")
        fixed = module_of(make, relax.Var("g", grad_type), static, **attrs)
        expected = relax.VirtualMachine(tvm.compile(fixed, target=TARGET), tvm.cpu())
        inputs = [tvm.runtime.tensor(value) for value in (g, x)]
        np.testing.assert_allclose(
            machine["main"](*inputs).numpy(), expected["main"](*inputs).numpy(), rtol=1e-6
        )


def forward_module(name, data, **attrs):
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(data.shape, data.dtype.name))
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(bb.emit(getattr(relax.op.nn, name)(x, **attrs)))
        bb.emit_func_output(out)
    return bb.get()


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_pooling_to_another_layout(kind, rank):
    """TVM's legalization leaves the call unchanged."""
    name, spatial = f"{kind}_pool{rank}d", "DHW"[-rank:]
    layout, out_layout = f"N{spatial[::-1]}C", f"C{spatial}N"
    data = np.random.default_rng(0).normal(size=(2, *(5, 4, 3)[:rank], 3))
    attrs = {"output_size": (2, 1, 3)[:rank]}
    if kind != "adaptive_avg":
        sizes = {"pool_size": (2, 3, 1)[:rank], "strides": (1, 2, 2)[:rank]}
        attrs = {**sizes, "padding": (1, 0, 0, 0, 1, 0)[: 2 * rank], "ceil_mode": True}
    if kind == "avg":
        attrs["count_include_pad"] = True
    same = run(forward_module(name, data, layout=layout, **attrs), "main", data)
    expected = same.transpose([layout.index(axis) for axis in out_layout])
    module = forward_module(name, data, layout=layout, out_layout=out_layout, **attrs)
    np.testing.assert_array_equal(run(module, "main", data), expected)


@pytest.mark.parametrize("out_layout", [None, "NWC"])
def test_adaptive_avg_pool1d_without_an_output_size(out_layout):
    data = np.random.default_rng(0).normal(size=(2, 3, 4))
    module = forward_module("adaptive_avg_pool1d", data, out_layout=out_layout)
    expected = data.transpose(0, 2, 1) if out_layout else data
    np.testing.assert_array_equal(run(module, "main", data), expected)


@pytest.mark.parametrize(
    ("extent", "windows"), [("h", 1), ("h", 2), ("h", 5), ("h", None), (6, 4), (1, 3), (4, 4)]
)
def test_adaptive_avg_pool_backward_at_several_extents(torch, extent, windows):
    """One compiled module serves every extent, including the empty one."""
    n = tirx.Var("n", "int64")
    height = tirx.Var("h", "int64") if extent == "h" else extent
    make = relax.op.grad.adaptive_avg_pool1d_backward
    grad = tensor(n, 2, windows or height, name="g")
    module = module_of(make, grad, tensor(n, 2, height), output_size=windows)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 3, 7, 10) if extent == "h" else (extent,):
        data = rng.normal(size=(3, 2, size)).astype("float32")
        grad = rng.normal(size=(3, 2, windows or size)).astype("float32")
        output = machine["main"](*map(tvm.runtime.tensor, (grad, data))).numpy()
        assert output.shape == data.shape
        if size:
            leaf = torch.from_numpy(data).requires_grad_()
            result = torch.nn.functional.adaptive_avg_pool1d(leaf, windows or size)
            (expected,) = torch.autograd.grad(result, leaf, torch.from_numpy(grad))
            np.testing.assert_allclose(output, expected.numpy(), rtol=1e-6, atol=1e-6)
