"""Legalization of the normalisations for which TVM's is wrong, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.relax import op

from ..ir.compat import dtype_of
from ..ir.dtypes import HALVES
from ..ir.module import short_name
from ..op.norm_statistics import deviation
from ..registry import register_legalize
from ..topi import norm as topi_norm
from ..topi import util as topi_util
from ._gpu import bind_threads
from ._util import int_list, is_empty, shape_values, stock, zeros

_STOCK_BATCH_NORM = stock("relax.nn.batch_norm")
_STOCK_GROUP_NORM = stock("relax.nn.group_norm")
_STOCK_INSTANCE_NORM = stock("relax.nn.instance_norm")
_STOCK_LAYER_NORM = stock("relax.nn.layer_norm")
_STOCK_RMS_NORM = stock("relax.nn.rms_norm")


@register_legalize(
    "relax.nn.batch_norm",
    corrects=(
        "returns float32 for half precision, which contradicts its inferred type, and normalizes "
        "along the wrong axis for a negative axis in training"
    ),
)
def _batch_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute half precision in float32, and convert a negative axis to a non-negative one."""
    attrs = call.attrs
    dtypes = [dtype_of(argument.ty) for argument in call.args]
    half = any(dtype in HALVES for dtype in dtypes)
    if int(attrs.axis) >= 0 and not half:
        return bind_threads(bb, _STOCK_BATCH_NORM(bb, call))
    arguments = [
        relax.op.astype(argument, "float32") if half else argument for argument in call.args
    ]
    result = bb.emit(
        relax.op.nn.batch_norm(
            *arguments,
            axis=int(attrs.axis) % call.args[0].ty.ndim,
            epsilon=float(attrs.epsilon),
            center=attrs.center,
            scale=attrs.scale,
            momentum=float(attrs.momentum),
            training=attrs.training,
        )
    )
    if not half:
        return result
    return relax.Tuple(
        [
            relax.op.astype(relax.TupleGetItem(result, i), dtype_of(field))
            for i, field in enumerate(call.ty.fields)
        ]
    )


@register_legalize(
    "relax.nn.layer_norm",
    corrects=(
        "ignores center=False and scale=False, reads gamma and beta in the wrong order for axes "
        "that are not ascending, and refuses float64 and bfloat16"
    ),
)
def _layer_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, attrs = call.args[0], call.attrs
    axes = _axes(data, attrs.axes)
    if (
        dtype_of(data.ty) in ("float32", "float16")
        and attrs.scale
        and attrs.center
        and axes == sorted(axes)
    ):
        return _STOCK_LAYER_NORM(bb, call)
    return _compute(bb, call, data, axes, axes)


@register_legalize(
    "relax.nn.rms_norm",
    corrects=(
        "computes float64 in float32, reads the weight in the wrong order for axes that are not "
        "ascending, and compiles only for trailing axes and not for all axes"
    ),
)
def _rms_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data = call.args[0]
    axes, ndim = _axes(data, call.attrs.axes), data.ty.ndim
    last = list(range(ndim - len(axes), ndim))
    if dtype_of(data.ty) != "float64" and axes == last and len(axes) < ndim:
        return bind_threads(bb, _STOCK_RMS_NORM(bb, call), always=False)
    return _compute(bb, call, data, axes, axes, center=False)


@register_legalize(
    "relax.nn.group_norm",
    corrects="ignores center=False and scale=False, and refuses float64",
)
def _group_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, attrs = call.args[0], call.attrs
    if dtype_of(data.ty) in ("float32", "float16") and attrs.scale and attrs.center:
        return _STOCK_GROUP_NORM(bb, call)
    if is_empty(call):
        return zeros(bb, call)
    grouped, axes, channel = _grouped(bb, call)
    result = _compute(bb, call, grouped, axes, [channel, channel + 1])
    return op.reshape(result, data.ty.shape)


@register_legalize(
    "relax.nn.instance_norm",
    corrects=(
        "ignores center=False and scale=False, refuses float64, bfloat16 and a negative channel "
        "axis, and computes the element count in half precision"
    ),
)
def _instance_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, attrs = call.args[0], call.attrs
    if (
        dtype_of(data.ty) == "float32"
        and attrs.scale
        and attrs.center
        and int(attrs.channel_axis) >= 0
    ):
        return _STOCK_INSTANCE_NORM(bb, call)
    return _compute(bb, call, data, _axes(data, attrs.axes), _axes(data, [attrs.channel_axis]))


