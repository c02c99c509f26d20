"""The backward operator of padding; its own gradient is padding."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._infer import infer_data, shape_values, unused
from ._layout import follow_shape, moved
from .declare import Shape, as_shape, declare_op

#: The modes of ``relax.nn.pad``, which treats any other mode as ``constant``.
PAD_MODES = ("constant", "reflect", "replicate", "circular")


def pad_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    pad_width: Sequence[int],
    pad_mode: str = "constant",
    pad_value: float = 0.0,
) -> relax.Call:
    """Gradient of pad with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``nn.pad(data, pad_width, pad_mode, pad_value)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    pad_width, pad_mode, pad_value
        As given to ``relax.op.nn.pad``. A negative width crops. The gradient does not depend on
        ``pad_value``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    return relax.Call(
        Op.get("relax.grad.pad_backward_data"),
        [output_grad, as_shape(data_shape)],
        relax.op.nn.pad(unused(), pad_width, pad_mode, pad_value).attrs,
    )


def pad_attrs(call: relax.Call) -> dict:
    """Return the attributes of ``nn.pad`` or of its backward operator."""
    attrs = call.attrs
    return {
        "pad_width": [int(width) for width in attrs.pad_width],
        "pad_mode": str(attrs.pad_mode),
        "pad_value": float(attrs.pad_value),
    }


def _infer_pad(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    mode, widths = call.attrs.pad_mode, call.attrs.pad_width
    if mode not in PAD_MODES:
        raise ValueError(
            f"{call.op.name}: pad_mode must be one of {', '.join(map(repr, PAD_MODES))}, not "
            f"{mode!r}"
        )
    shape_values(call, 1, "data_shape")  # raises for an argument that is not a shape
    ndim = call.args[1].ty.ndim
    if ndim not in (-1, len(widths) / 2):
        raise ValueError(
            f"{call.op.name}: pad_width must have two widths for each of {ndim} axes, not {widths}"
        )
    return infer_data(call, ctx, "relax.nn.pad")


declare_op(
    "pad_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of pad."),
        ("data_shape", "Shape", "The shape of the data."),
    ],
    _infer_pad,
    pad_backward_data,
    "relax.attrs.PadAttrs",
)


def moved_widths(call: relax.Call, layout: str) -> dict:
    """Return the widths of a pad in the order of the layout."""
    widths = call.attrs.pad_width
    pairs = [(int(widths[i]), int(widths[i + 1])) for i in range(0, len(widths), 2)]
    return {"pad_width": [width for pair in moved(pairs, layout) for width in pair]}


follow_shape("relax.grad.pad_backward_data", attrs=moved_widths)
