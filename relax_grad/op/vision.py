"""The backward operators of pooling over regions of interest.

Each is linear in its first argument. For ``mode="max"`` and for roi_pool it also depends on the
positions of the largest elements of the data. The transpose of the gradient is then the derivative
along a direction: the forward operator on the direction, at the positions of the largest elements
of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of
from ._infer import check_shape, forward_type, tensor_type
from .declare import declare_op

#: The attributes of the forward operators.
_ATTRS = {
    "roi_align": ("pooled_size", "spatial_scale", "sample_ratio", "aligned", "layout", "mode"),
    "roi_pool": ("pooled_size", "spatial_scale", "layout"),
}


def roi_align_backward_data(
    output_grad: relax.Expr, data: relax.Expr, rois: relax.Expr, **attrs: object
) -> relax.Call:
    """Gradient of roi_align with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``roi_align(data, rois, **attrs)``.
    data : relax.Expr
        The data; for the mode ``avg`` only its type is used.
    rois : relax.Expr
        The regions.
    **attrs
        As given to ``relax.op.vision.roi_align``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``; half precision is accumulated in float32.
    """
    return _call("roi_align", "backward_data", [output_grad, data, rois], attrs)


def roi_align_jvp(
    data_direction: relax.Expr, data: relax.Expr, rois: relax.Expr, **attrs: object
) -> relax.Call:
    """Derivative of roi_align along a direction of its data, for the mode ``max``.

    Parameters
    ----------
    data_direction : relax.Expr
        The direction, of the type of the data.
    data, rois, **attrs
        As for :func:`roi_align_backward_data`. For the mode ``avg``, which is linear, the
        derivative is ``roi_align(data_direction, rois, **attrs)``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``roi_align(data, rois, **attrs)``.
    """
    return _call("roi_align", "jvp", [data_direction, data, rois], attrs)


def roi_pool_backward_data(
    output_grad: relax.Expr, data: relax.Expr, rois: relax.Expr, **attrs: object
) -> relax.Call:
    """Gradient of roi_pool with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``roi_pool(data, rois, **attrs)``.
    data : relax.Expr
        The data.
    rois : relax.Expr
        The regions.
    **attrs
        As given to ``relax.op.vision.roi_pool``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``; half precision is accumulated in float32.
    """
    return _call("roi_pool", "backward_data", [output_grad, data, rois], attrs)


def roi_pool_jvp(
    data_direction: relax.Expr, data: relax.Expr, rois: relax.Expr, **attrs: object
) -> relax.Call:
    """Derivative of roi_pool along a direction of its data.

    Parameters
    ----------
    data_direction : relax.Expr
        The direction, of the type of the data.
    data, rois, **attrs
        As for :func:`roi_pool_backward_data`.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``roi_pool(data, rois, **attrs)``.
    """
    return _call("roi_pool", "jvp", [data_direction, data, rois], attrs)


def roi_attrs(call: relax.Call) -> dict:
    """Return the attributes of a pooling over regions or of one of its backward operators."""
    attrs = {name: getattr(call.attrs, name) for name in _ATTRS[_forward_name(call)]}
    return {**attrs, "pooled_size": [int(size) for size in attrs["pooled_size"]]}


def _forward_name(call: relax.Call) -> str:
    return "roi_align" if "roi_align" in call.op.name else "roi_pool"


def _call(
    forward: str, suffix: str, arguments: Sequence[relax.Expr], attrs: Mapping[str, Any]
) -> relax.Call:
    builder = getattr(relax.op.vision, forward)
    return relax.Call(
        Op.get(f"relax.grad.{forward}_{suffix}"),
        arguments,
        builder(arguments[1], arguments[2], **attrs).attrs,
    )


def _infer_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    data = tensor_type(call, 1, "data")
    check_shape(call, "output_grad", output_grad, _forward(call, ctx))
    _check_dtype(call, "output_grad", output_grad, data)
    return data


def _infer_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    direction = tensor_type(call, 0, "data_direction")
    data = tensor_type(call, 1, "data")
    check_shape(call, "data_direction", direction, data)
    _check_dtype(call, "data_direction", direction, data)
    return _forward(call, ctx)


def _forward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    op = Op.get(f"relax.vision.{_forward_name(call)}")
    return forward_type(call, ctx, relax.Call(op, call.args[1:], call.attrs))


def _check_dtype(
    call: relax.Call, name: str, kind: relax.TensorType, data: relax.TensorType
) -> None:
    if dtype_of(kind) != dtype_of(data):
        raise TypeError(
            f"{call.op.name}: {name} must have the dtype of the data, {dtype_of(data)}, but it has "
            f"{dtype_of(kind)}"
        )


_DATA = [("data", "Tensor", "The data."), ("rois", "Tensor", "The regions.")]
for _builder, _attrs_type in (
    (roi_align_backward_data, "relax.attrs.ROIAlignAttrs"),
    (roi_pool_backward_data, "relax.attrs.ROIPoolAttrs"),
):
    declare_op(
        _builder.__name__,
        [("output_grad", "Tensor", "The gradient with respect to the result."), *_DATA],
        _infer_backward_data,
        _builder,
        _attrs_type,
    )
for _derivative, _attrs_type in (
    (roi_align_jvp, "relax.attrs.ROIAlignAttrs"),
    (roi_pool_jvp, "relax.attrs.ROIPoolAttrs"),
):
    declare_op(
        _derivative.__name__,
        [("data_direction", "Tensor", "The direction, of the type of the data."), *_DATA],
        _infer_jvp,
        _derivative,
        _attrs_type,
    )
