"""Gradients of the operators that write at indices.

Let ``p(k)`` be the index of update ``k``. All of them apply
``state[p(k)] = f(state[p(k)], updates[k])`` for each update in order, starting from the data. A
:class:`Writer` holds the operator that writes at the indices, and the one that reads at the same
indices. One table holds the partials for each ``f``. An update with an out-of-bounds index is not
written and gets the gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax
from tvm.relax import Expr
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..op.index_write import REDUCTIONS, index_tuple, listed_shape
from ..registry import register_gradient
from ._util import cast_like, no_grad, reshape_like, shape_arg, unbroadcast, wide_dtype, widen


@dataclass(frozen=True)
class Writer:
    """An operator that writes at indices, with its indices bound.

    Attributes
    ----------
    write : Callable
        ``(data, updates, reduction)``: the operator itself.
    read : Callable
        ``(data)``: the element at the index of each update, and 0 for an out-of-bounds index.
    written : Callable
        ``(output_grad, reduction)``: the gradient with respect to the updates for ``update`` and
        ``mean``.
    scan : Callable or None
        ``(start, factors, terms, reverse)``: the states of a recurrence, see
        ``scatter_elements_scan``.
    """

    write: Callable[[Expr, Expr, str], Expr]
    read: Callable[[Expr], Expr]
    written: Callable[[Expr, str], Expr]
    scan: Callable[[Expr, Expr, Expr | None, bool], Expr] | None = None


def elements_writer(indices: Expr, axis: int) -> Writer:
    """Return the writer that uses scatter_elements."""

    def scan(start: Expr, factors: Expr, terms: Expr | None, reverse: bool) -> Expr:
        name = "scatter_elements_scan_reverse" if reverse else "scatter_elements_scan"
        return getattr(backward, name)(start, indices, factors, terms, axis)

    return Writer(
        lambda data, updates, reduction: relax.op.scatter_elements(
            data, indices, updates, axis, reduction
        ),
        lambda data: backward.gather_elements_jvp(data, indices, axis),
        lambda grad, reduction: backward.scatter_elements_backward_updates(
            grad, indices, axis, reduction
        ),
        scan,
    )


def nd_writer(indices: Expr) -> Writer:
    """Return the writer that uses scatter_nd."""

    def scan(start: Expr, factors: Expr, terms: Expr | None, reverse: bool) -> Expr:
        name = "scatter_nd_scan_reverse" if reverse else "scatter_nd_scan"
        return getattr(backward, name)(start, indices, factors, terms)

    return Writer(
        lambda data, updates, reduction: relax.op.scatter_nd(data, indices, updates, reduction),
        lambda data: backward.gather_nd_jvp(data, indices),
        lambda grad, _: backward.scatter_nd_backward_updates(grad, indices),
        scan,
    )


def put_writer(indices: Expr) -> Writer:
    """Return the writer that uses index_put, for values of the shape of the indices."""
    return Writer(
        lambda data, values, reduction: relax.op.index_put(
            data, indices, values, reduction == "add"
        ),
        lambda data: backward.index_tensor_jvp(data, indices),
        lambda grad, _: backward.index_put_backward_values(grad, indices),
    )


def _update(
    writer: Writer, call: relax.Call, y: Expr, dy: Expr, ctx: relax.BlockBuilder
) -> tuple[Expr, Expr]:
    """Return 0 for overwritten elements of the data and for updates overwritten by a later one."""
    none = relax.op.zeros_like(call.args[2])
    return writer.write(dy, none, "update"), writer.written(dy, "update")


def _add(
    writer: Writer, call: relax.Call, y: Expr, dy: Expr, ctx: relax.BlockBuilder
) -> tuple[Expr, Expr]:
    return dy, writer.read(dy)


def _mean(
    writer: Writer, call: relax.Call, y: Expr, dy: Expr, ctx: relax.BlockBuilder
) -> tuple[Expr, Expr]:
    """Halve the gradient of the data, and of every earlier update at the index, with each
    update."""
    none = relax.op.zeros_like(call.args[2])
    return writer.write(dy, none, "mean"), writer.written(dy, "mean")


def _mul(
    writer: Writer, call: relax.Call, y: Expr, dy: Expr, ctx: relax.BlockBuilder
) -> tuple[Expr, Expr]:
    """Return for each update the product of the data and earlier updates, times the product of
    later updates.

    This is also correct for factors of 0. It is computed in float32 at least: the product of either
    side may be out of range where the product of both is not.
    """
    data, _, updates = call.args
    factors, wide_grad = ctx.emit(widen(updates)), ctx.emit(widen(dy))
    assert writer.scan is not None  # index_put has none, and no such reduction
    before = writer.scan(widen(data), factors, None, False)
    after = writer.scan(wide_grad, factors, None, True)
    return (
        writer.write(dy, updates, "mul"),
        cast_like(ctx, relax.op.multiply(before, after), updates),
    )


def _extreme(
    writer: Writer, call: relax.Call, y: Expr, dy: Expr, ctx: relax.BlockBuilder
) -> tuple[Expr, Expr]:
    """Share the gradient evenly among the data and updates that equal the result, as in PyTorch."""
    data, _, updates = call.args
    dtype = wide_dtype(dy)

    def mask(a: Expr, b: Expr) -> Expr:
        # The mask counts as a constant in differentiation.
        return ctx.emit(no_grad(relax.op.astype(relax.op.equal(a, b), dtype)))

    kept, chosen = mask(data, y), mask(updates, writer.read(y))
    count = writer.write(kept, chosen, "add")
    share = ctx.emit(relax.op.divide(widen(dy), count))
    return (
        cast_like(ctx, relax.op.multiply(share, kept), data),
        cast_like(ctx, relax.op.multiply(writer.read(share), chosen), updates),
    )


#: Gradients with respect to data and updates, as functions of writer, call, result, its gradient
#: and builder.
_PARTIALS = {
    "update": _update,
    "add": _add,
    "mean": _mean,
    "mul": _mul,
    "max": _extreme,
    "min": _extreme,
}


@register_gradient("relax.scatter_elements")
def scatter_elements(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of scatter_elements.

    Forward form: ``y = data``, then
    ``y[.., indices[.., k, ..], ..] = f(y[..], updates[.., k, ..])`` for each update in row-major
    order.

    Backward form, for the reduction

    - update: ``[scatter_elements(y_grad, indices, 0), no_grad,
      scatter_elements_backward_updates(y_grad, indices)]``: the last update at an index gets its
      gradient;
    - add: ``[y_grad, no_grad, gather_elements_jvp(y_grad, indices)]``;
    - mean: as for update, with the shares 1/2, 1/4, ... counted from the last update;
    - mul: ``[scatter_elements(y_grad, indices, updates, "mul"), no_grad, before *
      after]`` with the product ``before`` of data and earlier updates, and the product ``after`` of
      y_grad and later updates;
    - max, min: ``y_grad / N`` for each of the ``N`` elements of data and updates that equal ``y``.
    """
    indices = orig_call.args[1]
    writer = elements_writer(indices, int(orig_call.attrs.axis))
    return _scatter(writer, orig_var, orig_call, output_grad, ctx)


