"""The backward operators of grid_sample, closed under differentiation.

``grid_sample(data, grid)`` is linear in the data. Along directions ``k1, k2, ...`` of the grid it
has the derivatives

    ``y(data, grid; k1, .., km) = d/dt1 .. d/dtm grid_sample(data, grid + t1 * k1 + .. + tm * km)``
    at 0.

``grid_sample_jvp`` is that derivative; with ``m`` = 0 it is grid_sample itself.
``grid_sample_backward_data`` and ``grid_sample_backward_grid`` are the gradients of
``<output_grad, y(data, grid; k1, .., km)>`` with respect to the data and to the grid; with ``m`` =
0 they are the gradients of grid_sample. The gradients of the three operators are built from the
same three, with one direction more or less. So they give every order.

grid_sample is not differentiable at the centre of an element (for ``bilinear``) and at a border.
There the derivative is PyTorch's: the derivative of the piece after the element's centre, and 0 on
and beyond a border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import Analyzer, dtype_of
from ._infer import check_shape, forward_type, tensor_type, type_of_argument
from .declare import Shape, as_shape, declare_op

_RANKS = {"NCHW": 2, "NCDHW": 3}
_METHODS = {"NCHW": ("nearest", "bilinear", "bicubic"), "NCDHW": ("nearest", "bilinear")}
_PADDING_MODES = ("zeros", "border", "reflection")


def grid_sample_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    grid: relax.Expr,
    directions: relax.Expr | Sequence[relax.Expr] = (),
    **attrs: object,
) -> relax.Call:
    """Gradient of grid_sample, or of its derivative along directions of the grid, with respect to
    the data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    grid : relax.Expr
        The grid.
    directions : relax.Expr or Sequence[relax.Expr]
        Directions of the grid, each of its type.
    **attrs
        As given to ``relax.op.image.grid_sample``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    return _call(
        "grid_sample_backward_data",
        [output_grad, as_shape(data_shape), grid],
        directions,
        output_grad,
        attrs,
    )


def grid_sample_backward_grid(
    output_grad: relax.Expr,
    data: relax.Expr,
    grid: relax.Expr,
    directions: relax.Expr | Sequence[relax.Expr] = (),
    **attrs: object,
) -> relax.Call:
    """Gradient of grid_sample, or of its derivative along directions of the grid, with respect to
    the grid.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    data : relax.Expr
        The data.
    grid, directions, **attrs
        As for :func:`grid_sample_backward_data`.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``grid``; half precision is accumulated in float32.
    """
    return _call(
        "grid_sample_backward_grid", [output_grad, data, grid], directions, output_grad, attrs
    )


def grid_sample_jvp(
    data: relax.Expr,
    grid: relax.Expr,
    directions: relax.Expr | Sequence[relax.Expr] = (),
    **attrs: object,
) -> relax.Call:
    """Derivative of grid_sample along directions of the grid.

    Parameters
    ----------
    data : relax.Expr
        The data.
    grid, directions, **attrs
        As for :func:`grid_sample_backward_data`.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``grid_sample(data, grid, **attrs)``.
    """
    return _call("grid_sample_jvp", [data, grid], directions, data, attrs)


def grid_sample_attrs(call: relax.Call) -> dict:
    """Return the attributes of grid_sample or of one of its backward operators."""
    return {
        name: getattr(call.attrs, name)
        for name in ("method", "layout", "padding_mode", "align_corners")
    }


def _call(
    name: str,
    arguments: Sequence[relax.Expr],
    directions: relax.Expr | Sequence[relax.Expr],
    like: relax.Expr,
    attrs: Mapping[str, Any],
) -> relax.Call:
    if not isinstance(directions, relax.Expr):
        directions = relax.Tuple(list(directions)) if len(directions) else None
    if directions is not None:
        arguments = [*arguments, directions]
    attrs = relax.op.image.grid_sample(like, like, **attrs).attrs
    return relax.Call(Op.get(f"relax.grad.{name}"), arguments, attrs)


def _infer_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    data_type = type_of_argument(call, 1, "data_shape", output_grad)
    if data_type.shape is None:
        _check(call, None, 2)
    else:
        _check_output_grad(call, ctx, data_type, 2)
    return data_type


