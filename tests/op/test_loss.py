"""The declarations of the loss operators: types, errors, and round trips through text and JSON."""

from __future__ import annotations

import pytest
import tvm
from calls import type_of
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.relax.op import grad

from relax_grad.cpu import target


def var(name, shape=None, dtype="float32", ndim=-1):
    if shape is None:
        return relax.Var(name, relax.TensorType(dtype=dtype, ndim=ndim))
    return relax.Var(name, relax.TensorType(shape, dtype))


X, T, W = var("x", (4, 3, 5)), var("t", (4, 5), "int64"), var("w", (3,))
SCALAR = var("dy", ())


def module(params, call):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(call)
        bb.emit_func_output(result)
    return bb.get()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_weights_gradient_has_the_type_of_the_weights(dtype):
    x, w, dy = var("x", (4, 3), dtype), var("w", (3,), dtype), var("dy", (), dtype)
    for targets in ("int32", "int64"):
        call = grad.nll_loss_backward_weights(dy, x, var("t", (4,), targets), w)
        assert_structural_equal(type_of(call), w.ty)
    assert call.attrs.reduction == "mean"
    assert call.attrs.ignore_index == -100


def test_weights_gradient_without_a_batch():
    call = grad.nll_loss_backward_weights(SCALAR, var("x", (3,)), var("t", (), "int64"), W, "none")
    assert_structural_equal(type_of(call), W.ty)


def test_weights_gradient_of_symbolic_and_unknown_shapes():
    n, c = tirx.Var("n", "int64"), tirx.Var("c", "int64")
    x, t, w, dy = var("x", (n, c)), var("t", (n,), "int64"), var("w", (c,)), var("dy", (n,))
    assert_structural_equal(type_of(grad.nll_loss_backward_weights(dy, x, t, w, "none")), w.ty)
    unknown = var("w", ndim=1)
    result_type = type_of(grad.nll_loss_backward_weights(dy, x, t, unknown, "none"))
    assert_structural_equal(result_type, relax.TensorType(dtype="float32", ndim=1))
    result_type = type_of(grad.nll_loss_backward_weights(dy, x, t, var("w"), "none"))
    assert_structural_equal(result_type, relax.TensorType(dtype="float32", ndim=1))


@pytest.mark.parametrize(
    ("arguments", "reduction", "message"),
    [
        ((var("dy", (4, 5)), X, T, W), "mean", "output_grad must have 0 dimensions"),
        ((SCALAR, X, T, W), "none", "output_grad must have 2 dimensions"),
        (
            (var("dy", (4, 6)), X, T, W),
            "none",
            r"output_grad must have the shape \(4, 5\).*\(4, 6\)",
        ),
        ((SCALAR, X, T, var("w", (4,))), "sum", "do not fit relax.nn.nll_loss"),
        ((SCALAR, X, var("t", (4, 6), "int64"), W), "sum", "do not fit relax.nn.nll_loss"),
        ((SCALAR, X, var("t", (4, 5)), W), "sum", "do not fit relax.nn.nll_loss"),
        ((SCALAR, X, T, relax.ShapeExpr([3])), "sum", "weights must be a tensor"),
        ((relax.ShapeExpr([]), X, T, W), "sum", "output_grad must be a tensor"),
    ],
)
def test_weights_gradient_refuses(arguments, reduction, message):
    with pytest.raises((TypeError, ValueError), match=f"(?s)nll_loss_backward_weights.*{message}"):
        type_of(grad.nll_loss_backward_weights(*arguments, reduction))


M, N = (tirx.Var(name, "int64") for name in "mn")


@pytest.mark.parametrize("pipeline", ["default", "relax_grad"])
@pytest.mark.parametrize("with_softmax", [False, True])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((), (2000, 5), (7,)), "do not fit relax.nn.nll_loss"),
        (((3,), (2000, 5), (2000,)), "output_grad must have 0 dimensions"),
        (((), (N, 5), (M,)), r"targets must have the shape \(n\) .*\(m,\)"),
        (((), (N, 5, M), (N, N)), r"targets must have the shape \(n, m\) .*\(n, n\)"),
        (((), (4, N), (4,), (M,)), r"weights must have the shape \(n\) .*\(m,\)"),
        (((), (N,), (), (M,)), r"weights must have the shape \(n\) .*\(m,\)"),
    ],
)
def test_gradient_of_nll_loss_refuses(shapes, message, with_softmax, pipeline):
    """TVM infers the type of its own operator from the predictions alone."""
    dtypes = ["float32", "float32", "int64", "float32"]
    params = [var(f"x{i}", shape, dtypes[i]) for i, shape in enumerate(shapes)]
    axis = min(1, len(shapes[1]) - 1)
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.log_softmax(params[1], axis)) if with_softmax else params[1]
            result = bb.emit(grad.nll_loss_backward(params[0], y, *params[2:]))
            if with_softmax:  # one kernel computes both gradients
                total = bb.emit(relax.op.sum(result, [axis], keepdims=True))
                share = bb.emit(relax.op.multiply(total, bb.emit(relax.op.exp(y))))
                result = bb.emit(relax.op.subtract(result, share))
            result = bb.emit_output(result)
        bb.emit_func_output(result)
    with pytest.raises(ValueError, match=f"relax.grad.nll_loss_backward: (.|\n)*{message}"):
        tvm.compile(bb.get(), target.host(), relax_pipeline=pipeline)


def test_a_reduction_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"relax\.grad\.nll_loss_backward_weights: .*reduction"):
        grad.nll_loss_backward_weights(SCALAR, X, T, W, "average")


def test_cross_entropy_gradient_has_the_type_of_the_factor():
    n = tirx.Var("n", "int64")
    for factor in (var("y", (3,)), var("y", (4, 3)), var("y", (n, 3)), var("y", ndim=2)):
        result_type = type_of(grad.cross_entropy_with_logits_backward(SCALAR, factor))
        assert_structural_equal(result_type, factor.ty)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((var("dz", (4,)), var("y", (4, 3))), "output_grad must have 0 dimensions"),
        ((SCALAR, relax.ShapeExpr([3])), "factor must be a tensor"),
        ((relax.ShapeExpr([]), var("y", (4, 3))), "output_grad must be a tensor"),
    ],
)
def test_cross_entropy_gradient_refuses(arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"cross_entropy_with_logits.*{message}"):
        type_of(grad.cross_entropy_with_logits_backward(*arguments))


MODULES = {
    "weights": lambda: module(
        [SCALAR, X, T, W], grad.nll_loss_backward_weights(SCALAR, X, T, W, "sum", 255)
    ),
    "cross entropy": lambda: module(
        [SCALAR, X], grad.cross_entropy_with_logits_backward(SCALAR, X)
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("legalized", [False, True])
def test_round_trip(name, legalized):
    before = MODULES[name]()
    if legalized:
        before = relax.transform.LegalizeOps()(before)
        assert "R.grad" not in before.script()
    assert_structural_equal(tvm.script.from_source(before.script()), before)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(before)), before)
