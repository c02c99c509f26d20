"""Gradients of the backward operators of the operators that write at indices."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient
from .._util import no_grad
from ..index_write import elements_writer, nd_writer, put_writer


@register_gradient("relax.grad.scatter_elements_backward_updates")
def scatter_elements_backward_updates(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_elements_backward_updates.

    Forward form: ``du = scatter_elements_backward_updates(dy, indices, axis, reduction)``.

    Backward form: ``[scatter_elements(0, indices, du_grad, axis, reduction), no_grad]``.
    """
    indices = orig_call.args[1]
    writer = elements_writer(indices, int(orig_call.attrs.axis))
    return _backward_updates(writer, orig_call, output_grad, orig_call.attrs.reduction)


@register_gradient("relax.grad.scatter_nd_backward_updates")
def scatter_nd_backward_updates(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_nd_backward_updates.

    Forward form: ``du = scatter_nd_backward_updates(dy, indices)``.

    Backward form: ``[scatter_nd(0, indices, du_grad), no_grad]``.
    """
    return _backward_updates(nd_writer(orig_call.args[1]), orig_call, output_grad, "update")


@register_gradient("relax.grad.index_put_backward_values")
def index_put_backward_values(orig_var, orig_call, output_grad, ctx):
    """Gradient of index_put_backward_values.

    Forward form: ``dv = index_put_backward_values(dy, indices)``.

    Backward form: ``[index_put(0, indices, dv_grad), no_grad]``.
    """
    return _backward_updates(put_writer(orig_call.args[1]), orig_call, output_grad, "update")


@register_gradient("relax.grad.slice_scatter_backward_src")
def slice_scatter_backward_src(orig_var, orig_call, output_grad, ctx):
    """Gradient of slice_scatter_backward_src.

    Forward form: ``dsrc = slice_scatter_backward_src(dy, src.shape, start, end, step, axis)``.

    Backward form: ``[slice_scatter(0, dsrc_grad, start, end, step, axis), no_grad, ...]``.
    """
    dy, *others = orig_call.args
    zeros = relax.op.zeros_like(dy)
    return [
        relax.op.slice_scatter(zeros, output_grad, *others[1:], int(orig_call.attrs.axis)),
        *map(no_grad, others),
    ]


@register_gradient("relax.grad.scatter_elements_scan")
def scatter_elements_scan(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_elements_scan.

    Forward form: ``s = scatter_elements_scan(start, indices, factors, terms)``, the state before each
    update of ``state = factors * state + terms`` at its place.

    Backward form: with ``t = scatter_elements_scan_reverse(0, indices, factors, s_grad)``, the gradient of the
    state after each update, ``[scatter_elements(0, indices, s_grad * scatter_elements_scan(1, indices,
    factors), "add"), no_grad, s * t, t]``.
    """
    writer = elements_writer(orig_call.args[1], int(orig_call.attrs.axis))
    return _scan(writer, orig_var, orig_call, output_grad, ctx, reverse=False)


@register_gradient("relax.grad.scatter_elements_scan_reverse")
def scatter_elements_scan_reverse(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_elements_scan_reverse: as of :func:`scatter_elements_scan`, the other way."""
    writer = elements_writer(orig_call.args[1], int(orig_call.attrs.axis))
    return _scan(writer, orig_var, orig_call, output_grad, ctx, reverse=True)


@register_gradient("relax.grad.scatter_nd_scan")
def scatter_nd_scan(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_nd_scan: as of :func:`scatter_elements_scan`."""
    return _scan(nd_writer(orig_call.args[1]), orig_var, orig_call, output_grad, ctx, reverse=False)


@register_gradient("relax.grad.scatter_nd_scan_reverse")
def scatter_nd_scan_reverse(orig_var, orig_call, output_grad, ctx):
    """Gradient of scatter_nd_scan_reverse: as of :func:`scatter_elements_scan`, the other way."""
    return _scan(nd_writer(orig_call.args[1]), orig_var, orig_call, output_grad, ctx, reverse=True)


def _backward_updates(writer, call, output_grad, reduction):
    dy, indices = call.args
    zeros = relax.op.zeros_like(dy)
    return [writer.write(zeros, output_grad, reduction), no_grad(indices)]


def _scan(writer, states, call, output_grad, ctx, reverse):
    start, indices, factors, *terms = call.args
    zeros = ctx.emit(relax.op.zeros_like(start))
    through = ctx.emit(writer.scan(zeros, factors, output_grad, not reverse))
    gains = writer.scan(relax.op.ones_like(start), factors, None, reverse)
    return [
        writer.write(zeros, relax.op.multiply(output_grad, gains), "add"),
        no_grad(indices),
        relax.op.multiply(states, through),
        *([through] if terms else []),
    ]