@register_gradient("relax.scatter_nd")
def scatter_nd(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of scatter_nd.

    Forward form: ``y = data``, then ``y[indices[p, 0], indices[p, 1], ..] = f(y[..], updates[p])``
    for each point ``p`` in row-major order.

    Backward form: that of :func:`scatter_elements`.
    """
    return _scatter(nd_writer(orig_call.args[1]), orig_var, orig_call, output_grad, ctx)


@register_gradient("relax.index_put")
def index_put(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of index_put.

    Forward form: ``y = data``, then ``y[indices[0], indices[1], ..] = values``, or ``+= values``
    with ``accumulate``, with indices and values that are broadcast.

    Backward form: that of :func:`scatter_elements` with the reductions update and add; the gradient
    of the values is summed over the axes along which they were broadcast.
    """
    data, indices, values = orig_call.args
    listed = listed_shape(ctx, data, indices, values)
    writer = put_writer(index_tuple(indices))
    partials = _add if orig_call.attrs.accumulate else _update
    kept, written = partials(writer, orig_call, orig_var, output_grad, ctx)
    written = unbroadcast(ctx, written, values) if listed is None else reshape_like(written, values)
    return [kept, no_grad(indices), written]


@register_gradient("relax.slice_scatter")
def slice_scatter(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of slice_scatter.

    Forward form: ``y = data``, then ``y[.., start:end:step, ..] = src`` along the axis.

    Backward form: ``[slice_scatter(y_grad, 0, start, end, step), slice_scatter_backward_src(y_grad,
    src.shape, start, end, step), no_grad, no_grad, no_grad]``: the slice of the gradient.
    """
    _, src, *bounds = orig_call.args
    axis = int(orig_call.attrs.axis)
    return [
        relax.op.slice_scatter(output_grad, relax.op.zeros_like(src), *bounds, axis),
        backward.slice_scatter_backward_src(output_grad, shape_arg(src), *bounds, axis),
        *map(no_grad, bounds),
    ]


def _scatter(
    writer: Writer,
    orig_var: relax.Var,
    orig_call: relax.Call,
    output_grad: Expr,
    ctx: relax.BlockBuilder,
) -> list[Expr]:
    indices = orig_call.args[1]
    reduction = orig_call.attrs.reduction
    if reduction not in REDUCTIONS[orig_call.op.name]:
        raise GradientError(
            f"reduction must be one of {', '.join(REDUCTIONS[orig_call.op.name])}, which TVM can "
            f"compile, but it is {reduction!r}"
        )
    kept, written = _PARTIALS[reduction](writer, orig_call, orig_var, output_grad, ctx)
    return [kept, no_grad(indices), written]
