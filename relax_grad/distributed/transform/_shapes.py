"""Divided axes in operators whose arguments are extents or positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tvm import relax, tirx
from tvm.relax import op

from ._labels import SHAPES
from ._layouts import Divided, as_int, quotient, text
from ._propagation import Operand, Propagation

#: Binds the result of a call, or returns False for the rule by labels.
ShapeRule = Callable[[Propagation, relax.Var, relax.Call, "list[Operand]"], bool]


def shape_rule(*names: str) -> Callable[[ShapeRule], ShapeRule]:
    def register(function: ShapeRule) -> ShapeRule:
        SHAPES.update({f"relax.{name}": function for name in names})
        return function

    return register


@shape_rule("reshape", "flatten", "squeeze", "expand_dims", "nn.batch_flatten")
def _reshape(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Any]
) -> bool:
    """The divided axis may take in axes before and after it, or give them up.

    The workers are a separate axis: ``outer`` elements before it, and ``inner`` elements after it.
    An axis of the result that has them in the same place is divided too.
    """
    (data,) = operands
    layout, before = data.layout, data.kind.shape.values
    outer = [*before[: layout.axis], layout.parts]
    inner = [*before[layout.axis + 1 :], layout.size]
    extents = list(variable.ty.shape.values)
    for axis in range(len(extents)):
        parts = quotient(outer, extents[:axis])
        size = quotient(inner, extents[axis + 1 :])
        if parts is None or size is None:
            continue
        whole = quotient([parts, propagation.num_workers, size], [extents[axis]])
        if whole is not None and as_int(whole) == 1:
            new_layout = Divided(axis, parts, size)
            extents[axis] = new_layout.local
            propagation.finish(variable, op.reshape(data.value, extents), new_layout)
            return True
    within = f" within {layout.parts} parts" if as_int(layout.parts) != 1 else ""
    return propagation.refuse(
        call.op.name,
        f"axis {layout.axis} of {data.name}, of the shape {_text(before)}, is divided among "
        f"{propagation.num_workers} workers{within}, and no axis of the new shape "
        f"{_text(variable.ty.shape.values)} is divided in this way; an axis of heads must be a "
        "multiple of the workers, and parts must be the number of joined layers",
    )


@shape_rule("broadcast_to")
def _broadcast_to(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Any]
) -> bool:
    (data,) = operands
    extents = list(variable.ty.shape.values)
    layout = data.layout.moved(data.layout.axis + len(extents) - data.kind.ndim)
    extents[layout.axis] = layout.local
    propagation.finish(variable, op.broadcast_to(data.value, extents), layout)
    return True


@shape_rule("split")
def _split(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Any]
) -> bool:
    """Along the divided axis, the sections must begin and end with parts of it."""
    (data,) = operands
    axis, layout = int(call.attrs.axis) % data.kind.ndim, data.layout
    sections = call.attrs.indices_or_sections
    if isinstance(variable.ty, relax.TensorType):  # a single section
        propagation.finish(variable, relax.Call(call.op, [data.value], call.attrs), layout)
        return True
    count = len(variable.ty.fields)
    if axis != layout.axis:
        value = relax.Call(call.op, [data.value], call.attrs)
        propagation.finish(variable, value, [layout] * count)
        return True
    sizes = [as_int(field.shape.values[axis]) for field in variable.ty.fields[:]]
    layouts = [_of_parts(propagation, call, data.name, layout, size) for size in sizes]
    number = as_int(sections)
    if number is None:
        places = [int(index) // propagation.num_workers for index in sections]
        value = op.split(data.value, places, axis)
    else:
        value = op.split(data.value, number, axis)
    propagation.finish(variable, value, layouts)
    return True


@shape_rule("strided_slice")
def _strided_slice(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Any]
) -> bool:
    """Along the divided axis, the slice must begin and end with parts of it."""
    data = operands[0]
    layout, ndim = data.layout, data.kind.ndim
    axes, begin, end, *strides = (_constants(argument) for argument in call.args[1:])
    if axes is None:
        return propagation.refuse(call.op.name, "the axes must be constant")
    axes = [axis % ndim for axis in axes]
    arguments = list(call.args)
    arguments[0] = data.value
    if layout.axis not in axes:
        value = relax.Call(call.op, arguments, call.attrs)
        propagation.finish(variable, value, layout)
        return True
    at, extent = axes.index(layout.axis), as_int(data.kind.shape.values[layout.axis])
    steps = strides[0] if strides else [1] * len(axes)
    if begin is None or end is None or steps is None or extent is None or steps[at] != 1:
        return propagation.refuse(
            call.op.name,
            f"a slice of the divided axis {layout.axis} of {data.name} must be constant, with "
            "the stride 1",
        )
    first, last = (
        min(max(bound[at] + (extent if bound[at] < 0 else 0), 0), extent) for bound in (begin, end)
    )
    _of_parts(propagation, call, data.name, layout, first)
    new_layout = _of_parts(propagation, call, data.name, layout, last - first)
    begin[at], end[at] = first // propagation.num_workers, last // propagation.num_workers
    value = op.strided_slice(data.value, axes, begin, end, steps, bool(call.attrs.assume_inbound))
    propagation.finish(variable, value, new_layout)
    return True


def _of_parts(
    propagation: Propagation, call: relax.Call, name: str, layout: Divided, extent: int | None
) -> Divided:
    """Return the layout of some parts of a divided axis."""
    parts, size = as_int(layout.parts), as_int(layout.size)
    whole = None if size is None else size * propagation.num_workers
    if parts is None or extent is None or whole is None or extent % whole:
        propagation.refuse(
            call.op.name,
            f"axis {layout.axis} of {name} is divided within {layout.parts} parts of "
            f"{whole} elements, but a section has or begins at {extent}; annotate the weight "
            "with parts= for the sections that it joins",
        )
    return Divided(layout.axis, extent // whole, layout.size)


def _constants(value: relax.Expr) -> list[int] | None:
    """Return a tuple of constant numbers as a list, or None."""
    if not isinstance(value, relax.Tuple):
        return None
    fields = value.fields[:]
    numbers = [as_int(getattr(field, "value", field)) for field in fields]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(fields) else None


def _text(extents: Iterable[tirx.PrimExpr | int]) -> str:
    return f"({', '.join(map(text, extents))})"
