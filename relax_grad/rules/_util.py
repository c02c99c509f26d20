"""Helpers that the gradient rules share."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import relax, tirx
from tvm.relax.op.grad import no_grad

from ..errors import GradientError
from ..ir import compat
from ..ir.dtypes import accumulation_dtype
from ..registry import GradientRule

__all__ = [
    "broadcast_like",
    "broadcast_shape",
    "cast_each",
    "cast_like",
    "const_like",
    "dtype_of",
    "float_only",
    "is_const",
    "is_float",
    "is_one",
    "is_static",
    "no_grad",
    "reshape_like",
    "same_shape",
    "shape_arg",
    "shape_of",
    "unbroadcast",
    "wide_dtype",
    "widen",
    "zero",
]


def shape_of(expr: relax.Expr) -> list[tirx.PrimExpr]:
    """Return the dimensions of a tensor; they may be symbolic.

    Raises
    ------
    GradientError
        If the dimensions of the tensor's shape are unknown.
    """
    shape = expr.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        raise GradientError(
            f"the shape of {expr} must be known, static or symbolic, but its type is {expr.ty}; "
            "give it one with relax.match_cast"
        )
    return list(shape.values)


def dtype_of(expr: relax.Expr) -> str:
    """Return the dtype of a tensor as a string."""
    return compat.dtype_of(expr.ty)


def is_float(expr: relax.Expr) -> bool:
    """Tell whether this is a floating-point tensor; only these have gradients.

    Raises
    ------
    GradientError
        If the tensor's dtype is unknown.
    """
    if not isinstance(expr.ty, relax.TensorType):
        return False
    if expr.ty.dtype is None:
        raise GradientError(
            f"the dtype of {expr} must be known, but its type is {expr.ty}; give it one with "
            "relax.match_cast"
        )
    return dtype_of(expr).startswith(("float", "bfloat"))


def is_static(expr: relax.Expr) -> bool:
    """Tell whether every dimension of a tensor is a constant."""
    shape = expr.ty.shape
    return isinstance(shape, relax.ShapeExpr) and all(map(is_const, shape.values))


def shape_arg(expr: relax.Expr) -> relax.Expr:
    """Return a tensor's shape in the form that backward operators take.

    A static shape is a constant shape expression. A symbolic shape is read off the tensor by
    ``shape_of``: the stock Gradient pass cannot traverse a shape expression with symbolic
    variables, so a backward graph that holds one could not be differentiated again. TVM's own
    operators infer no usable type from that form. :func:`broadcast_like` and :func:`unbroadcast`
    replace the two of them that are needed.
    """
    return expr.ty.shape if is_static(expr) else relax.op.shape_of(expr)


def same_shape(a: list[tirx.PrimExpr], b: list[tirx.PrimExpr]) -> bool:
    """Tell whether two shapes are provably equal."""
    analyzer = compat.Analyzer()
    return len(a) == len(b) and all(
        analyzer.can_prove_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def broadcast_like(grad: relax.Expr, like: relax.Expr) -> relax.Expr:
    """Broadcast a gradient to the shape of ``like``; the two have the same dtype."""
    if is_static(like):
        return relax.op.broadcast_to(grad, like.ty.shape)
    return relax.op.multiply(grad, relax.op.ones_like(like))


def reshape_like(grad: relax.Expr, like: relax.Expr) -> relax.Expr:
    """Reshape a gradient to the shape of ``like``.

    In a constant shape, reshape reads an extent of 0 as "as in the data".
    """
    shape = shape_of(like)
    if all(is_const(extent) and int(extent) != 0 for extent in shape):
        return relax.op.reshape(grad, like.ty.shape)
    return relax.op.reshape(grad, relax.op.shape_of(like))


def broadcast_shape(grad: relax.Expr, like: relax.Expr) -> list[tirx.PrimExpr]:
    """Return the dimensions of a gradient to which ``like`` was broadcast.

    Raises
    ------
    GradientError
        If a shape is unknown; the message refers to the arguments of the forward operator.
    """
    shape_of(like)
    if not isinstance(grad.ty.shape, relax.ShapeExpr):
        raise GradientError(
            "the shapes of all arguments must be known, static or symbolic, to tell along which "
            f"axes {like} was broadcast; give each one with relax.match_cast"
        )
    return shape_of(grad)


def unbroadcast(ctx: relax.BlockBuilder, grad: relax.Expr, like: relax.Expr) -> relax.Expr:
    """Sum a gradient over the axes along which ``like`` was broadcast."""
    grad = ctx.normalize(grad)
    if same_shape(broadcast_shape(grad, like), shape_of(like)):
        return grad
    if is_static(like):
        return relax.op.collapse_sum_to(grad, like.ty.shape)
    return relax.op.collapse_sum_like(grad, like)


def wide_dtype(expr: relax.Expr) -> str:
    """Return the dtype to accumulate in: float32 for half precision, otherwise the tensor's own."""
    return accumulation_dtype(dtype_of(expr))


