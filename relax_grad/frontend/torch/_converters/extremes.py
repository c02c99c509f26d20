"""Converters of extremes of two operands and of clamp: PyTorch's gradients at ties, which differ
between releases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tvm import relax

from ...._packages import parse_version
from ....op import stop_gradient
from ._call import Call, converts, scalar, wide_dtype
from ._support import Converter
from .elementwise import promoted

EXTREMES: dict[str, Converter] = {}

#: Whether equal operands of fmax, fmin and clamp share the gradient, and a bound that is a number
#: takes it from an equal operand: since PyTorch 2.14. Earlier, the first operand has the gradient.
SHARES_TIES = parse_version(torch.__version__) >= (2, 14)

_op = relax.op


def _extreme(
    call: Call, function: Callable, data: relax.Expr, other: relax.Expr, kind: str
) -> relax.Expr:
    """Return the larger or smaller operand; NaN in either of them is the result."""
    result = call.emit(function(data, other))
    if "float" not in kind:
        return result
    # Relax's extreme is the second operand where the operands have no order.
    fixed = call.emit(stop_gradient(data))
    wrong = call.emit(_op.isnan(call.cast(fixed, wide_dtype(kind))))
    return _op.add(result, call.emit(_op.where(wrong, fixed, scalar(0, kind))))


def _converter(function: Callable, logical: Callable) -> Callable:
    """Return a converter of the larger or smaller operand."""

    def convert(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
        kind = promoted(call, "data", "other")
        data, other = call.tensor(data, kind), call.tensor(other, kind)
        return (
            logical(data, other) if kind == "bool" else _extreme(call, function, data, other, kind)
        )

    return convert


for _name, _function, _on_bools in (
    ("maximum", _op.maximum, _op.logical_or),
    ("minimum", _op.minimum, _op.logical_and),
):
    converts(EXTREMES, f"{_name}.default", f"{_name[:3]}.other")(_converter(_function, _on_bools))


@converts(EXTREMES, "fmax.default", "fmin.default")
def _extreme_number(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """NaN is the result of two only."""
    kind = promoted(call, "data", "other")
    data, other = call.tensor(data, kind), call.tensor(other, kind)
    largest = call.node.target.__name__ == "fmax.default"
    if kind == "bool":
        return (_op.logical_or if largest else _op.logical_and)(data, other)
    first = call.emit((_op.greater_equal if largest else _op.less_equal)(data, other))
    if "float" in kind:
        first = call.emit(_op.logical_or(first, _op.isnan(call.cast(other, wide_dtype(kind)))))
    chosen = call.emit(_op.where(first, data, other))
    if not (SHARES_TIES and "float" in kind):
        return chosen
    shared = call.emit((_op.maximum if largest else _op.minimum)(data, other))
    return _op.where(call.emit(_op.equal(data, other)), shared, chosen)


@converts(
    EXTREMES,
    "clamp.default",
    "clamp.Tensor",
    "clamp_min.default",
    "clamp_max.default",
    "clamp_min.Tensor",
    "clamp_max.Tensor",
)
def _clamp(
    call: Call,
    data: relax.Expr,
    min: float | relax.Expr | None = None,
    max: float | relax.Expr | None = None,
) -> relax.Expr:
    """NaN stays. It has no gradient if the bounds are numbers."""
    kind = call.dtype
    data = call.cast(data, kind)
    are_tensors = isinstance(min, relax.Expr) or isinstance(max, relax.Expr)
    if SHARES_TIES and are_tensors and "float" in kind:
        return _shared_clamp(call, data, min, max, kind)
    if "float" in kind and isinstance(min, relax.Expr) and isinstance(max, relax.Expr):
        # Below bounds that are equal, PyTorch gives the gradient to neither.
        min, max = call.cast(min, kind), call.cast(max, kind)
        min = call.emit(_op.where(_op.equal(min, max), call.emit(stop_gradient(min)), min))
    for bound, inside, outside in (
        (min, _op.greater if SHARES_TIES else _op.greater_equal, _op.less),
        (max, _op.less if SHARES_TIES else _op.less_equal, _op.greater),
    ):
        if bound is None:
            continue
        bound = call.tensor(bound, kind)
        rest = data
        if "float" in kind:
            rest = call.emit(stop_gradient(data))
            wrong = call.emit(_op.isnan(call.cast(bound, wide_dtype(kind))))
            rest = call.emit(_op.where(wrong, bound, rest))
        rest = call.emit(_op.where(outside(data, bound), bound, rest))
        data = call.emit(_op.where(inside(data, bound), data, rest)) if "float" in kind else rest
    return data


def _shared_clamp(
    call: Call,
    data: relax.Expr,
    min: float | relax.Expr | None,
    max: float | relax.Expr | None,
    kind: str,
) -> relax.Expr:
    """Return floats within bounds that are tensors; ties share the gradient."""
    lowest, highest = (None if bound is None else call.cast(bound, kind) for bound in (min, max))
    result = data
    for function, bound in ((_op.maximum, lowest), (_op.minimum, highest)):
        if bound is not None:
            result = call.emit(_extreme(call, function, result, bound, kind))
    if lowest is None or highest is None:
        return result
    # Of equal bounds, the lower one has the gradient below it, and the upper one above it.
    capped = call.emit(_op.where(_op.greater(data, highest), highest, data))
    single = call.emit(_op.where(_op.less(data, lowest), lowest, capped))
    return _op.where(call.emit(_op.equal(lowest, highest)), single, result)
