"""Converters of operators that read and write elements at computed places."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx

from ....op import stop_gradient
from ._call import Call, axis_of, converts, dtype, extents_of, is_float, scalar, static
from ._support import Converter, Refused

INDEXING: dict[str, Converter] = {}

_op = relax.op


def _in_bytes(function: Callable) -> Callable:
    """Return a converter that computes booleans as int8."""

    def convert(call: Call, data: relax.Expr, **arguments: Any) -> relax.Expr:
        if dtype(data) != "bool":
            return function(call, data, **arguments)
        arguments = {
            name: call.cast(value, "int8")
            if name in ("src", "source", "values") and isinstance(value, relax.Expr)
            else value
            for name, value in arguments.items()
        }
        return call.cast(call.emit(function(call, call.cast(data, "int8"), **arguments)), "bool")

    return convert


@converts(INDEXING, "gather.default")
@_in_bytes
def _gather(
    call: Call, data: relax.Expr, dim: int, index: relax.Expr, sparse_grad: bool
) -> relax.Expr:
    if not data.ty.ndim:
        return data if not index.ty.ndim else _op.broadcast_to(data, call.shape)
    if not index.ty.ndim:
        return call.reshape(call.emit(rows_at(call, data, call.reshape(index, [1]), 0)), [])
    axis = axis_of(dim, data.ty.ndim)
    for other in range(data.ty.ndim):
        if other != axis:
            data = front(call, data, other, extents_of(index)[other])
    return _op.gather_elements(data, _positive(call, index, extents_of(data)[axis]), axis)


def _positive(call: Call, index: relax.Expr, extent: int | tirx.Expr) -> relax.Expr:
    """Return an index whose negative numbers select nothing, where operators of Relax count them
    from the end."""
    require_places(call, index, extent)
    index = call.cast(index, "int64")
    negative = call.emit(_op.less(index, scalar(0, "int64")))
    return call.emit(_op.where(negative, call.tensor(extent, "int64"), index))


def rows_at(call: Call, data: relax.Expr, index: relax.Expr, axis: int) -> relax.Expr:
    """Return the elements at indices of an axis; NaN for negative ones too, which PyTorch
    refuses."""
    return _op.take(data, call.cast(index, "int64"), axis, "nan")


def front(call: Call, data: relax.Expr, axis: int, count: int | tirx.Expr) -> relax.Expr:
    """Return the first elements of an axis."""
    if extents_of(data)[axis] is count or extents_of(data)[axis] == count:
        return data
    call.require_slice(0, count, extents_of(data)[axis])
    return call.emit(_op.strided_slice(data, [axis], [0], [count], [1]))


@converts(INDEXING, "index_select.default")
@_in_bytes
def _index_select(call: Call, data: relax.Expr, dim: int, index: relax.Expr) -> relax.Expr:
    if not data.ty.ndim:
        return data
    axis = axis_of(dim, data.ty.ndim)
    require_places(call, index, extents_of(data)[axis])
    rows = call.emit(rows_at(call, data, _vector(call, index), axis))
    return _op.reshape(rows, call.shape)


def _vector(call: Call, index: relax.Expr) -> relax.Expr:
    index = call.cast(index, "int64")
    return index if index.ty.ndim else call.reshape(index, [1])


@converts(INDEXING, "take.default")
@_in_bytes
def _take(call: Call, data: relax.Expr, index: relax.Expr) -> relax.Expr:
    size = math.prod(static(extents_of(data)))
    index = _from_zero(call, index, size)
    return rows_at(call, call.reshape(data, [size]), index, 0)


def require_places(call: Call, index: relax.Expr, extent: int | tirx.Expr) -> None:
    """Require that an axis with a symbolic extent has the elements of a constant index, and any
    element for a computed index."""
    if isinstance(extent, int):
        return
    places = call.constant(index)
    if places is None:
        call.require_slice(0, tirx.min(_product([1, *extents_of(index)]), 1), extent)
    elif places.size:
        last = max(int(places.max()) + 1, -int(places.min()))
        call.require_slice(0, last, extent)


def _from_zero(call: Call, index: relax.Expr, extent: int | tirx.Expr) -> relax.Expr:
    """Return an index with negative numbers counted from the end."""
    require_places(call, index, extent)
    index = call.cast(index, "int64")
    negative = call.emit(_op.less(index, scalar(0, "int64")))
    return call.emit(_op.where(negative, _op.add(index, call.tensor(extent, "int64")), index))


def _product(extents: list[int]) -> int:
    total = 1
    for extent in extents:
        total = extent if isinstance(total, int) and total == 1 else total * extent
    return total


class _Places:
    """Index tensors on some axes as one index into these axes, joined.

    ``front`` tells whether the axes move to the front; otherwise they are adjacent and stay.
    """

    def __init__(self, call: Call, data: relax.Expr, indices: list[relax.Expr | None]):
        self.call = call
        indices = [*indices, *[None] * (data.ty.ndim - len(indices))]
        self.axes = [i for i, index in enumerate(indices) if index is not None]
        present = [indices[axis] for axis in self.axes]
        if any(dtype(index) == "bool" for index in present):
            raise Refused(
                "a boolean mask selects a number of elements that depends on values; use "
                "torch.where"
            )
        shape = extents_of(data)
        self.front = self.axes != list(range(self.axes[0], self.axes[-1] + 1))
        self.rest = [i for i in range(len(shape)) if i not in self.axes]
        self.order = [*self.axes, *self.rest] if self.front else list(range(len(shape)))
        self.axis = 0 if self.front else self.axes[0]
        ordered = [shape[i] for i in self.order]
        self.before = ordered[: self.axis]
        self.after = ordered[self.axis + len(self.axes) :]
        self.inner = ordered[self.axis : self.axis + len(self.axes)]
        self.shape = shape
        total = None
        for index, extent in zip(present, self.inner, strict=True):
            index = _from_zero(call, index, extent)
            if total is None:
                total = index
            else:
                scaled = _op.multiply(total, call.tensor(extent, "int64"))
                # An index beyond one axis must not fall on another axis' element.
                outside = _op.logical_or(
                    _op.less(index, scalar(0, "int64")),
                    _op.greater_equal(index, call.tensor(extent, "int64")),
                )
                beyond = call.tensor(_product(self.inner), "int64")
                total = call.emit(_op.where(outside, beyond, _op.add(scaled, index)))
        self.index = total

    def joined(self, data: relax.Expr) -> relax.Expr:
        """Return the data with the indexed axes as one."""
        if self.order != list(range(len(self.order))):
            data = self.call.emit(_op.permute_dims(data, self.order))
        if len(self.axes) == 1:
            return data
        return self.call.reshape(data, [*self.before, _product(self.inner), *self.after])

    def apart(self, data: relax.Expr) -> relax.Expr:
        """Return joined data in its own shape."""
        if len(self.axes) > 1:
            data = self.call.reshape(data, [*self.before, *self.inner, *self.after])
        if self.order != list(range(len(self.order))):
            data = self.call.emit(_op.permute_dims(data, np.argsort(self.order).tolist()))
        return data


@converts(INDEXING, "index.Tensor", "_unsafe_index.Tensor")
@_in_bytes
def _index(call: Call, data: relax.Expr, indices: list[relax.Expr | None]) -> relax.Expr:
    places = _Places(call, data, indices)
    return rows_at(call, places.joined(data), places.index, places.axis)


@converts(INDEXING, "index_put.default", "_unsafe_index_put.default", "index_put_.default")
@_in_bytes
def _index_put(
    call: Call,
    data: relax.Expr,
    indices: list[relax.Expr | None],
    values: relax.Expr,
    accumulate: bool,
    unsafe: bool = False,
) -> relax.Expr:
    values = call.cast(values, dtype(data))
    first = next(index for index in indices if index is not None)
    if dtype(first) == "bool":
        return _masked_put(call, data, indices, values, accumulate)
    places = _Places(call, data, indices)
    index = extents_of(places.index)
    wanted = [*places.before, *index, *places.after]
    values = call.emit(_op.broadcast_to(values, wanted))
    # The rows are moved to the front: [K, before..., after...].
    lead, count = len(places.before), len(index)
    rank = len(wanted)
    moved = list(range(lead, lead + count))
    others = [i for i in range(rank) if i not in moved]
    if lead:
        values = call.emit(_op.permute_dims(values, [*moved, *others]))
    number = _product(index)
    values = call.reshape(values, [number, *places.before, *places.after])
    rows = places.joined(data)
    order = [lead, *(i for i in range(rows.ty.ndim) if i != lead)]
    if lead:
        rows = call.emit(_op.permute_dims(rows, order))
    rows = written(call, rows, call.reshape(places.index, [number]), values, accumulate)
    if lead:
        rows = call.emit(_op.permute_dims(rows, np.argsort(order).tolist()))
    return places.apart(rows)


def written(
    call: Call, rows: relax.Expr, index: relax.Expr, values: relax.Expr, accumulate: bool
) -> relax.Expr:
    """Write rows, or add them, at the places of a vector."""
    index = call.emit(_op.expand_dims(index, 1))
    reduction = "add" if accumulate else "update"
    return call.emit(_op.scatter_nd(rows, index, values, reduction))


def _masked_put(
    call: Call, data: relax.Expr, indices: relax.Expr, values: relax.Expr, accumulate: bool
) -> relax.Expr:
    """Write one value, or a row of values, at all places where a mask is true."""
    taken = [i for i, index in enumerate(indices) if index is not None]
    if len(taken) > 1:
        raise Refused("a boolean mask beside another index has no form in Relax")
    mask, axis, rank = indices[taken[0]], taken[0], data.ty.ndim
    inner = rank - axis - mask.ty.ndim
    value = values.ty.ndim
    if value > inner and any(extent != 1 for extent in extents_of(values)[: value - inner]):
        raise Refused(
            "a boolean mask that takes one value for each true element depends on values; use "
            "torch.where or masked_scatter"
        )
    if value > inner:
        values = call.reshape(values, extents_of(values)[value - inner :])
    mask = call.reshape(mask, [*extents_of(mask), *[1] * inner])
    new = call.emit(_op.add(data, values)) if accumulate else values
    return _op.where(mask, new, data)


@converts(
    INDEXING,
    "index_add.default",
    "index_copy.default",
    "index_fill.int_Scalar",
    "index_fill.int_Tensor",
)
@_in_bytes
def _index_add(
    call: Call,
    data: relax.Expr,
    dim: int,
    index: relax.Expr,
    source: relax.Expr | None = None,
    alpha: float = 1,
    value: Any = None,
) -> relax.Expr:
    kind, shape = dtype(data), extents_of(data)
    rank = len(shape)
    axis = axis_of(dim, rank)
    index = _vector(call, index)
    if call.node.target.__name__.startswith("index_fill"):
        require_places(call, index, shape[axis] if rank else 1)
    else:
        index = _positive(call, index, shape[axis] if rank else 1)
    count = extents_of(index)[0]
    if source is None:
        part = [*shape[:axis], count, *shape[axis + 1 :]] if rank else [count]
        source = call.emit(_op.broadcast_to(call.tensor(value, kind), part))
    if alpha != 1:
        source = call.emit(_op.multiply(source, call.tensor(alpha, kind)))
    if not rank:
        data, source = call.reshape(data, [1]), call.reshape(source, [count])
    order = [axis, *(i for i in range(rank) if i != axis)]
    if axis:
        data, source = (call.emit(_op.permute_dims(tensor, order)) for tensor in (data, source))
    adds = call.node.target.__name__.startswith("index_add")
    result = written(call, data, index, source, adds)
    if axis:
        result = call.emit(_op.permute_dims(result, np.argsort(order).tolist()))
    return result if rank else _op.reshape(result, [])


_REDUCTIONS = {
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
    "mean": "add",
}


@converts(
    INDEXING,
    *("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce"),
    *("scatter_add.default", "scatter_reduce.two"),
)
@_in_bytes
def _scatter(
    call: Call,
    data: relax.Expr,
    dim: int,
    index: relax.Expr,
    src: relax.Expr | None = None,
    value: Any = None,
    reduce: str | None = None,
    include_self: bool = True,
) -> relax.Expr:
    kind, shape = dtype(data), extents_of(data)
    index = call.cast(index, "int64")
    if not shape or not index.ty.ndim:
        data = call.reshape(data, shape or [1])
        index = call.reshape(index, [1])
        src = src if src is None else call.reshape(src, [1])
    axis = axis_of(dim, data.ty.ndim)
    index = _positive(call, index, extents_of(data)[axis])
    if src is None:
        src = call.emit(_op.broadcast_to(call.tensor(value, kind), extents_of(index)))
    for other_axis, count in enumerate(extents_of(index)):
        if other_axis != axis:
            call.require_slice(0, count, extents_of(data)[other_axis])
        src = front(call, src, other_axis, count)
    if call.node.target.__name__ == "scatter_add.default":
        reduce = "add"
    if reduce is None:
        result = _op.scatter_elements(data, index, src, axis, "update")
    else:
        result = _reduced(call, data, index, src, axis, reduce=reduce, include_self=include_self)
    return _op.reshape(result, call.shape) if not shape else result


@converts(INDEXING, "index_reduce.default")
@_in_bytes
def _index_reduce(
    call: Call,
    data: relax.Expr,
    dim: int,
    index: relax.Expr,
    source: relax.Expr,
    reduce: str,
    include_self: bool = True,
) -> relax.Expr:
    shape, index = extents_of(data), _vector(call, index)
    if not shape:
        data, source = call.reshape(data, [1]), call.reshape(source, [1])
    axis = axis_of(dim, data.ty.ndim)
    index = _positive(call, index, extents_of(data)[axis])
    ones = [1] * data.ty.ndim
    ones[axis] = extents_of(index)[0]
    places = call.emit(_op.broadcast_to(call.reshape(index, ones), extents_of(source)))
    result = _reduced(call, data, places, source, axis, reduce=reduce, include_self=include_self)
    return result if shape else _op.reshape(result, [])


def _neutral(reduce: str, kind: str) -> relax.Expr:
    """Return the number that a reduction leaves alone."""
    if reduce in ("amax", "amin"):
        if "float" in kind:
            return scalar(-math.inf if reduce == "amax" else math.inf, kind)
        limits = np.iinfo(kind)
        return scalar(limits.min if reduce == "amax" else limits.max, kind)
    return scalar(1 if reduce in ("prod", "multiply") else 0, kind)


def _reduced(
    call: Call,
    data: relax.Expr,
    index: relax.Expr,
    src: relax.Expr,
    axis: int,
    reduce: str,
    include_self: bool,
) -> relax.Expr:
    kind, original = dtype(data), data
    places = extents_of(index)
    if not include_self:
        neutral = call.emit(_op.broadcast_to(_neutral(reduce, kind), places))
        data = call.emit(_op.scatter_elements(data, index, neutral, axis, "update"))
    if reduce == "mean":
        return _scattered_mean(call, data, index, src, axis, include_self=include_self)
    if reduce in ("amax", "amin") and is_float(data):
        return _scattered_extreme(call, data, index, src, axis, reduce=reduce, original=original)
    return call.emit(_op.scatter_elements(data, index, src, axis, _REDUCTIONS[reduce]))


def _counted(
    call: Call, data: relax.Expr, index: relax.Expr, axis: int, start: float, kind: str
) -> relax.Expr:
    """Return how many elements go to each place."""
    base = call.filled(extents_of(data), start, kind)
    ones = call.emit(_op.ones(extents_of(index), kind))
    return call.emit(_op.scatter_elements(base, index, ones, axis, "add"))


def _scattered_mean(
    call: Call, data: relax.Expr, index: relax.Expr, src: relax.Expr, axis: int, include_self: bool
) -> relax.Expr:
    kind = dtype(data)
    total = call.emit(_op.scatter_elements(data, index, src, axis, "add"))
    count = _counted(call, data, index, axis, 1 if include_self else 0, kind=kind)
    count = call.emit(_op.maximum(count, scalar(1, kind)))
    if is_float(data):
        return call.emit(_op.divide(total, count))
    return call.emit(_op.floor_divide(total, count))


def _scattered_extreme(
    call: Call,
    data: relax.Expr,
    index: relax.Expr,
    src: relax.Expr,
    axis: int,
    reduce: str,
    original: relax.Expr,
) -> relax.Expr:
    """Return the extremes; equal ones share the gradient evenly, the operand's own element too.

    An element of the original operand that takes no part has a share, which is lost, as in PyTorch.
    """
    kind = dtype(data)
    fixed, source = (call.emit(stop_gradient(tensor)) for tensor in (data, src))
    best = call.emit(
        stop_gradient(
            call.emit(_op.scatter_elements(fixed, index, source, axis, _REDUCTIONS[reduce]))
        )
    )
    zero, one = scalar(0, kind), scalar(1, kind)
    reached = call.emit(_op.gather_elements(best, index, axis))
    own = call.emit(_op.equal(fixed, best))
    counted = call.emit(_op.equal(call.emit(stop_gradient(original)), best))
    others = call.emit(_op.equal(source, reached))
    hits = call.emit(
        _op.scatter_elements(call.cast(counted, kind), index, call.cast(others, kind), axis, "add")
    )
    share = call.emit(_op.divide(one, _op.maximum(hits, one)))
    # The value is the constant extreme plus differences that are zero and carry the gradient.
    mine = _op.where(own, _op.subtract(data, fixed), zero)
    parts = call.emit(_op.where(others, _op.subtract(src, source), zero))
    change = call.emit(_op.scatter_elements(call.emit(mine), index, parts, axis, "add"))
    finite = call.emit(_op.isfinite(best))
    change = call.emit(_op.where(finite, _op.multiply(change, share), zero))
    return call.emit(_op.add(best, change))
