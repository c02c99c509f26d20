"""Kernel rules that inspect the producers of operands never read a tensor that has been overwritten
since."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import HOST, kernels_in
from programs import build, run, tensor
from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad
from tvm.script import tirx as T

import relax_grad
from relax_grad.ir.compat import dtype_of

RNG = np.random.default_rng(0)


@T.prim_func(private=True, s_tir=True)
def clear(A: T.Buffer((8, 8), "float32")):
    for i, j in T.grid(8, 8):
        with T.sblock("clear"):
            vi, vj = T.axis.remap("SS", [i, j])
            A[vi, vj] = T.float32(0)


@T.prim_func(private=True, s_tir=True)
def clear_indices(A: T.Buffer((8,), "int64")):
    for i in range(8):
        with T.sblock("clear"):
            vi = T.axis.remap("S", [i])
            A[vi] = T.int64(0)


def write(bb, target, written):
    """If ``written``, overwrite a float tensor of shape (8, 8) or a tensor of 8 indices. Return the
    results."""
    if not written:
        return []
    callee = bb.add_func(clear if target.ty.ndim == 2 else clear_indices, "clear")
    return [bb.emit(op.call_tir_inplace(callee, relax.Tuple([target]), [0], target.ty))]


def copied(bb, tensor):
    """Return a copy, so that no argument of the caller is written to."""
    return bb.emit(op.add(tensor, relax.const(0, dtype_of(tensor.ty))))


def transposed(bb, x, y, at, written):
    a = copied(bb, x)
    b = bb.emit(op.permute_dims(a))
    out = write(bb, a, written)
    return [bb.emit(op.matmul(b, y)), *out]


def cross_entropy_gradient(bb, x, y, at, written):
    targets = copied(bb, at)
    dy = bb.emit(op.sum(y, [1]))
    weights = bb.emit(op.ones((8,), "float32"))
    gradient = bb.emit(grad.nll_loss_backward(dy, x, targets, weights, reduction="none"))
    out = write(bb, targets, written)
    return [bb.emit(grad.log_softmax_backward(gradient, x)), *out]


def gathered_gradient(bb, x, y, at, written):
    indices = bb.emit(op.reshape(copied(bb, at), (8, 1)))
    dy = bb.emit(op.sum(y, [1], keepdims=True))
    gradient = bb.emit(grad.gather_elements_backward_data(dy, (8, 8), indices, axis=1))
    flat_indices = bb.emit(op.memory.view(indices, (8,)))
    out = write(bb, flat_indices, written)
    return [bb.emit(grad.log_softmax_backward(gradient, x)), *out]


def statistics(bb, x, y, at, written):
    """The reads after the write see the overwritten tensor, so no statistics can be saved."""
    gamma = bb.emit(op.ones((8,), "float32"))
    a = copied(bb, x)
    normalized = bb.emit(op.nn.rms_norm(a, gamma, axes=[1], epsilon=1e-3))
    out = write(bb, a, written)
    rstd = bb.emit(grad.rms_norm_statistics(a, axes=[1], epsilon=1e-3))
    call = grad.rms_norm_backward_data(y, a, gamma, rstd, axes=[1])
    return [normalized, bb.emit(call), *out]


def winners(bb, x, y, at, written):
    a = copied(bb, x)
    images = bb.emit(op.memory.view(a, (1, 1, 8, 8)))
    pooled = bb.emit(op.nn.max_pool2d(images, (2, 2), (2, 2)))
    out = write(bb, a, written)
    call = grad.max_pool2d_backward(pooled, images, (2, 2), (2, 2))
    return [pooled, bb.emit(call), *out]


def module_of(body, written):
    params = [tensor("x", (8, 8), "float32"), tensor("y", (8, 8), "float32")]
    params.append(tensor("at", (8,), "int64"))
    return build(params, lambda bb, *args: relax.Tuple(body(bb, *args, written)))


def names(module):
    kernels = (name.rstrip("0123456789") for name in kernels_in(module))
    return sorted(name for name in kernels if name not in ("clear", "sum_kernel"))


#: The kernels of each function, with a write and without.
FORWARDED = {
    "transpose": (transposed, ["matmul_kernel"], ["matmul_kernel"]),
    "cross entropy": (
        cross_entropy_gradient,
        ["grad_log_softmax_backward_kernel"],
        ["grad_cross_entropy_backward_kernel"],
    ),
    "gathered": (
        gathered_gradient,
        ["grad_gather_elements_backward_data_kernel", "grad_log_softmax_backward_kernel"],
        ["grad_cross_entropy_backward_kernel"],
    ),
}


@pytest.mark.parametrize("case", FORWARDED.values(), ids=FORWARDED)
def test_an_operand_overwritten_before_a_kernel_would_read_it(case):
    """The results equal those of the same function without the write."""
    body, with_write, without = case
    modules = [module_of(body, written) for written in (True, False)]
    assert [names(module) for module in modules] == [with_write, without]
    x, y = (RNG.normal(size=(8, 8)).astype("float32") for _ in range(2))
    at = RNG.integers(1, 8, size=8)
    results, wanted = (
        run(module, "main", x, y, at, target=HOST, pipeline="relax_grad") for module in modules
    )
    np.testing.assert_allclose(results[0], wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "with_write", "without"),
    [
        (statistics, ["rms_norm_statistics_kernel"], []),
        (winners, [], ["int8"]),
    ],
    ids=["statistics", "winners"],
)
def test_residuals_of_overwritten_tensors_are_not_saved(body, with_write, without):
    for written, wanted in ((True, with_write), (False, without)):
        module = relax_grad.transform.DispatchKernels(HOST)(module_of(body, written))
        text = module["main"].script()
        for name in {*with_write, *without}:
            assert (name in text) == (name in wanted), text
