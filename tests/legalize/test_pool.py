"""What the legalizations of TVM's own backward operators of pooling check and complete."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

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
        ((2, 3, 3), (1, 2, 6, 6), {}, "output_grad must have 4 dimensions"),
        ((1, 2, 3, 3), (2, 6, 6), {}, "do not fit relax.nn.max_pool2d"),
        ((1, 2, 3, 3, 4), (1, 2, 6, 6, 4), {"layout": "NCHW4c"}, "layout must be a permutation"),
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
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    rng = np.random.default_rng(0)
    for size in ((1, 6), (3, 9), (2, 2)):
        shape = (size[0], 1, size[1], 5)
        static = tensor(*shape)
        grad_type = relax.BlockBuilder().normalize(relax.op.nn.max_pool2d(static, **attrs)).ty
        x = rng.normal(size=shape).astype("float32")
        g = rng.normal(size=[int(d) for d in grad_type.shape.values]).astype("float32")
        fixed = module_of(make, relax.Var("g", grad_type), static, **attrs)
        expected = relax.VirtualMachine(tvm.compile(fixed, target="llvm"), tvm.cpu())
        inputs = [tvm.runtime.tensor(value) for value in (g, x)]
        np.testing.assert_allclose(
            machine["main"](*inputs).numpy(), expected["main"](*inputs).numpy(), rtol=1e-6
        )
