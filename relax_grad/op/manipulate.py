"""The backward operators of tile and repeat.

Each is linear in the output gradient, and its own gradient is the forward operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._infer import infer_data, unused
from ._layout import follow_shape, moved, moved_axes
from .declare import Shape, as_shape, declare_op


def tile_backward_data(
    output_grad: relax.Expr, data_shape: relax.Expr | Shape, repeats: int | Sequence[int]
) -> relax.Call:
    """Gradient of tile with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``tile(data, repeats)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    repeats : int or Sequence[int]
        As given to ``relax.op.tile``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    return relax.Call(
        Op.get("relax.grad.tile_backward_data"),
        [output_grad, as_shape(data_shape)],
        relax.op.tile(unused(), repeats).attrs,
    )


def repeat_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    repeats: int,
    axis: int | None = None,
) -> relax.Call:
    """Gradient of repeat with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``repeat(data, repeats, axis)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    repeats, axis
        As given to ``relax.op.repeat``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    return relax.Call(
        Op.get("relax.grad.repeat_backward_data"),
        [output_grad, as_shape(data_shape)],
        relax.op.repeat(unused(), repeats, axis).attrs,
    )


def _infer_tile(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    if any(int(count) < 0 for count in call.attrs.repeats):
        raise ValueError(f"{call.op.name}: repeats must be 0 or more, not {call.attrs.repeats}")
    return infer_data(call, ctx, "relax.tile")


def _infer_repeat(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    if int(call.attrs.repeats) < 0:
        raise ValueError(f"{call.op.name}: repeats must be 0 or more, not {call.attrs.repeats}")
    return infer_data(call, ctx, "relax.repeat")


declare_op(
    "tile_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of tile."),
        ("data_shape", "Shape", "The shape of the data."),
    ],
    _infer_tile,
    tile_backward_data,
    "relax.attrs.TileAttrs",
)
declare_op(
    "repeat_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of repeat."),
        ("data_shape", "Shape", "The shape of the data."),
    ],
    _infer_repeat,
    repeat_backward_data,
    "relax.attrs.RepeatAttrs",
)


def _moved_repeats(call: relax.Call, layout: str) -> dict:
    """Return tile's repeats in the order of the layout."""
    repeats = [int(count) for count in call.attrs.repeats]
    repeats = [1] * (len(layout) - len(repeats)) + repeats
    return {"repeats": moved(repeats, layout)}


def _moved_axis(call: relax.Call, layout: str) -> dict | None:
    """Return the position of repeat's axis in the layout; without an axis, repeat needs the order
    of the program."""
    axis = call.attrs.axis
    return None if axis is None else {"axis": moved_axes(int(axis), layout)}


follow_shape("relax.grad.tile_backward_data", attrs=_moved_repeats)
follow_shape("relax.grad.repeat_backward_data", attrs=_moved_axis)
