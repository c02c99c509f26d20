"""Layout inference of operators for ``relax.transform.ConvertLayout``.

The pass walks over a dataflow block once and tracks the current order of the axes of each tensor.
The axes of a tensor of rank 4 are ``"ABCD"`` in the order of the program. ``"ACDB"`` says that the
second axis is now the last: an ``NCHW`` tensor has become ``NHWC``. The layout inference of an
operator takes the layouts of its arguments. It returns the layouts that the call takes, the layout
of its result, and the attributes and shapes that change. Around every operator without layout
inference the pass restores the order of the program.

Most operators register themselves in one line, in the module that declares them:

- :func:`follow_elementwise` for an operator that is element-wise in tensors that broadcast;
- :func:`follow_axis` for an operator with an attribute that names one axis or several, and
  optionally small tensors along these axes that keep their order::

      follow_axis("relax.grad.batch_norm_backward_data", full=(0, 1))  # its attribute is "axis"

- :func:`follow_layout_attrs` for an operator that has the layout itself as an attribute;
- :func:`follow_shape` for an operator that takes a tensor and the shape of its result, of equal
  rank.

Any other operator has its own rule, under :func:`layout_rule`. A rule only handles
permutations of axes: a tensor with axes that the pass has packed counts as one in the order of the
program, and is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tvm import relax

from ..ir.compat import decided_layout, infer_layout_output, layout_decision, replace_attrs
from ..registry import register_infer_layout


@dataclass(frozen=True)
class Converted:
    """The result of layout inference for a call.

    The layout of a tensor is a string, of a tuple a list, and of anything else
    None.

    Attributes
    ----------
    inputs : Sequence
        The layout in which the call takes each of its arguments.
    output : str or None or list
        The layout of its result.
    attrs : dict
        The attributes that change.
    args : dict[int, relax.Expr]
        The replaced arguments: shapes, with their extents in the new order of the axes.
    """

    inputs: Sequence
    output: str | list | None
    attrs: dict = field(default_factory=dict)
    args: dict[int, relax.Expr] = field(default_factory=dict)


#: The layout of a tensor, the layouts of the fields of a tuple, or None for anything else.
Layout: TypeAlias = "str | list | None"

#: Takes a call, the layouts of its arguments, and the desired layouts by operator name.
#: Returns None if the call must keep its tensors in the order of the program.
LayoutRule = Callable[[relax.Call, list, Mapping[str, Sequence[str]]], "Converted | None"]


def layout_rule(*op_names: str) -> Callable[[LayoutRule], LayoutRule]:
    """Register a rule as the layout inference of operators."""

    def decorate(rule: LayoutRule) -> LayoutRule:
        def infer(call: relax.Call, desired_layouts: Mapping, var_layout_map: Mapping) -> Any:
            converted = None
            if getattr(call.ty, "ndim", None) != -1:
                layouts = [_layout_of(arg, var_layout_map) for arg in call.args]
                converted = rule(call, layouts, desired_layouts)
            if converted is None:
                inputs = [_first_of_type(arg.ty) for arg in call.args]
                converted = Converted(inputs, _first_of_type(call.ty))
            attrs = replace_attrs(call.attrs, **converted.attrs) if converted.attrs else call.attrs
            return infer_layout_output(
                [_decisions(layout) for layout in converted.inputs],
                [_decisions(converted.output)],
                attrs,
                {**_written_out(call), **converted.args},
            )

        for op_name in op_names:
            register_infer_layout(op_name)(infer)
        return rule

    return decorate


def follow_elementwise(*op_names: str) -> None:
    """Register operators that are element-wise in all of their tensors, which broadcast to the
    result.

    The result may also be the sum over axes along which an argument was broadcast. Other arguments
    and attributes must not name axes of the tensors. The layout is taken from the first tensor that
    is not in the order of the program.
    """

    @layout_rule(*op_names)
    def rule(
        call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
    ) -> Converted | None:
        layout = chosen([layout for layout in layouts if isinstance(layout, str)])
        inputs = [
            trailing(layout, len(own)) if isinstance(own, str) else _first_of_type(arg.ty)
            for own, arg in zip(layouts, call.args, strict=True)
        ]
        output = trailing(layout, call.ty.ndim)
        broken = output is None or any(
            isinstance(own, str) and new is None for own, new in zip(layouts, inputs, strict=True)
        )
        return None if broken else Converted(inputs, output)


def follow_axis(
    *op_names: str,
    full: Sequence[int] = (0,),
    axes: Sequence[str] = ("axis",),
    result: bool = True,
) -> None:
    """Register operators with attributes that name one axis or several.

    Parameters
    ----------
    *op_names : str
        The operators.
    full : Sequence[int]
        The positions of the tensors that have the axes that the attributes count. The layout is
        taken from the first of them that is not in the order of the program; other tensors keep
        their order.
    axes : Sequence[str]
        The attributes: each is an integer, a list of them, or None.
    result : bool
        Whether the result, or each tensor of a tuple, has these axes too, or keeps its order.
    """

    @layout_rule(*op_names)
    def rule(call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]) -> Converted:
        layout = chosen([layouts[i] for i in full])
        inputs = [
            layout if i in full else _first_of_type(arg.ty) for i, arg in enumerate(call.args)
        ]
        output = _first_of_type(call.ty)
        if result:
            output = [layout] * len(output) if isinstance(output, list) else layout
        attrs = {name: moved_axes(getattr(call.attrs, name), layout) for name in axes}
        return Converted(inputs, output, attrs)


def follow_layout_attrs(
    *op_names: str, leader: int = 0, full: Sequence[int] = (0, 1), shape: int | None = None
) -> None:
    """Register operators with the layout as an attribute, and optionally the result's layout as
    another.

    Parameters
    ----------
    *op_names : str
        The operators, with the attribute ``layout`` and, if there is one, ``out_layout``.
    leader : int
        The position of the tensor whose layout is followed.
    full : Sequence[int]
        The positions of all tensors with these axes.
    shape : int, optional
        The position of the shape of the result.
    """

    @layout_rule(*op_names)
    def rule(
        call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
    ) -> Converted | None:
        layout = layouts[leader]
        names = [name for name in ("layout", "out_layout") if hasattr(call.attrs, name)]
        if any(len(getattr(call.attrs, name)) != len(layout) for name in names):
            return None  # packed
        args = {} if shape is None else moved_shape(call, shape, layout)
        if args is None:
            return None
        inputs = [
            layout if i in full else _first_of_type(arg.ty) for i, arg in enumerate(call.args)
        ]
        attrs = {name: "".join(moved(getattr(call.attrs, name), layout)) for name in names}
        return Converted(inputs, layout, attrs, args)


def follow_shape(
    *op_names: str, attrs: Callable[[relax.Call, str], dict | None] | None = None
) -> None:
    """Register operators that take a tensor and the shape of the result, of equal rank.

    Parameters
    ----------
    *op_names : str
        The operators.
    attrs : Callable, optional
        Takes the call and its layout, and returns the attributes that change, or None if the call
        must keep its tensors in the order of the program.
    """

    @layout_rule(*op_names)
    def rule(
        call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
    ) -> Converted | None:
        layout = layouts[0]
        if call.ty.ndim != len(layout):
            return None
        args = moved_shape(call, 1, layout)
        changes = attrs(call, layout) if attrs else {}
        if args is None or changes is None:
            return None
        return Converted([layout, *[None] * (len(call.args) - 1)], layout, changes, args)


def first(ndim: int) -> str:
    """Return the layout in which a program has a tensor of this rank: ``"ABCD"`` for rank 4."""
    return "".join(chr(ord("A") + axis) for axis in range(ndim))


def is_first(layout: str) -> bool:
    """Tell whether the axes lie in the order in which the program has them."""
    return layout == first(len(layout))


def chosen(layouts: Sequence[str]) -> str:
    """Return the layout that tensors should share; for tensors of several ranks, the layout of
    the highest rank.

    It is the first one that differs from the order of the program: tensors in that order are at the
    edges.
    """
    ndim = max(map(len, layouts), default=0)
    return next(
        (layout for layout in layouts if len(layout) == ndim and not is_first(layout)), first(ndim)
    )


def trailing(layout: str, ndim: int) -> str | None:
    """Return the layout of a tensor that broadcasts against one of the given layout.

    None if the axes of the tensor are not the last ones in that layout.
    """
    outer = len(layout) - ndim
    axes = sorted(layout)[outer:]
    if sorted(layout[outer:]) != axes:
        return None
    return "".join(chr(ord(axis) - outer) for axis in layout[outer:])


def order(names: str, wanted: str) -> str:
    """Return the layout that brings axes with these names into the wanted order.

    ``order("NCHW", "NHWC")`` is ``"ACDB"``.
    """
    return "".join(chr(ord("A") + names.index(name)) for name in wanted)


def axes_of(layout: str) -> list[int]:
    """Return the axis of the program for each axis of a layout: ``[0, 2, 3, 1]`` for ``"ACDB"``."""
    return [ord(name) - ord("A") for name in layout]


def moved(values: Sequence, layout: str) -> list:
    """Reorder one value per axis from the order of the program to the layout's order."""
    return [values[axis] for axis in axes_of(layout)]


