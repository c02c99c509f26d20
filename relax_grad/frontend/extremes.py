"""Extremes along axes that keep NaN and infinities, which Relax's reductions drop."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax

from ..ir.compat import dtype_of
from ..ir.dtypes import HALVES
from ..op import stop_gradient

_op = relax.op

Emit = Callable[[relax.Expr], relax.Var]


def _wide(emit: Emit, data: relax.Expr) -> relax.Expr:
    """Return data in a dtype that TVM's ``isnan`` and search take."""
    return emit(_op.astype(data, "float32")) if dtype_of(data.ty) in HALVES else data


def is_nan(emit: Emit, data: relax.Expr) -> relax.Var:
    """Return where floating-point data of any dtype is NaN."""
    return emit(_op.isnan(_wide(emit, data)))


def exact_extreme(
    emit: Emit,
    data: relax.Expr,
    result: relax.Expr,
    total: Callable[[relax.Expr], relax.Expr],
    largest: bool,
) -> relax.Expr:
    """Return the extreme of floating-point data, NaN included.

    Relax's extreme leaves NaN out, and is finite where all elements are infinite. The sum of the
    numbers of other elements is NaN and zero there.

    Parameters
    ----------
    emit : Callable
        Binds an expression to a variable.
    data : relax.Expr
        The data.
    result : relax.Expr
        Relax's extreme of the data.
    total : Callable
        Returns the sum along the same axes.
    largest : bool
        Whether the extreme is a maximum.
    """
    dtype = dtype_of(result.ty)
    fixed = _wide(emit, emit(stop_gradient(data)))
    kind = dtype_of(fixed.ty)
    lowest = relax.const(-math.inf if largest else math.inf, kind)
    zero, one = relax.const(0.0, kind), relax.const(1.0, kind)
    others = emit(_op.where(_op.equal(fixed, lowest), zero, one))
    others = emit(_op.where(_op.isnan(fixed), fixed, others))
    number = emit(total(others))
    wrong = emit(_op.where(_op.isnan(number), number, zero))
    change = emit(_op.where(_op.equal(number, zero), lowest, wrong))
    return _op.add(result, change if kind == dtype else emit(_op.astype(change, dtype)))


def log_sum_exp(emit: Emit, data: relax.Expr, axes: list[int] | None) -> relax.Var:
    """Return ``log(sum(exp(x)))`` along axes, which are kept; an axis of equal infinities has its
    own value."""
    kind = dtype_of(data.ty)
    base = emit(stop_gradient(emit(_op.max(data, axes, True))))
    base = emit(_op.where(emit(_op.isinf(base)), relax.const(0.0, kind), base))
    total = emit(_op.sum(_op.exp(_op.subtract(data, base)), axes, True))
    return emit(_op.add(_op.log(total), base))


def place_of_extreme(emit: Emit, data: relax.Expr, axis: int, largest: bool) -> relax.Expr:
    """Return the first place of the extreme of an axis, which is kept; NaN counts as extreme."""
    data = _wide(emit, data)
    place = emit((_op.argmax if largest else _op.argmin)(data, axis, True))
    if "float" not in dtype_of(data.ty):
        return place
    # TVM's place is -1 where no element is beyond the initial value.
    place = emit(_op.maximum(place, relax.const(0, "int64")))
    wrong = emit(_op.astype(emit(_op.isnan(data)), "int8"))
    first = emit(_op.argmax(wrong, axis, True))
    some = emit(_op.astype(emit(_op.max(wrong, [axis], True)), "bool"))
    return emit(_op.where(some, first, place))


def sort_key(emit: Emit, data: relax.Expr) -> relax.Expr:
    """Return floating-point data in the order of PyTorch and ONNX, for TVM's sort: NaN is beyond
    infinity, which counts as the largest number."""
    data = _wide(emit, data)
    kind = dtype_of(data.ty)
    most = relax.const(_MOST[kind], kind)
    number = emit(_op.where(_op.greater(data, most), most, data))
    return emit(_op.where(_op.isnan(data), relax.const(math.inf, kind), number))


#: The largest numbers by dtypes.
_MOST = {"float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}
