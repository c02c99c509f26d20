"""Operators along a divided axis that need a few numbers of the other workers: classes or words
that are divided among workers.

They belong to an embedding and a cross entropy whose vocabulary is divided (Shoeybi et al., 2019,
section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as own_op

from ...activity import holds_floats
from ...ir.compat import dtype_of
from ._labels import Axes, rule
from ._layouts import as_int
from ._propagation import Operand, Propagation
from ._shapes import shape_rule

_HALF = ("float16", "bfloat16")


@shape_rule("nn.softmax", "nn.log_softmax")
def _softmax(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Any]
) -> bool:
    """The largest element and the sum of exponentials are over all workers; the result is
    divided."""
    (data,) = operands
    axis, emit = data.layout.axis, propagation.emit
    if int(call.attrs.axis) % data.kind.ndim != axis:
        return False
    dtype = dtype_of(data.kind)
    x = emit(op.astype(data.value, "float32")) if dtype in _HALF else data.value
    # The result does not depend on the shift, so that it needs no gradient.
    largest = emit(op.max(emit(own_op.stop_gradient(x)), [axis], keepdims=True))
    shifted = emit(op.subtract(x, emit(op.ccl.allreduce(largest, "max", True))))
    exponentials = emit(op.exp(shifted))
    part = emit(op.sum(exponentials, [axis], keepdims=True))
    total = emit(own_op.reduce_from_tensor_parallel(part))
    if call.op.name == "relax.nn.log_softmax":
        result = op.subtract(shifted, propagation.copy(emit(op.log(total))))
    else:
        result = op.divide(exponentials, propagation.copy(total))
    result = op.astype(emit(result), dtype) if dtype in _HALF else result
    propagation.finish(variable, result, data.layout)
    return True


@shape_rule("take")
def _take(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Operand]
) -> bool:
    """Each worker takes the elements that it has, and 0 for others; the result is the sum."""
    table, *rest = operands
    layout, attrs, emit = table.layout, call.attrs, propagation.emit
    ndim = table.kind.ndim
    if layout is None or attrs.axis is None or int(attrs.axis) % ndim != layout.axis:
        return False
    if len(rest) != 1 or rest[0].layout is not None:
        return False
    extent = _extent(propagation, call, table)
    index, is_inside = _position(emit, rest[0].value, extent, str(attrs.mode))
    place, is_own = _own_places(propagation, call, table, index)
    rows = emit(op.take(table.value, place, layout.axis, mode="fast"))

    def beside(mask: relax.Expr) -> relax.Expr:
        """Return a mask of the indices with axes for the other axes of the table."""
        ones = [1] * layout.axis, [1] * (ndim - 1 - layout.axis)
        return emit(op.reshape(mask, [*ones[0], *rest[0].kind.shape.values, *ones[1]]))

    mask = None if is_inside is None else beside(is_inside)
    total = _sum_of_chosen(emit, rows, beside(is_own), mask)
    propagation.finish(variable, total, None)
    return True


@shape_rule("gather_elements")
def _gather_elements(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Operand]
) -> bool:
    """As for ``take``, with an index for each element of the result."""
    data, indices = operands
    layout, emit = data.layout, propagation.emit
    if layout is None or indices.layout is not None:
        return False
    if int(call.attrs.axis) % data.kind.ndim != layout.axis:
        return False
    extent = _extent(propagation, call, data)
    index, is_inside = _position(emit, indices.value, extent, "fast")
    place, is_own = _own_places(propagation, call, data, index)
    elements = emit(op.gather_elements(data.value, place, layout.axis))
    propagation.finish(variable, _sum_of_chosen(emit, elements, is_own, is_inside), None)
    return True


def _position(
    emit: Callable[[relax.Expr], relax.Var], index: relax.Expr, extent: int, mode: str
) -> tuple[relax.Expr, relax.Expr | None]:
    """Return indices as indices of the elements that they select, and whether these exist; None if
    all do.

    The modes are as for :func:`relax_grad.topi.position.position`.
    """
    kind = dtype_of(index.ty)
    if kind == "uint64" and mode in ("clip", "wrap"):  # the rest of its range is negative as int64
        limit = relax.const(np.array(extent if mode == "wrap" else extent - 1, kind))
        index = emit(op.floor_mod(index, limit) if mode == "wrap" else op.minimum(index, limit))
    index = index if kind == "int64" else emit(op.astype(index, "int64"))
    zero, last = relax.const(0, "int64"), relax.const(extent - 1, "int64")
    if mode == "wrap":
        return emit(op.floor_mod(index, relax.const(extent, "int64"))), None
    if mode == "clip":
        return emit(op.maximum(emit(op.minimum(index, last)), zero)), None
    if mode == "fast" and not kind.startswith("uint"):
        behind = emit(op.add(index, relax.const(extent, "int64")))
        index = emit(op.where(emit(op.less(index, zero)), behind, index))
    is_inside = op.logical_and(
        emit(op.greater_equal(index, zero)), emit(op.less_equal(index, last))
    )
    return index, emit(is_inside)


def _sum_of_chosen(
    emit: Callable[[relax.Expr], relax.Var],
    elements: relax.Expr,
    is_own: relax.Expr,
    is_inside: relax.Expr | None,
) -> relax.Expr:
    """Return the sum of the workers' own elements; those that do not exist are NaN, or 0 for
    integers."""
    dtype = dtype_of(elements.ty)
    part = emit(op.where(is_own, elements, relax.const(0, dtype)))
    total = own_op.reduce_from_tensor_parallel(part)
    if is_inside is None or not holds_floats(elements.ty):
        return total
    return op.where(is_inside, emit(total), relax.const(np.nan, dtype))


@shape_rule("nn.nll_loss")
def _nll_loss(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Operand]
) -> bool:
    """Each worker ignores the targets that others have; the loss is the sum, divided by the weights
    of all targets."""
    predictions, targets, *weights = operands
    layout, emit = predictions.layout, propagation.emit
    classes = min(1, predictions.kind.ndim - 1)
    if layout is None or layout.axis != classes or targets.layout is not None:
        return False
    dtype, reduction = dtype_of(predictions.kind), str(call.attrs.reduction)

    def widened(value: relax.Expr) -> relax.Expr:
        return emit(op.astype(value, "float32")) if dtype in _HALF else value

    ignored = relax.const(int(call.attrs.ignore_index), dtype_of(targets.kind))
    is_counted = emit(op.not_equal(targets.value, ignored))
    place, is_own = _own_places(propagation, call, predictions, targets.value)
    is_own = emit(op.logical_and(is_own, is_counted))
    other = relax.const(-1, dtype_of(targets.kind))
    own_targets = emit(op.where(is_own, place, other))
    own_weights = [widened(propagation.local(weight, 0, layout)) for weight in weights]
    part = op.nn.nll_loss(
        widened(predictions.value),
        own_targets,
        *own_weights,
        reduction="none" if reduction == "none" else "sum",
        ignore_index=-1,
    )
    loss = own_op.reduce_from_tensor_parallel(emit(part))
    if reduction == "mean":
        kind = "float32" if dtype in _HALF else dtype
        if own_weights:
            counts = emit(op.take(own_weights[0], place, 0, mode="fast"))
            counts = emit(op.where(is_own, counts, relax.const(0, kind)))
            count = own_op.reduce_from_tensor_parallel(emit(op.sum(counts)))
        else:
            count = op.sum(emit(op.astype(is_counted, kind)))
        loss = op.divide(emit(loss), emit(count))
    loss = op.astype(emit(loss), dtype) if dtype in _HALF else loss
    propagation.finish(variable, loss, None)
    return True


@rule("nn.nll_loss")
def _nll_loss_axes(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    """The axes beside the classes; a mean needs the number of all targets."""
    predictions, targets, *weights = operands
    places = [("place", i) for i in range(targets.ndim)]
    first = ["class"] if predictions.ndim == 1 else [places[0], "class", *places[1:]]
    reduction = str(call.attrs.reduction)
    return Axes(
        [first, places, *(["class"] for _ in weights)],
        [places if reduction == "none" else []],
        whole={"class"} if reduction != "mean" else {"class", *places},
        sums=set(places) if reduction == "sum" else set(),
    )


def _extent(propagation: Propagation, call: relax.Call, operand: Operand) -> int:
    """Return the extent of a divided axis."""
    return _size(propagation, call, operand) * propagation.num_workers


def _size(propagation: Propagation, call: relax.Call, operand: Operand) -> int:
    """Return the extent of a worker's part of a divided axis, all of which the workers have in the
    order of their places."""
    layout = operand.layout
    if layout is None:
        propagation.refuse(call.op.name, f"{operand.name} must be divided among the workers")
    size = as_int(layout.size)
    if as_int(layout.parts) != 1 or size is None:
        propagation.refuse(
            call.op.name,
            f"axis {layout.axis} of {operand.name} must have a constant extent and be divided "
            f"within one part, but it is divided within {layout.parts} parts; annotate the "
            "parameter with parts=1",
        )
    return size


def _own_places(
    propagation: Propagation, call: relax.Call, operand: Operand, index: relax.Expr
) -> tuple[relax.Expr, relax.Expr]:
    """Return indices along the divided axis as indices of the worker's part, 0 for others, and
    whether the worker has them."""
    size, emit = _size(propagation, call, operand), propagation.emit
    kind = dtype_of(index.ty)
    firsts = relax.const(np.arange(propagation.num_workers) * size, kind)
    first = emit(op.distributed.redistribute_replica_to_shard(firsts, propagation.num_workers, 0))
    if index.ty.ndim == 0:
        first = emit(op.reshape(first, ()))
    zero = relax.const(0, kind)
    place = emit(op.subtract(index, first))
    is_own = emit(
        op.logical_and(
            emit(op.greater_equal(place, zero)), emit(op.less(place, relax.const(size, kind)))
        )
    )
    return emit(op.where(is_own, place, zero)), is_own
