"""Gradients of element-wise functions of two or more arguments.

The functions are data: :data:`_PARTIALS` has the derivatives of each, and one rule implements the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from ..ir.compat import constant_value
from ..op.rank import named
from ..registry import GradientRule, register_gradient
from ._util import (
    cast_like,
    const_like,
    dtype_of,
    is_float,
    no_grad,
    unbroadcast,
    wide_dtype,
    widen,
    zero,
)

#: Builds the partial of an argument from ``(y_grad, *arguments, y)``.
Partial = Callable[..., relax.Expr]

_SYMBOLIC = "fails at order 2 for symbolic broadcasts, and gives integer tensors a gradient"


@dataclass(frozen=True)
class _Function:
    """The derivatives of an element-wise function, and the errors of TVM's rule.

    ``in_float32`` says that half precision must be computed in float32. Otherwise an intermediate
    result can overflow where the partial does not, or the errors of several steps add up.
    """

    partials: tuple[Partial, ...]
    in_float32: bool = False
    corrects: str | None = None


def _power_x1(g: relax.Expr, x1: relax.Expr, x2: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return ``g`` times the derivative of ``x1 ** x2`` by ``x1``: 0 for ``x2 = 0``, also if
    ``x1 = 0``."""
    one = const_like(1, x2)
    exponent = constant_value(x2)
    if exponent is not None and np.all(exponent != 0):
        return g * x2 * op.power(x1, x2 - one)
    # Derivatives of the branch that is not taken are finite too: 0 times infinity would be NaN.
    is_zero = op.equal(x2, zero(x2))
    slope = g * x2 * op.power(x1, op.where(is_zero, one, x2) - op.where(is_zero, zero(x2), one))
    return op.where(is_zero, zero(g), slope)