@register_legalize("relax.grad.batch_norm_statistics")
def _batch_norm_statistics(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (data,) = call.args
    axes = _normalized_axes(call, data)
    statistics = _mean_and_rstd(bb, call, data, axes)
    return relax.Tuple(
        [op.squeeze(statistic, axes) if axes else statistic for statistic in statistics]
    )


@register_legalize("relax.grad.layer_norm_statistics")
@register_legalize("relax.grad.instance_norm_statistics")
def _row_statistics(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (data,) = call.args
    return relax.Tuple(_mean_and_rstd(bb, call, data, _axes(data, call.attrs.axes)))


@register_legalize("relax.grad.group_norm_statistics")
def _group_norm_statistics(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute the statistics of the groups, and repeat them for each channel."""
    if topi_util.is_empty(call.args[0].ty.shape.values):
        # Reshape misreads an extent of 0. Each channel of a group has the same statistics as the
        # group: NaN, or none.
        return _row_statistics(bb, call)
    grouped, axes, channel = _grouped(bb, call)
    result = call.ty.fields[0].shape
    extents = list(result.values)
    extents[channel : channel + 1] = grouped.ty.shape.values[channel : channel + 2]
    repeated = [
        bb.emit(op.broadcast_to(statistic, relax.ShapeExpr(extents)))
        for statistic in _mean_and_rstd(bb, call, grouped, axes)
    ]
    return relax.Tuple([bb.emit(op.reshape(statistic, result)) for statistic in repeated])


@register_legalize("relax.grad.rms_norm_statistics")
def _rms_norm_statistics(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (data,) = call.args
    (rstd,) = _mean_and_rstd(bb, call, data, _axes(data, call.attrs.axes), center=False)
    return rstd


@register_legalize("relax.grad.divide_by_count")
def _divide_by_count(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, of_shape = call.args
    extents = shape_values(of_shape)
    axis = range(len(extents)) if call.attrs.axis is None else call.attrs.axis
    return bb.call_te(
        topi_norm.divide_by_count,
        data,
        extents,
        [int(a) % len(extents) for a in axis],
        primfunc_name_hint="divide_by_count",
    )


@register_legalize("relax.grad.batch_norm_backward_data")
@register_legalize("relax.grad.instance_norm_backward_data")
def _channel_norm_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, gamma, *statistics = call.args
    factors = gamma if call.attrs.scale else None
    place = _channel(call, data), _normalized_axes(call, data)
    tensors = output_grad, data, factors, *statistics
    return _kernel(bb, call, topi_norm.channel_norm_backward_data, *tensors, *place)


@register_legalize("relax.grad.layer_norm_backward_data")
def _layer_norm_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, gamma, *statistics = call.args
    factors = gamma if call.attrs.scale else None
    tensors = output_grad, data, factors, *statistics
    axes = _normalized_axes(call, data)
    return _kernel(bb, call, topi_norm.row_norm_backward_data, *tensors, axes)


@register_legalize("relax.grad.rms_norm_backward_data")
def _rms_norm_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, weight, rstd = call.args
    axes = _normalized_axes(call, data)
    sums = _kernel(
        bb, call, topi_norm.rms_norm_row_sums, *call.args, axes, name="rms_norm_row_sums"
    )
    tensors = output_grad, data, weight, None, rstd
    return _kernel(bb, call, topi_norm.row_norm_backward_data, *tensors, axes, bb.emit(sums))


@register_legalize("relax.grad.batch_norm_backward_gamma")
@register_legalize("relax.grad.instance_norm_backward_gamma")
@register_legalize("relax.grad.layer_norm_backward_gamma")
@register_legalize("relax.grad.rms_norm_backward_weight")
def _backward_gamma(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, *mean, rstd = call.args
    axes = _normalized_axes(call, data)
    kept: list[int] | None = axes
    if hasattr(call.attrs, "axis"):
        kept = [_channel(call, data)]
    elif hasattr(call.attrs, "channel_axis"):
        kept = None  # a sum for each instance
    tensors = output_grad, data, *(mean or [None]), rstd
    return _kernel(bb, call, topi_norm.norm_backward_gamma, *tensors, axes, kept, of_parameter=True)


def _axes(data: relax.Expr, axes: Iterable[int]) -> list[int]:
    return [axis % data.ty.ndim for axis in int_list(axes)]


def _channel(call: relax.Call, data: relax.Expr) -> int:
    """Return the axis of the channels, not negative."""
    attrs = call.attrs
    return int(attrs.axis if hasattr(attrs, "axis") else attrs.channel_axis) % data.ty.ndim


def _normalized_axes(call: relax.Call, data: relax.Expr) -> list[int]:
    """Return the axes that the statistics of the data are computed over, all non-negative."""
    if hasattr(call.attrs, "axes"):
        return _axes(data, call.attrs.axes)
    return [axis for axis in range(data.ty.ndim) if axis != _channel(call, data)]


def _compute(
    bb: relax.BlockBuilder,
    call: relax.Call,
    data: relax.Expr,
    axes: Sequence[int],
    parameter_axes: Sequence[int],
    center: bool = True,
) -> relax.Expr:
    """Normalize over the axes; gamma and beta, if any, have the extents of ``parameter_axes``.

    Half precision is computed in float32. Without ``center``, the mean is taken to be 0.
    """
    half = dtype_of(data.ty) in HALVES

    def spread(parameter: relax.Expr) -> relax.Expr:
        if len(parameter_axes) != parameter.ty.ndim:  # channels, split into groups
            extents = [data.ty.shape.values[axis] for axis in parameter_axes]
            parameter = bb.emit(op.reshape(parameter, extents))
        order = sorted(range(len(parameter_axes)), key=parameter_axes.__getitem__)
        others = [axis for axis in range(data.ty.ndim) if axis not in parameter_axes]
        parameter = bb.emit(op.permute_dims(_widened(bb, parameter), order))
        return bb.emit(op.expand_dims(parameter, others)) if others else parameter

    _, result, variance = _moments(bb, data, axes, center)
    sigma = bb.emit(deviation(bb, variance, call.attrs.epsilon))
    result = bb.emit(op.divide(result, sigma))
    if getattr(call.attrs, "scale", True):
        result = bb.emit(op.multiply(result, spread(call.args[1])))
    if getattr(call.attrs, "center", False):
        result = bb.emit(op.add(result, spread(call.args[2])))
    return bb.emit(op.astype(result, dtype_of(data.ty))) if half else result


def _grouped(bb: relax.BlockBuilder, call: relax.Call) -> tuple[relax.Expr, list[int], int]:
    """Return the data with its channels split into groups, the normalized axes of it, and the axis
    of the groups."""
    data, attrs = call.args[0], call.attrs
    (channel,) = _axes(data, [attrs.channel_axis])
    groups, extents = int(attrs.num_groups), list(data.ty.shape.values)
    extents[channel : channel + 1] = [groups, tirx.floordiv(extents[channel], groups)]
    axes = [axis + (axis > channel) for axis in _axes(data, attrs.axes)] + [channel + 1]
    return bb.emit(op.reshape(data, extents)), axes, channel


def _moments(
    bb: relax.BlockBuilder, data: relax.Expr, axes: Sequence[int], center: bool = True
) -> tuple[relax.Expr | None, relax.Expr, relax.Expr]:
    """Return mean, centered data and variance over the axes, which the mean and the variance keep
    with extent 1.

    Half precision is computed in float32. Without ``center``, the mean is taken to be 0 and
    returned as None. The centered data is a separate variable: a value with one use is fused with
    its consumer.
    """

    def average(expr: relax.Expr) -> relax.Expr:
        return bb.emit(op.mean(expr, list(axes), keepdims=True)) if axes else expr

    data = _widened(bb, data)
    mean = average(data) if center else None
    centered = bb.emit(op.subtract(data, mean)) if center else data
    return mean, centered, average(bb.emit(op.multiply(centered, centered)))


def _mean_and_rstd(
    bb: relax.BlockBuilder,
    call: relax.Call,
    data: relax.Expr,
    axes: Sequence[int],
    center: bool = True,
) -> list[relax.Expr]:
    """Return the mean, if ``center``, and ``1 / sqrt(variance + epsilon)`` over the axes, kept with
    extent 1."""
    mean, _, variance = _moments(bb, data, axes, center)
    one = relax.const(1.0, dtype_of(variance.ty))
    rstd = bb.emit(op.divide(one, bb.emit(deviation(bb, variance, call.attrs.epsilon))))
    return [mean, rstd] if center else [rstd]


def _widened(bb: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr:
    """Return a tensor in the dtype to accumulate in."""
    return bb.emit(op.astype(expr, "float32")) if dtype_of(expr.ty) in HALVES else expr


def _kernel(
    bb: relax.BlockBuilder,
    call: relax.Call,
    expression: Callable,
    *args: Any,
    name: str | None = None,
    of_parameter: bool = False,
) -> relax.Expr:
    """Call a tensor expression, with our own schedule if TVM's rules for GPUs misclassify it.

    They misidentify the sum of products in the gradient of a parameter as a matrix-vector product.
    The function has the name of the call's operator if none is given.
    """
    gradient = bb.call_te(expression, *args, primfunc_name_hint=name or short_name(call))
    return bind_threads(bb, gradient, always=of_parameter)
