"""Gradients of the backward operators of scans."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._linear import register_linear
from .._util import bounded_product


def _cumsum(grad: relax.Expr, call: relax.Call) -> relax.Expr:
    axis = call.attrs.axis
    return relax.op.cumsum(
        grad, None if axis is None else int(axis), exclusive=bool(call.attrs.exclusive)
    )


register_linear(
    "cumsum_backward_data",
    "dx = cumsum_backward_data(dy, x.shape, axis, exclusive)",
    "cumsum(dx_grad, axis, exclusive)",
    _cumsum,
    accumulates=True,
)


@register_gradient("relax.grad.linear_scan")
def linear_scan(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of linear_scan.

    Forward form: ``y[i + 1] = a[i] * y[i] + b[i]``.

    Backward form: ``[t * y, t]`` where ``t = linear_scan_reverse(a, y_grad)`` is the gradient of
    ``y[i + 1]`` through all later elements; ``[t * y]`` for a scan without ``b``.
    """
    return _linear_scan(orig_var, orig_call, output_grad, ctx, backward.linear_scan_reverse)


@register_gradient("relax.grad.linear_scan_reverse")
def linear_scan_reverse(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of linear_scan_reverse, as of :func:`linear_scan`, reversed.

    Forward form: ``y[i - 1] = a[i] * y[i] + b[i]``.

    Backward form: ``[t * y, t]`` where ``t = linear_scan(a, y_grad)``; ``[t * y]`` for a scan
    without ``b``.
    """
    return _linear_scan(orig_var, orig_call, output_grad, ctx, backward.linear_scan)


def _linear_scan(
    orig_var: relax.Var,
    orig_call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    opposite: Callable[..., relax.Expr],
) -> list[relax.Expr]:
    multiplier, *increment = orig_call.args
    through = ctx.emit(opposite(multiplier, output_grad, int(orig_call.attrs.axis)))
    partials = [bounded_product(through, orig_var), through]
    return partials[: 1 + len(increment)]
