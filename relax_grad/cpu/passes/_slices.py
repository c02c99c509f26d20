"""Gradients of slices: tensors with a cotangent in one range of an axis, and zeros elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, tirx
from tvm.ir import Op

from ...ir.compat import constant_value, dtype_of
from ...ir.shapes import static_extents
from ...op.index import take_attrs

_SLICE, _TAKE = (
    Op.get(f"relax.grad.{name}") for name in ("strided_slice_backward_data", "take_backward")
)
_PERMUTE = Op.get("relax.permute_dims")

#: Operators whose result is the gradient of a slice.
SLICES = (_SLICE, _TAKE)

_READ_SLICE, _READ_TAKE = (Op.get(f"relax.{name}") for name in ("strided_slice", "take"))

#: Operators whose result is a slice.
READS = (_READ_SLICE, _READ_TAKE)

Lookup = Callable[[relax.Expr], relax.Expr]


@dataclass(frozen=True)
class Slice:
    """A tensor that is 0 except for one range of one axis.

    Attributes
    ----------
    source : relax.Expr or None
        The elements in the range: a tensor with the same number of axes, or with one axis less if
        :attr:`is_row`.
    axis, start, stop : int
        The range.
    is_row : bool
        Whether the range is one element and the source lacks its axis.
    axes : Sequence[int], optional
        The order of the axes of the source in the tensor. The axes of the source include the
        axis of the range.
    variables : Sequence[relax.Var]
        The bindings that compute the tensor.
    """

    source: relax.Expr | None
    axis: int
    start: int
    stop: int
    is_row: bool = False
    axes: Sequence[int] | None = None
    variables: Sequence[relax.Var] = ()

    def changes(self) -> Iterator[Callable[[relax.Expr], relax.Expr]]:
        """Yield the operators that turn the source into the range, with all axes in the order of
        the tensor."""
        if self.is_row:
            axis = self.axis if self.axes is None else self.axes[self.axis]
            yield lambda source: relax.op.expand_dims(source, axis)
        if self.axes is not None:
            yield lambda source: relax.op.permute_dims(source, self.axes)


def static_shape(kind: relax.Type) -> tuple[int, ...] | None:
    """Return the shape of a tensor type; None if the dtype or the shape is unknown, or an extent is
    symbolic."""
    extents = static_extents(kind)
    return None if extents is None or kind.dtype is None else tuple(extents)


def slice_of(variable: relax.Var, lookup: Lookup) -> Slice | None:
    """Return the slice if a variable is bound to the gradient of a slice, else None.

    Parameters
    ----------
    variable : relax.Var
        A variable.
    lookup : Callable
        Returns the value of a variable if the variable may be removed together with its only use,
        else its argument.
    """
    value = lookup(variable)
    if not isinstance(value, relax.Call):
        return None
    if value.op == _SLICE:
        slice_ = _of_strided_slice(value.ty, value.args[0].ty, value.args[2:6])
    elif value.op == _TAKE:
        slice_ = _of_take(value.ty, value.args[2], value, lookup)
    elif value.op == _PERMUTE and isinstance(value.args[0], relax.Var):
        slice_ = _transposed(value, lookup)
    else:
        return None
    if slice_ is None:
        return None
    source = value.args[0] if slice_.source is None else slice_.source
    return replace(slice_, source=source, variables=(variable, *slice_.variables))


def slice_read(call: relax.Call, lookup: Lookup) -> Slice | None:
    """Return the slice that a call reads, with the sliced tensor as the source; None for other
    calls."""
    if call.op == _READ_SLICE:
        slice_ = _of_strided_slice(call.args[0].ty, call.ty, call.args[1:5])
    elif call.op == _READ_TAKE:
        slice_ = _of_take(call.args[0].ty, call.args[1], call, lookup)
    else:
        return None
    return None if slice_ is None else replace(slice_, source=call.args[0])


def _of_strided_slice(
    whole: relax.Type, part: relax.Type, bounds: Sequence[relax.Expr]
) -> Slice | None:
    shape, extents = static_shape(whole), static_shape(part)
    known = [numbers for bound in bounds if (numbers := _numbers(bound)) is not None]
    if shape is None or extents is None or len(known) < len(bounds):
        return None
    axes, begin, end, *strides = known  # without strides, they are 1
    if any(stride != 1 for numbers in strides for stride in numbers):
        return None
    cut = [axis for axis, extent in enumerate(shape) if extents[axis] != extent]
    if len(cut) != 1:
        return None
    (axis,) = cut
    places = [i for i, number in enumerate(axes) if number % len(shape) == axis]
    if len(places) != 1:
        return None
    start, stop = (_within(bound[places[0]], shape[axis]) for bound in (begin, end))
    if stop - start != extents[axis] or not extents[axis]:
        return None
    return Slice(None, axis, start, stop)


def _of_take(
    whole: relax.Type, indices: relax.Expr, call: relax.Call, lookup: Lookup
) -> Slice | None:
    shape, attrs = static_shape(whole), take_attrs(call)
    values = constant_value(lookup(indices))
    if not shape or values is None or values.ndim > 1 or not values.size:
        return None
    axis = attrs["axis"]
    if axis is None and len(shape) > 1:
        return None
    axis = (axis or 0) % len(shape)
    places = [_position(index, shape[axis], attrs["mode"]) for index in values.ravel()]
    start = places[0]
    if start is None or places != list(range(start, start + len(places))):
        return None
    return Slice(None, axis, start, start + len(places), is_row=values.ndim == 0)


def _transposed(call: relax.Call, lookup: Lookup) -> Slice | None:
    slice_, ndim = slice_of(call.args[0], lookup), call.ty.ndim
    if slice_ is None or slice_.axes is not None or ndim < 1:
        return None
    axes = call.attrs.axes
    axes = range(ndim)[::-1] if axes is None else [int(axis) % ndim for axis in axes]
    return replace(slice_, axis=list(axes).index(slice_.axis), axes=tuple(axes))


def _numbers(expr: relax.Expr) -> list[int] | None:
    """Return the integers of a tuple; None if one is unknown."""
    if not isinstance(expr, relax.Tuple):
        return None
    values = [getattr(field, "value", field) for field in expr.fields]
    is_known = all(isinstance(value, (int, tirx.IntImm)) for value in values)
    return [int(value) for value in values] if is_known else None


def _within(index: int, extent: int) -> int:
    """Return a bound of a slice as an offset from the first element, clamped to the extent."""
    return min(max(index + extent if index < 0 else index, 0), extent)


def _position(index: np.integer, extent: int, mode: str) -> int | None:
    """Return the element at an index of take, as ``topi._position.position`` does; None if there is
    none."""
    place = int(index)
    if mode == "clip":
        place = min(max(place, 0), extent - 1)
    elif mode == "wrap":
        place = place % extent if extent else -1
    elif mode == "fast" and place < 0:
        place += extent
    return place if 0 <= place < extent else None


def is_same_tensor(kind: relax.Type, other: relax.Type) -> bool:
    """Tell whether two types are tensor types with the same static shape and dtype."""
    shape = static_shape(kind)
    return shape is not None and shape == static_shape(other) and dtype_of(kind) == dtype_of(other)
