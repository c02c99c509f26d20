"""Which matrix products become kernels, and that the numbers do not change."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import check_dispatch, kernels_in
from programs import build, tensor
from tvm import relax, tirx
from tvm.relax import op

import relax_grad

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")
KERNEL = "matmul_kernel"


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def product(a, b, transpose=()):
    """Return the module of a product of two parameters; ``transpose`` names those to transpose
    first."""

    def body(bb, *factors):
        swapped = []
        for i, factor in enumerate(factors):
            axes = list(range(factor.ty.ndim))
            axes[-2:] = axes[:-3:-1]
            swapped.append(bb.emit(op.permute_dims(factor, axes)) if i in transpose else factor)
        return op.matmul(*swapped)

    return build([tensor("a", a, "float32"), tensor("b", b, "float32")], body)


@pytest.mark.parametrize("transpose", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((17, 17), (17, 17)),
        ((2, 3, 9, 9), (2, 3, 9, 9)),
        ((2, 3, 9, 9), (9, 9)),
        ((9, 9), (4, 9, 9)),
        ((N, 9, 9), (N, 9, 9)),
        ((N, 9, 9), (9, 9)),
    ],
)
def test_products(a, b, transpose):
    values = [normal(*(5 if d is N else d for d in shape)) for shape in (a, b)]
    check_dispatch(product(a, b, transpose), "main", values, [KERNEL])


@pytest.mark.parametrize(
    ("a", "b"),
    [((5,), (5, 3)), ((3, 5), (5,)), ((2, 3, 5), (1, 5, 4)), ((0, 5), (5, 4)), ((4, 0), (0, 4))],
)
def test_vectors_broadcast_batches_and_empty_matrices_have_no_kernel(a, b):
    check_dispatch(product(a, b), "main", [normal(*a), normal(*b)], [])


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_dtypes_have_no_kernel(dtype):
    module = build([tensor(n, (3, 3), dtype) for n in "ab"], lambda bb, a, b: op.matmul(a, b))
    assert kernels_in(module) == []


def test_a_gradient_step():
    """Forward and both gradients of a linear layer with a symbolic batch: three kernels, no
    transposes."""
    params = [tensor("x", (N, 20), "float32"), tensor("w", (7, 20), "float32")]

    def body(bb, x, w):
        y = bb.emit(op.linear(x, w))
        return op.sum(bb.emit(op.multiply(y, y)))

    module = relax_grad.value_and_grad(build(params, body))
    del module["main"]
    check_dispatch(module, "main_adjoint", [normal(5, 20), normal(7, 20)], [KERNEL] * 3)
    dispatched = relax_grad.transform.DispatchKernels(relax_grad.target.host())(module)
    assert "permute_dims" not in dispatched["main_adjoint"].script()


def test_equal_calls_share_a_kernel():
    def body(bb, a, b):
        first = bb.emit(op.matmul(a, b))
        return op.matmul(bb.emit(op.matmul(b, first)), a)

    module = build([tensor(name, (8, 8), "float32") for name in "ab"], body)
    assert len(set(kernels_in(module))) == 1
    assert len(kernels_in(module)) == 3


def test_a_target_that_llvm_does_not_compile_for():
    module = product((4, 4), (4, 4))
    assert kernels_in(module, "c") == []
    assert isinstance(module["main"], relax.Function)
