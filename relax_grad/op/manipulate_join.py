"""The backward operators of the operators that join and split tensors.

Each is linear in the output gradient, and its own gradient is the forward operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import Analyzer
from ..registry import register_infer_type
from ._infer import (
    check_shape,
    forward_type,
    tensor_type,
    type_of_argument,
    type_of_shape,
    unused,
)
from ._layout import Converted, chosen, layout_rule, moved_axes, moved_shape
from .declare import Shape, as_shape, declare_op


def concat_backward_tensors(
    output_grad: relax.Expr, shapes: relax.Expr | Sequence[relax.Expr | Shape], axis: int | None = 0
) -> relax.Call:
    """Gradient of concat with respect to its tensors.

    Unlike ``relax.op.split`` it supports symbolic and empty extents along the axis, and always
    returns a tuple.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``concat(tensors, axis)``.
    shapes : relax.Expr or Sequence[relax.Expr or Sequence[int or PrimExpr]]
        The shape of each tensor.
    axis : int, optional
        As given to ``relax.op.concat``.

    Returns
    -------
    result : relax.Call
        A tuple with a tensor for each shape, of the dtype of ``output_grad``.
    """
    if not isinstance(shapes, relax.Expr):
        shapes = relax.Tuple([as_shape(shape) for shape in shapes])
    return relax.Call(
        Op.get("relax.grad.concat_backward_tensors"),
        [output_grad, shapes],
        relax.op.concat([unused()], axis).attrs,
    )


def split_backward_x(
    output_grads: relax.Expr | Sequence[relax.Expr],
    x_shape: relax.Expr | Shape,
    indices_or_sections: int | Sequence[int],
    axis: int = 0,
) -> relax.Call:
    """Gradient of split with respect to its data.

    Unlike ``relax.op.concat`` it supports parts that overlap or leave out elements. Its result has
    the shape of the data even if the extents of the parts are symbolic.

    Parameters
    ----------
    output_grads : relax.Expr or Sequence[relax.Expr]
        The gradients with respect to the two or more results of
        ``split(x, indices_or_sections, axis)``.
    x_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    indices_or_sections, axis
        As given to ``relax.op.split``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``x_shape`` and the dtype of the output gradients; half precision is
        accumulated in float32.
    """
    if not isinstance(output_grads, relax.Expr):
        output_grads = relax.Tuple(output_grads)
    return relax.Call(
        Op.get("relax.grad.split_backward_x"),
        [output_grads, as_shape(x_shape)],
        relax.op.split(unused(), indices_or_sections, axis).attrs,
    )


def stack_backward_tensors(output_grad: relax.Expr, axis: int | None = 0) -> relax.Call:
    """Gradient of stack with respect to its tensors.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``stack(tensors, axis)``; its extent along the
        axis must be a constant.
    axis : int, optional
        As given to ``relax.op.stack``.

    Returns
    -------
    result : relax.Call
        A tuple with a tensor for each slice along the axis, of the dtype of ``output_grad``.
    """
    return relax.Call(
        Op.get("relax.grad.stack_backward_tensors"),
        [output_grad],
        relax.op.stack([unused()], axis).attrs,
    )


_tvm_infer_split = Op.get("relax.split").get_attr("FInferType")
_tvm_infer_meshgrid = Op.get("relax.meshgrid").get_attr("FInferType")


@register_infer_type(
    "relax.split",
    corrects=(
        "infers different extents of the parts in a function and in the Gradient pass, where "
        "symbolic extents are not known to be non-negative"
    ),
)
def _infer_split(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    parts = _tvm_infer_split(call, ctx)
    data, attrs = call.args[0].ty, call.attrs
    if (
        isinstance(parts, relax.TensorType)
        or isinstance(attrs.indices_or_sections, tirx.IntImm)
        or not isinstance(data.shape, relax.ShapeExpr)
    ):
        return parts
    extent = data.shape.values[int(attrs.axis)]
    if isinstance(extent, tirx.IntImm):
        return parts
    analyzer = Analyzer()
    indices = [int(index) for index in attrs.indices_or_sections]
    begins = [0, *(tirx.min(index, extent) if index > 0 else 0 for index in indices)]
    fields = []
    for field, begin, end in zip(parts.fields, begins, [*begins[1:], extent], strict=True):
        shape = list(field.shape.values)
        # No maximum if the end cannot precede the begin: it would stay in the type.
        length = end if isinstance(begin, int) else tirx.max(end - begin, 0)
        shape[int(attrs.axis)] = analyzer.simplify(length)
        fields.append(type_of_shape(field, shape, field.ndim))
    return relax.TupleType(fields)


@register_infer_type(
    "relax.meshgrid",
    corrects='infers the shape of indexing "ij" for "xy", unlike the result that it computes',
)
def _infer_meshgrid(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    grids = _tvm_infer_meshgrid(call, ctx)
    grid = grids.fields[0]
    if call.attrs.indexing != "xy" or grid.ndim < 2 or not isinstance(grid.shape, relax.ShapeExpr):
        return grids
    rows, columns, *others = grid.shape.values
    shape = [columns, rows, *others]
    return relax.TupleType([type_of_shape(field, shape, field.ndim) for field in grids.fields])


def _infer_concat(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    shapes = call.args[1].ty
    if not (
        isinstance(shapes, relax.TupleType)
        and len(shapes.fields) > 0
        and all(isinstance(field, relax.ShapeType) for field in shapes.fields)
    ):
        raise TypeError(
            f"{call.op.name}: shapes must be a tuple of one or more shapes, but its type is "
            f"{shapes}"
        )
    types = [type_of_shape(output_grad, field.values, field.ndim) for field in shapes.fields]
    tensors = relax.Var("tensors", relax.TupleType(types))
    forward = forward_type(call, ctx, relax.Call(Op.get("relax.concat"), [tensors], call.attrs))
    check_shape(call, "output_grad", output_grad, forward)
    return relax.TupleType(types)


def _infer_split_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    grads = call.args[0].ty
    if not (
        isinstance(grads, relax.TupleType)
        and len(grads.fields) > 1
        and all(isinstance(field, relax.TensorType) for field in grads.fields)
    ):
        raise TypeError(
            f"{call.op.name}: output_grads must be a tuple of two or more tensors, but its type "
            f"is {grads}"
        )
    x_type = type_of_argument(call, 1, "x_shape", grads.fields[0])
    x = relax.Var("x", x_type)
    forward = forward_type(call, ctx, relax.Call(Op.get("relax.split"), [x], call.attrs))
    parts = forward.fields if isinstance(forward, relax.TupleType) else [forward]
    if len(parts) != len(grads.fields):
        raise ValueError(
            f"{call.op.name}: output_grads must have the {len(parts)} parts that the forward "
            f"operator returns, but it has {len(grads.fields)}"
        )
    for i, (grad, part) in enumerate(zip(grads.fields, parts, strict=True)):
        check_shape(call, f"output_grads[{i}]", grad, part)
    return x_type


def _infer_stack(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    grad = tensor_type(call, 0, "output_grad")
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    if not isinstance(grad.shape, relax.ShapeExpr) or not -grad.ndim <= axis < grad.ndim:
        raise ValueError(
            f"{call.op.name}: output_grad must have a known shape with the axis {axis}, but its "
            f"type is {grad}"
        )
    shape = list(grad.shape.values)
    count = shape.pop(axis)
    if not isinstance(count, tirx.IntImm) or int(count) < 1:
        raise ValueError(
            f"{call.op.name}: the extent of output_grad along the axis {axis} must be a positive "
            f"constant, but it is {count}"
        )
    return relax.TupleType([type_of_shape(grad, shape, len(shape))] * int(count))


declare_op(
    "concat_backward_tensors",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of concat."),
        ("shapes", "Tuple", "The shape of each tensor."),
    ],
    _infer_concat,
    concat_backward_tensors,
    "relax.attrs.ConcatAttrs",
)
declare_op(
    "split_backward_x",
    [
        ("output_grads", "Tuple", "The gradients with respect to the results of split."),
        ("x_shape", "Shape", "The shape of the data."),
    ],
    _infer_split_backward,
    split_backward_x,
    "relax.attrs.SplitAttrs",
)
declare_op(
    "stack_backward_tensors",
    [("output_grad", "Tensor", "The gradient with respect to the result of stack.")],
    _infer_stack,
    stack_backward_tensors,
    "relax.attrs.StackAttrs",
)


@layout_rule("relax.grad.split_backward_x")
def _layout_split_backward(
    call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
) -> Converted | None:
    layout = chosen(layouts[0])
    shape = moved_shape(call, 1, layout)
    if shape is None:
        return None
    inputs = [[layout] * len(layouts[0]), None]
    return Converted(inputs, layout, {"axis": moved_axes(int(call.attrs.axis), layout)}, shape)