def moved_axes(axes: int | Sequence[int] | None, layout: str) -> int | list[int] | None:
    """Return the positions of axes of the program in a layout: an integer for one, a list for
    several."""
    if axes is None:
        return None
    places = axes_of(layout)
    if isinstance(axes, int):
        return places.index(axes % len(layout))
    return [places.index(int(axis) % len(layout)) for axis in axes]


def moved_shape(call: relax.Call, position: int, layout: str) -> dict[int, relax.Expr] | None:
    """Return the replacement of a shape argument; None if its extents are unknown."""
    if is_first(layout):
        return {}
    values = call.args[position].ty.values
    if values is None:
        return None
    return {position: relax.ShapeExpr(moved(list(values), layout))}


def _written_out(call: relax.Call) -> dict[int, relax.Expr]:
    """Return the shapes that a call reads off tensors, as shape expressions, if their extents are
    known.

    Otherwise the pass would restore the order of such a tensor's axes only for its shape.
    """
    return {
        i: relax.ShapeExpr(list(arg.ty.values))
        for i, arg in enumerate(call.args)
        if isinstance(arg, relax.Var)
        and isinstance(arg.ty, relax.ShapeType)
        and arg.ty.values is not None
    }


def _layout_of(expr: relax.Expr, var_layout_map: Mapping) -> Layout:
    """Return the current layout of a tensor; the order of the program for a packed one."""
    if isinstance(expr, relax.Tuple):
        return [_layout_of(item, var_layout_map) for item in expr.fields]
    if isinstance(expr, relax.Var) and expr in var_layout_map:
        return _known(var_layout_map[expr], expr.ty)
    return _first_of_type(expr.ty)


def _known(decision: Any, expr_type: relax.Type) -> Layout:
    if isinstance(expr_type, relax.TupleType):
        return [_known(item, ty) for item, ty in zip(decision, expr_type.fields, strict=True)]
    layout = decided_layout(decision)
    return layout if layout is None or layout.isupper() else _first_of_type(expr_type)


def _first_of_type(expr_type: relax.Type) -> Layout:
    """Return the layout that an expression of this type has in the program."""
    if isinstance(expr_type, relax.TupleType):
        return [_first_of_type(item) for item in expr_type.fields]
    if isinstance(expr_type, relax.TensorType) and expr_type.ndim >= 0:
        return first(expr_type.ndim)
    return None


def _decisions(layout: Layout) -> Any:
    """Return a layout in the form that the pass takes."""
    if isinstance(layout, list):
        return [_decisions(item) for item in layout]
    return layout_decision(layout)
