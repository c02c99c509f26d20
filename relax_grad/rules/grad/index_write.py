"""Gradients of the backward operators of the operators that write at indices."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ...registry import register_gradient
from .._linear import register_linear
from .._util import no_grad
from ..index_write import Writer, elements_writer, nd_writer, put_writer


def _register_updates(
    forward: str,
    updates: str,
    arguments: str,
    writer: Callable[[relax.Call], Writer],
    reduction: Callable[[relax.Call], str],
) -> None:
    """Register the gradient of an operator that returns the gradient of updates: a write into
    zeros.

    ``forward`` is the name of the operator that writes, and ``updates`` that of its argument.
    ``writer`` and ``reduction`` are functions of a call of the operator.
    """

    def transpose(grad: relax.Expr, call: relax.Call) -> relax.Expr:
        return writer(call).write(relax.op.zeros_like(call.args[0]), grad, reduction(call))

    op_name = f"{forward}_backward_{updates}"
    register_linear(
        op_name,
        f"du = {op_name}(dy, indices{arguments})",
        f"{forward}(0, indices, du_grad{arguments})",
        transpose,
    )


_register_updates(
    "scatter_elements",
    "updates",
    ", axis, reduction",
    lambda call: elements_writer(call.args[1], int(call.attrs.axis)),
    lambda call: call.attrs.reduction,
)
_register_updates(
    "scatter_nd",
    "updates",
    "",
    lambda call: nd_writer(call.args[1]),
    lambda call: "update",
)
_register_updates(
    "index_put",
    "values",
    "",
    lambda call: put_writer(call.args[1]),
    lambda call: "update",
)
register_linear(
    "slice_scatter_backward_src",
    "dsrc = slice_scatter_backward_src(dy, src.shape, start, end, step, axis)",
    "slice_scatter(0, dsrc_grad, start, end, step, axis)",
    lambda grad, call: relax.op.slice_scatter(
        relax.op.zeros_like(call.args[0]), grad, *call.args[2:], int(call.attrs.axis)
    ),
)


@register_gradient("relax.grad.scatter_elements_scan")
def scatter_elements_scan(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of scatter_elements_scan.

    Forward form: ``s = scatter_elements_scan(start, indices, factors, terms)``, the state before
    each update of ``state = factors * state + terms`` at its index.

    Backward form: with ``t = scatter_elements_scan_reverse(0, indices, factors,
    s_grad)``, the gradient of the state after each update, ``[scatter_elements(0, indices, s_grad *
    scatter_elements_scan(1, indices, factors), "add"), no_grad, s * t, t]``.
    """
    writer = elements_writer(orig_call.args[1], int(orig_call.attrs.axis))
    return _scan(writer, orig_var, orig_call, output_grad, ctx, reverse=False)


@register_gradient("relax.grad.scatter_elements_scan_reverse")
def scatter_elements_scan_reverse(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of scatter_elements_scan_reverse, as of :func:`scatter_elements_scan`,
    reversed."""
    writer = elements_writer(orig_call.args[1], int(orig_call.attrs.axis))
    return _scan(writer, orig_var, orig_call, output_grad, ctx, reverse=True)


@register_gradient("relax.grad.scatter_nd_scan")
def scatter_nd_scan(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of scatter_nd_scan, as of :func:`scatter_elements_scan`."""
    return _scan(nd_writer(orig_call.args[1]), orig_var, orig_call, output_grad, ctx, reverse=False)


@register_gradient("relax.grad.scatter_nd_scan_reverse")
def scatter_nd_scan_reverse(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of scatter_nd_scan_reverse, as of :func:`scatter_elements_scan`, reversed."""
    return _scan(nd_writer(orig_call.args[1]), orig_var, orig_call, output_grad, ctx, reverse=True)


def _scan(
    writer: Writer,
    states: relax.Expr,
    call: relax.Call,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
    reverse: bool,
) -> list[relax.Expr]:
    start, indices, factors, *terms = call.args
    zeros = ctx.emit(relax.op.zeros_like(start))
    assert writer.scan is not None  # only index_put has none
    through = ctx.emit(writer.scan(zeros, factors, output_grad, not reverse))
    gains = writer.scan(relax.op.ones_like(start), factors, None, reverse)
    return [
        writer.write(zeros, relax.op.multiply(output_grad, gains), "add"),
        no_grad(indices),
        relax.op.multiply(states, through),
        *([through] if terms else []),
    ]
