"""The backward operators of pooling.

TVM has ``max_pool2d_backward`` and ``avg_pool2d_backward``. Both are linear in the output gradient.
The transpose of the second is ``avg_pool2d`` itself; that of the first is ``max_pool2d_jvp``, which is
added here, and with which the family is closed under differentiation (:mod:`relax_grad.rules.grad`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from .._compat import dtype_of, shapes_differ
from ._declare import (
    check_layouts,
    check_positive,
    check_shape,
    declare_op,
    forward_type,
    tensor_type,
)

#: How many integers each attribute may hold; the forward operator's builder completes them.
_LENGTHS = {"pool_size": (1, 2), "strides": (1, 2), "dilation": (1, 2), "padding": (1, 2, 4)}


def max_pool2d_jvp(
    data_tangent: relax.Expr,
    data: relax.Expr,
    pool_size: int | Sequence[int] = (1, 1),
    strides: int | Sequence[int] = (1, 1),
    padding: int | Sequence[int] = (0, 0, 0, 0),
    dilation: int | Sequence[int] = (1, 1),
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    layout: str = "NCHW",
    out_layout: str | None = None,
) -> relax.Call:
    """Derivative of max_pool2d along a direction: the tangent of each window's largest element.

    It is the transpose of ``relax.grad.max_pool2d_backward``, and chooses the same element where
    several of a window are equally large.

    Parameters
    ----------
    data_tangent : relax.Expr
        The direction, of the shape of the data.
    data : relax.Expr
        The data of ``max_pool2d``.
    pool_size, strides, padding, dilation, ceil_mode, count_include_pad, layout, out_layout
        As given to ``relax.op.nn.max_pool2d``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape that max_pool2d returns, in ``out_layout``, and of the dtype of
        ``data_tangent``; 0 for a window that holds nothing but padding.
    """
    attrs = _pool2d_attrs(
        pool_size, strides, padding, dilation, ceil_mode, count_include_pad, layout, out_layout
    )
    return relax.Call(Op.get("relax.grad.max_pool2d_jvp"), [data_tangent, data], attrs)


def check_pool2d_attrs(call: relax.Call) -> relax.op.op_attrs.Pool2DAttrs:
    """Return the attributes of a pooling call, completed in the way the forward operator does.

    Raises
    ------
    ValueError
        Names the operator and the attribute that no gradient is defined for.
    """
    attrs = call.attrs
    check_layouts(call, layout=(attrs.layout, "NCHW"), out_layout=(attrs.out_layout, "NCHW"))
    check_positive(call, "pool_size", "strides", "dilation")
    for name, lengths in _LENGTHS.items():
        value = [int(extent) for extent in getattr(attrs, name)]
        if len(value) not in lengths:
            raise ValueError(
                f"{call.op.name}: {name} must hold {' or '.join(map(str, lengths))} integers, but "
                f"it is {value}"
            )
    return _pool2d_attrs(
        attrs.pool_size,
        attrs.strides,
        attrs.padding,
        attrs.dilation,
        attrs.ceil_mode,
        attrs.count_include_pad,
        attrs.layout,
        attrs.out_layout,
    )


def check_pool2d_backward(
    call: relax.Call, ctx: relax.BlockBuilder
) -> relax.op.op_attrs.Pool2DAttrs:
    """Check a call of ``max_pool2d_backward`` or ``avg_pool2d_backward`` and return its attributes.

    TVM infers the type of these operators without looking at anything but the type of the data.

    Raises
    ------
    TypeError, ValueError
        Names the operator, the argument or attribute, what was expected and what was found.
    """
    attrs = check_pool2d_attrs(call)
    output_grad = tensor_type(call, 0, "output_grad")
    check_shape(call, "output_grad", output_grad, _forward_type(call, ctx, attrs))
    return attrs


def _pool2d_attrs(pool_size, *attrs) -> relax.op.op_attrs.Pool2DAttrs:
    """Complete the attributes in the way the forward operator does."""
    unused = relax.Var("unused", relax.TensorType(dtype="float32", ndim=4))
    return relax.op.nn.max_pool2d(unused, pool_size, *attrs).attrs


def _infer_max_pool2d_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    attrs = check_pool2d_attrs(call)
    forward = _forward_type(call, ctx, attrs)
    tangent, data = tensor_type(call, 0, "data_tangent"), call.args[1].ty
    if shapes_differ(tangent, data):
        raise ValueError(
            f"{call.op.name}: data_tangent must have the shape of data, whose type is {data}, but "
            f"its type is {tangent}"
        )
    dtype = dtype_of(tangent)
    if isinstance(forward.shape, relax.ShapeExpr):
        return relax.TensorType(forward.shape, dtype)
    return relax.TensorType(dtype=dtype, ndim=forward.ndim)


def _forward_type(call: relax.Call, ctx: relax.BlockBuilder, attrs) -> relax.TensorType:
    """Return the type of max_pool2d of the call's data; avg_pool2d's is the same."""
    data = relax.Var("data", tensor_type(call, 1, "data"))
    return forward_type(call, ctx, relax.Call(Op.get("relax.nn.max_pool2d"), [data], attrs))


declare_op(
    "max_pool2d_jvp",
    [
        ("data_tangent", "Tensor", "The direction to differentiate along."),
        ("data", "Tensor", "The data."),
    ],
    _infer_max_pool2d_jvp,
    max_pool2d_jvp,
    "relax.attrs.Pool2DAttrs",
)
