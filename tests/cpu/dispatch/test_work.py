"""The work of DispatchKernels is linear in the number of calls, and equal calls share one generated
kernel."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from dispatched import HOST, kernels_in
from programs import build, tensor
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad.transform import DispatchKernels

N = tirx.Var("n", "int64")


def adjoint_of(params, body):
    return relax_grad.vjp(build(params, body), "main")


def chain(layer, own):
    """Return a builder of ``n`` chained layers, each with its own parameters or all with the same
    ones."""

    def made(n, rows=16):
        x = tensor("x", (rows, 16), "float32")
        weights = [tensor(f"g{i}", (16,), "float32") for i in range(n if own else 1)]

        def body(bb, x, *weights):
            for i in range(n):
                x = bb.emit(op.sin(bb.emit(layer(x, weights[i % len(weights)]))))
            return x

        return adjoint_of([x, *weights], body)

    return made


def of_one_input(layer):
    """Return a builder of the sum of ``n`` layers of one tensor, each with its own parameters."""

    def made(n):
        x = tensor("x", (16, 16), "float32")
        weights = [tensor(f"g{i}", (16,), "float32") for i in range(n)]

        def body(bb, x, *weights):
            parts = [bb.emit(layer(x, weight)) for weight in weights]
            total = parts[0]
            for part in parts[1:]:
                total = bb.emit(op.add(total, part))
            return total

        return adjoint_of([x, *weights], body)

    return made


def pools_of_one_input(n):
    x = tensor("x", (1, 2, 8, 8), "float32")

    def body(bb, x):
        total = bb.emit(op.nn.max_pool2d(x, (2, 2), (2, 2)))
        for _ in range(n - 1):
            total = bb.emit(op.add(total, bb.emit(op.nn.max_pool2d(x, (2, 2), (2, 2)))))
        return total

    return adjoint_of([x], body)


def products(n):
    x, w = tensor("x", (16, 16), "float32"), tensor("w", (16, 16), "float32")

    def body(bb, x, w):
        for _ in range(n):
            x = bb.emit(op.tanh(bb.emit(op.matmul(x, w))))
        return x

    return adjoint_of([x, w], body)


def rms_norm(x, weight):
    return op.nn.rms_norm(x, weight, axes=[-1])


def layer_norm(x, weight):
    return op.nn.layer_norm(x, weight, weight, axes=[-1])


MODELS = {
    "rms_norm, own weights": chain(rms_norm, True),
    "rms_norm, one weight": chain(rms_norm, False),
    "rms_norm, one input": of_one_input(rms_norm),
    "layer_norm, own weights": chain(layer_norm, True),
    "layer_norm, one input": of_one_input(layer_norm),
    "max_pool2d, one input": pools_of_one_input,
    "matmul, one weight": products,
}


def work(module) -> Counter:
    """Return how often each function of the package is called in the pass."""
    package = str(Path(relax_grad.__file__).parent)
    counts = Counter()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            counts[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        DispatchKernels(HOST)(module)
    finally:
        sys.setprofile(before)
    return counts


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_work_is_linear(model):
    """The number of function calls grows linearly with the layers, and the number of generated
    kernels stays."""
    works = [work(model(n)) for n in (6, 12, 18)]
    generated = [counts.pop("prim_func") for counts in works]
    assert generated[0] == generated[1] == generated[2]
    few, some, many = (sum(counts.values()) for counts in works)
    assert some - few > 0
    assert many - some <= 1.02 * (some - few)


@pytest.mark.parametrize("rows", [16, N])
def test_equal_calls_share_a_kernel_that_is_generated_once(rows):
    """The site names the symbolic extents, so that equal calls use the same variables."""
    model = chain(layer_norm, True)
    single, some = (work(model(n, rows))["prim_func"] for n in (2, 8))
    assert single == some == len(set(kernels_in(model(2, rows))))


def test_other_attributes_make_other_kernels():
    """Each pair differs in one attribute, dtype, shape or transpose; no call gets the kernel of
    another."""
    x, y = tensor("x", (N, 16), "float32"), tensor("y", (N * 2, 16), "float32")
    w, g = tensor("w", (16, 16), "float32"), tensor("g", (16,), "float32")
    i, j = tensor("i", (N,), "int32"), tensor("j", (N,), "int64")

    def body(bb, x, y, w, g, i, j):
        transposed = bb.emit(op.permute_dims(w))
        return relax.Tuple(
            [
                bb.emit(value)
                for value in (
                    op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5),
                    op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-3),
                    op.nn.rms_norm(w, g, axes=[-1], epsilon=1e-3),
                    op.matmul(x, w),
                    op.matmul(y, w),
                    op.matmul(x, transposed),
                    op.take(x, bb.emit(op.astype(i, "int32")), axis=1, mode="clip"),
                    op.take(x, bb.emit(op.astype(j, "int64")), axis=1, mode="clip"),
                    op.take(x, bb.emit(op.astype(j, "int64")), axis=1, mode="fast"),
                    op.nn.softmax(x, -1),
                    op.nn.log_softmax(x, -1),
                )
            ]
        )

    kernels = kernels_in(build([x, y, w, g, i, j], body))
    # matmul(y, w) shares the kernel of matmul(x, w): both have a symbolic number of rows.
    assert len(kernels) == 11
    assert len(set(kernels)) == 10