def _power_x2(g: relax.Expr, x1: relax.Expr, x2: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return ``g`` times the derivative of ``x1 ** x2`` by ``x2``: 0 for ``x1 = 0`` and
    ``x2 >= 0``."""
    base = constant_value(x1)
    if base is not None and np.all(base != 0):
        return g * y * op.log(x1)
    flat = op.logical_and(op.equal(x1, zero(x1)), op.greater_equal(x2, zero(x2)))
    return op.where(flat, zero(g), g * y * op.log(op.where(flat, const_like(1, x1), x1)))


def _atan2_share(
    g: relax.Expr, numerator: relax.Expr, x1: relax.Expr, x2: relax.Expr
) -> relax.Expr:
    """Return ``g * numerator / (x1**2 + x2**2)``; 0 at the origin, as in PyTorch."""
    square = x1 * x1 + x2 * x2
    origin = op.equal(square, zero(x1))
    share = g * numerator / op.where(origin, const_like(1, x1), square)
    return op.where(origin, zero(x1), share)


def _chosen(lost: Callable[..., relax.Expr]) -> Partial:
    """Return a partial: 0 where ``lost(x1, x2)``, half of the gradient for equal arguments, else
    the gradient."""

    def partial(g: relax.Expr, x1: relax.Expr, x2: relax.Expr, y: relax.Expr) -> relax.Expr:
        half = g * const_like(0.5, g)
        return op.where(op.equal(x1, x2), half, op.where(lost(x1, x2), zero(g), g))

    return partial


#: The functions by the names of their operators without ``relax.``.
_PARTIALS = {
    "add": _Function(
        (lambda g, x1, x2, y: g, lambda g, x1, x2, y: g),
        corrects=_SYMBOLIC,
    ),
    "subtract": _Function(
        (lambda g, x1, x2, y: g, lambda g, x1, x2, y: -g),
        corrects=_SYMBOLIC,
    ),
    "multiply": _Function(
        (lambda g, x1, x2, y: g * x2, lambda g, x1, x2, y: g * x1),
        corrects=_SYMBOLIC,
    ),
    "divide": _Function(
        (lambda g, x1, x2, y: g / x2, lambda g, x1, x2, y: -g * y / x2),
        in_float32=True,
        corrects=f"overflows in half precision where the gradient is finite; {_SYMBOLIC}",
    ),
    "power": _Function(
        (_power_x1, _power_x2),
        in_float32=True,
        corrects=f"is NaN at x1 = 0 where the derivative is 0; {_SYMBOLIC}",
    ),
    "maximum": _Function(
        (_chosen(op.less), _chosen(op.greater)),
        corrects=f"gives all of the gradient to one of two equal arguments; {_SYMBOLIC}",
    ),
    "minimum": _Function(
        (_chosen(op.greater), _chosen(op.less)),
        corrects=f"gives all of the gradient to one of two equal arguments; {_SYMBOLIC}",
    ),
    "atan2": _Function(
        (
            lambda g, x1, x2, y: _atan2_share(g, x2, x1, x2),
            lambda g, x1, x2, y: _atan2_share(-g, x1, x1, x2),
        ),
        in_float32=True,
    ),
    # exp(x1 - y) as 1 / (1 + exp(x2 - x1)), which avoids the rounding error of y.
    "log_add_exp": _Function(
        (
            lambda g, x1, x2, y: g * op.sigmoid(x1 - x2),
            lambda g, x1, x2, y: g * op.sigmoid(x2 - x1),
        ),
        in_float32=True,
    ),
    # x1 - x2 * trunc(x1 / x2), for floor_mod with floor; the quotient is piecewise constant.
    "mod": _Function(
        (lambda g, x1, x2, y: g, lambda g, x1, x2, y: -g * op.trunc(x1 / x2)),
        in_float32=True,
    ),
    "floor_mod": _Function(
        (lambda g, x1, x2, y: g, lambda g, x1, x2, y: -g * op.floor(x1 / x2)),
        in_float32=True,
    ),
    "ewise_fma": _Function(
        (
            lambda g, x1, x2, x3, y: g * x2,
            lambda g, x1, x2, x3, y: g * x1,
            lambda g, x1, x2, x3, y: g,
        ),
    ),
}


def _rule(name: str, function: _Function) -> GradientRule:
    def rule(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        """Gradient of {forward}, an element-wise function.

        Forward form: ``y = {forward}(x1, x2, ...)``, with broadcasting.

        Backward form: ``[y_grad * df/dx1, y_grad * df/dx2, ...]``, each summed over the axes along
        which its argument was broadcast.
        """
        if not is_float(orig_var):
            return [no_grad(argument) for argument in orig_call.args]
        operands = [output_grad, *map(_tensor, orig_call.args), orig_var]
        widens = function.in_float32 and wide_dtype(orig_var) != dtype_of(orig_var)
        if widens:
            operands = [_widened(ctx, operand) for operand in operands]
        partials = []
        for partial, argument in zip(function.partials, orig_call.args, strict=True):
            if not is_float(argument):
                partials.append(no_grad(argument))
                continue
            grad = unbroadcast(ctx, partial(*operands), argument)
            if widens:
                grad = cast_like(ctx, grad, argument)
            partials.append(grad)
        return partials

    return named(rule, name, forward=name)


def _tensor(expr: relax.Expr) -> relax.Expr:
    """Convert a number, which TVM accepts instead of a tensor, to a constant."""
    return relax.const(expr.value, dtype_of(expr)) if isinstance(expr, tirx.FloatImm) else expr


def _widened(ctx: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr:
    """Cast half precision to float32; a constant stays a constant, any other cast is emitted
    once."""
    if not is_float(expr):
        return expr
    value = constant_value(expr)
    if value is None:
        return ctx.emit(widen(expr))
    return relax.const(value.astype(wide_dtype(expr)))


for _name, _function in _PARTIALS.items():
    register_gradient(f"relax.{_name}", corrects=_function.corrects)(_rule(_name, _function))