def widen(expr: relax.Expr) -> relax.Expr:
    """Cast half precision to the dtype to accumulate in."""
    wide = wide_dtype(expr)
    return expr if wide == dtype_of(expr) else relax.op.astype(expr, wide)


def cast_like(ctx: relax.BlockBuilder, grad: relax.Expr, like: relax.Expr) -> relax.Expr:
    """Normalize a gradient, and cast it to the dtype of ``like`` if the two differ."""
    grad, dtype = ctx.normalize(grad), dtype_of(like)
    return grad if dtype_of(grad) == dtype else relax.op.astype(grad, dtype)


def cast_each(
    ctx: relax.BlockBuilder, gradients: Sequence[relax.Expr], arguments: Sequence[relax.Expr]
) -> list[relax.Expr]:
    """Cast each gradient to the dtype of its argument."""
    return [
        cast_like(ctx, gradient, argument)
        for gradient, argument in zip(gradients, arguments, strict=True)
    ]


def float_only(rule: GradientRule) -> GradientRule:
    """Wrap the rule of an operator of one argument so that integers have no gradient.

    There is none for an integer argument, nor for a result that is rounded to integers. A tuple
    counts as floating point.
    """

    @functools.wraps(rule)
    def checked(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        (x,) = orig_call.args
        if is_float(x) and (isinstance(orig_var.ty, relax.TupleType) or is_float(orig_var)):
            return rule(orig_var, orig_call, output_grad, ctx)
        return [no_grad(x)]

    return checked


def zero(like: relax.Expr) -> relax.Expr:
    """Return the scalar constant 0 in the dtype of ``like``."""
    return const_like(0, like)


def bounded_product(a: relax.Var, b: relax.Var) -> relax.Expr:
    """Return ``a * b`` where 0 times infinity is 0: a product of finite numbers that is out of
    range, although another factor is 0."""

    def bounded(factor: relax.Var, other: relax.Var) -> relax.Expr:
        # TVM does not compile isinf of bfloat16.
        is_infinite = relax.op.isinf(widen(factor))
        is_lost = relax.op.logical_and(is_infinite, relax.op.equal(other, zero(other)))
        return relax.op.where(is_lost, zero(factor), factor)

    return relax.op.multiply(bounded(a, b), bounded(b, a))


def const_like(value: float, like: relax.Expr) -> relax.Expr:
    """Return ``value`` as a scalar constant in the dtype of ``like``."""
    return relax.const(value, dtype_of(like))


def is_const(extent: tirx.PrimExpr) -> bool:
    """Tell whether an extent is a constant."""
    return isinstance(extent, tirx.IntImm)


def is_one(extent: tirx.PrimExpr) -> bool:
    """Tell whether an extent is known to be 1."""
    return is_const(extent) and int(extent) == 1