def _infer_backward_grid(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    tensor_type(call, 0, "output_grad")
    _check_output_grad(call, ctx, tensor_type(call, 1, "data"), 2)
    return call.args[2].ty


def _infer_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data_type = tensor_type(call, 0, "data")
    return _forward(call, ctx, data_type, 1)


def _check_output_grad(
    call: relax.Call, ctx: relax.BlockBuilder, data_type: relax.TensorType, grid_index: int
) -> None:
    """Check the output gradient against the result type of the forward operator."""
    output_grad = tensor_type(call, 0, "output_grad")
    if dtype_of(output_grad) != dtype_of(data_type):
        raise TypeError(
            f"{call.op.name}: output_grad must have the dtype of the data, {data_type.dtype}, "
            f"but its type is {output_grad}"
        )
    check_shape(call, "output_grad", output_grad, _forward(call, ctx, data_type, grid_index))


def _forward(
    call: relax.Call, ctx: relax.BlockBuilder, data_type: relax.TensorType, grid_index: int
) -> relax.TensorType:
    _check(call, data_type, grid_index)
    data = relax.Var("data", data_type)
    forward = relax.Call(
        Op.get("relax.image.grid_sample"), [data, call.args[grid_index]], call.attrs
    )
    return forward_type(call, ctx, forward)


def _check(call: relax.Call, data: relax.TensorType | None, grid_index: int) -> None:
    """Reject calls that TVM's inference of the forward operator accepts but no implementation
    supports."""
    name, attrs = call.op.name, grid_sample_attrs(call)
    layout = attrs["layout"]
    for attr, values in (
        ("layout", tuple(_RANKS)),
        ("method", _METHODS.get(layout, ())),
        ("padding_mode", _PADDING_MODES),
    ):
        if attrs[attr] not in values:
            raise ValueError(f"{name}: {attr} must be one of {values}, but it is {attrs[attr]!r}")
    grid = tensor_type(call, grid_index, "grid")
    for argument, tensor in (("grid", grid), ("data", data)):
        if tensor is not None and tensor.ndim not in (-1, len(layout)):
            raise ValueError(
                f"{name}: {argument} must have {len(layout)} dimensions for the layout {layout}, "
                f"but its type is {tensor}"
            )
    if _differ(grid, 1, _RANKS[layout]):
        raise ValueError(
            f"{name}: the grid must have {_RANKS[layout]} coordinates along axis 1, but its type "
            f"is {grid}"
        )
    shape = None if data is None else data.shape
    if isinstance(shape, relax.ShapeExpr) and _differ(grid, 0, shape.values[0]):
        raise ValueError(
            f"{name}: data and grid must have the same batch, but their types are {data} and {grid}"
        )
    if len(call.args) == grid_index + 1:
        return
    directions = call.args[grid_index + 1].ty
    if not isinstance(directions, relax.TupleType):
        raise TypeError(f"{name}: directions must be a tuple, but their type is {directions}")
    for direction in directions.fields:
        if not isinstance(direction, relax.TensorType) or dtype_of(direction) != dtype_of(grid):
            raise TypeError(
                f"{name}: a direction must have the type of the grid, {grid}, but it has "
                f"{direction}"
            )
        check_shape(call, "a direction", direction, grid)


def _differ(tensor: relax.TensorType, axis: int, extent: tirx.PrimExpr) -> bool:
    """Tell whether an axis provably has another extent."""
    return isinstance(tensor.shape, relax.ShapeExpr) and Analyzer().can_prove(
        tensor.shape.values[axis] != extent
    )


_DIRECTIONS = ("directions", "Optional Tuple", "Directions of the grid, each of its type.")
_OUTPUT_GRAD = ("output_grad", "Tensor", "The gradient with respect to the result.")
for _builder, _infer, _arguments in (
    (
        grid_sample_backward_data,
        _infer_backward_data,
        [
            _OUTPUT_GRAD,
            ("data_shape", "Shape", "The shape of the data."),
            ("grid", "Tensor", "The grid."),
        ],
    ),
    (
        grid_sample_backward_grid,
        _infer_backward_grid,
        [_OUTPUT_GRAD, ("data", "Tensor", "The data."), ("grid", "Tensor", "The grid.")],
    ),
    (
        grid_sample_jvp,
        _infer_jvp,
        [("data", "Tensor", "The data."), ("grid", "Tensor", "The grid.")],
    ),
):
    declare_op(
        _builder.__name__,
        [*_arguments, _DIRECTIONS],
        _infer,
        _builder,
        "relax.attrs.GridSampleAttrs",
    )
