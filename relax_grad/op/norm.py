"""The backward operators of the normalisations.

They take the statistics of the data as arguments, as the libraries' primitives do: ``mean`` and
``rstd``, which is ``1 / sqrt(variance + epsilon)``. So the gradients of the data and of gamma share
them. Each operator reads the large tensors once or twice and writes no tensor of their size except
its result. The gradient of beta is a plain sum of the output gradient and needs no operator.

Half precision is computed in float32; its statistics should be given in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._infer import shape_values, tensor_type, unused
from ._layout import follow_axis, follow_elementwise
from ._norm_attrs import (
    batch_norm_attrs,
    instance_norm_attrs,
    layer_norm_attrs,
    rms_norm_attrs,
)
from ._norm_types import (
    infer_batch_norm_backward_data,
    infer_batch_norm_backward_gamma,
    infer_instance_norm_backward_data,
    infer_instance_norm_backward_gamma,
    infer_over_axes_data,
    infer_over_axes_gamma,
)
from .declare import Shape, as_shape, declare_op


def batch_norm_backward_data(
    output_grad: relax.Expr,
    data: relax.Expr,
    gamma: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    mean_grad: relax.Expr,
    variance_grad: relax.Expr,
    axis: int,
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
    momentum: float = 0.1,
    training: bool = True,
) -> relax.Call:
    """Gradient of batch_norm in training with respect to its data.

    ``gamma * rstd * output_grad + (mean_grad + 2 * variance_grad * (data - mean)) / N`` with ``N``
    elements in a channel.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the normalized data.
    data, gamma
        As given to ``relax.op.nn.batch_norm``.
    mean, rstd : relax.Expr
        The mean of each channel of ``data``, and ``1 / sqrt(variance + epsilon)``.
    mean_grad, variance_grad : relax.Expr
        The gradients with respect to the mean and the biased variance of each channel. Let ``t`` be
        the sum of ``output_grad`` and ``u`` the sum of ``output_grad * (data - mean) * rstd``;
        these are also the gradients of beta and gamma. The normalized data contributes
        ``-gamma * rstd * t`` and ``-gamma * rstd**2 * u / 2``. The running statistics contribute
        too if their results are used.
    axis, epsilon, center, scale, momentum, training
        As given to ``relax.op.nn.batch_norm``; ``scale=False`` ignores ``gamma``. Without
        ``training`` the gradient is ``gamma * rstd * output_grad``, which needs no operator.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.batch_norm_backward_data"),
        [output_grad, data, gamma, mean, rstd, mean_grad, variance_grad],
        batch_norm_attrs(axis, epsilon, center, scale, momentum, training=training),
    )


def batch_norm_backward_gamma(
    output_grad: relax.Expr,
    data: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    axis: int,
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
    momentum: float = 0.1,
    training: bool = True,
) -> relax.Call:
    """Gradient of batch_norm with respect to gamma.

    It is the sum of ``output_grad * (data - mean) * rstd`` over each channel.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the normalized data.
    data : relax.Expr
        As given to ``relax.op.nn.batch_norm``.
    mean, rstd : relax.Expr
        The mean of each channel that was subtracted, and ``1 / sqrt(variance + epsilon)``.
    axis, epsilon, center, scale, momentum, training
        As given to ``relax.op.nn.batch_norm``.

    Returns
    -------
    result : relax.Call
        A tensor of one element for each channel and of the dtype of ``rstd``.
    """
    return relax.Call(
        Op.get("relax.grad.batch_norm_backward_gamma"),
        [output_grad, data, mean, rstd],
        batch_norm_attrs(axis, epsilon, center, scale, momentum, training=training),
    )


def layer_norm_backward_data(
    output_grad: relax.Expr,
    data: relax.Expr,
    gamma: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    axes: int | Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Gradient of layer_norm with respect to its data.

    ``rstd * (g - average(g) - z * average(g * z))`` with ``g = gamma * output_grad`` and
    ``z = (data - mean) * rstd``, with the averages over the axes.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``layer_norm``.
    data, gamma
        As given to ``relax.op.nn.layer_norm``.
    mean, rstd : relax.Expr
        The mean of ``data`` over the axes, which are kept with extent 1, and ``1 / sqrt(variance +
        epsilon)``.
    axes, epsilon, center, scale
        As given to ``relax.op.nn.layer_norm``; ``scale=False`` ignores ``gamma``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.layer_norm_backward_data"),
        [output_grad, data, gamma, mean, rstd],
        layer_norm_attrs(axes, epsilon, center, scale),
    )


def layer_norm_backward_gamma(
    output_grad: relax.Expr,
    data: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    axes: int | Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Gradient of layer_norm with respect to gamma.

    It is the sum of ``output_grad * (data - mean) * rstd`` over all axes except ``axes``.

    Parameters
    ----------
    output_grad, data, mean, rstd, axes, epsilon, center, scale
        As for ``layer_norm_backward_data``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of gamma, which has the axes in the order given, and of the dtype of
        ``rstd``.
    """
    return relax.Call(
        Op.get("relax.grad.layer_norm_backward_gamma"),
        [output_grad, data, mean, rstd],
        layer_norm_attrs(axes, epsilon, center, scale),
    )


def rms_norm_backward_data(
    output_grad: relax.Expr,
    data: relax.Expr,
    weight: relax.Expr,
    rstd: relax.Expr,
    axes: int | Sequence[int] = -1,
    epsilon: float = 1e-5,
) -> relax.Call:
    """Gradient of rms_norm with respect to its data.

    ``rstd * (g - z * average(g * z))`` with ``g = weight * output_grad`` and ``z = data * rstd``,
    with the average over the axes.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``rms_norm``.
    data, weight
        As given to ``relax.op.nn.rms_norm``.
    rstd : relax.Expr
        ``1 / sqrt(mean(data**2) + epsilon)`` over the axes, which are kept with extent 1.
    axes, epsilon
        As given to ``relax.op.nn.rms_norm``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.rms_norm_backward_data"),
        [output_grad, data, weight, rstd],
        rms_norm_attrs(axes, epsilon),
    )


def rms_norm_backward_weight(
    output_grad: relax.Expr,
    data: relax.Expr,
    rstd: relax.Expr,
    axes: int | Sequence[int] = -1,
    epsilon: float = 1e-5,
) -> relax.Call:
    """Gradient of rms_norm with respect to its weight.

    It is the sum of ``output_grad * data * rstd`` over all axes except ``axes``.

    Parameters
    ----------
    output_grad, data, rstd, axes, epsilon
        As for ``rms_norm_backward_data``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of the weight, which has the axes in the order given, and of the dtype
        of ``rstd``.
    """
    return relax.Call(
        Op.get("relax.grad.rms_norm_backward_weight"),
        [output_grad, data, rstd],
        rms_norm_attrs(axes, epsilon),
    )


def instance_norm_backward_data(
    output_grad: relax.Expr,
    data: relax.Expr,
    gamma: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    mean_grad: relax.Expr,
    variance_grad: relax.Expr,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Gradient of instance_norm, and of group_norm, with respect to its data.

    ``gamma * rstd * output_grad + (mean_grad + 2 * variance_grad * (data - mean)) / N`` with ``N``
    elements along the axes.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the normalized data.
    data, gamma
        As given to ``relax.op.nn.instance_norm``.
    mean, rstd : relax.Expr
        The mean of ``data`` over the axes, which are kept with extent 1, and ``1 / sqrt(variance +
        epsilon)``. For ``group_norm``, each channel holds the statistics of its group.
    mean_grad, variance_grad : relax.Expr
        The gradients with respect to mean and biased variance, as for ``batch_norm_backward_data``.
        For ``group_norm``, each channel holds the average over the channels of its group.
    channel_axis, axes, epsilon, center, scale
        As given to ``relax.op.nn.instance_norm``; ``scale=False`` ignores ``gamma``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.instance_norm_backward_data"),
        [output_grad, data, gamma, mean, rstd, mean_grad, variance_grad],
        instance_norm_attrs(channel_axis, axes, epsilon, center, scale),
    )


def instance_norm_backward_gamma(
    output_grad: relax.Expr,
    data: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Gradient of instance_norm, and of group_norm, with respect to the gamma of each instance.

    It is the sum of ``output_grad * (data - mean) * rstd`` over the axes. The gradient of gamma is
    its sum over the instances; the gradient of the data needs the value of each instance.

    Parameters
    ----------
    output_grad, data, mean, rstd, channel_axis, axes, epsilon, center, scale
        As for ``instance_norm_backward_data``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of ``data``, in which the axes have extent 1, and of the dtype of
        ``rstd``.
    """
    return relax.Call(
        Op.get("relax.grad.instance_norm_backward_gamma"),
        [output_grad, data, mean, rstd],
        instance_norm_attrs(channel_axis, axes, epsilon, center, scale),
    )


def divide_by_count(
    data: relax.Expr, of_shape: relax.Expr | Shape, axis: int | Sequence[int] | None = None
) -> relax.Call:
    """Divide by the number of elements that a tensor of the given shape has along the axes.

    It turns a sum into a mean without a constant for the count, which does not exist for a symbolic
    extent, and without a pass over the tensor to compute the count.

    Parameters
    ----------
    data : relax.Expr
        The tensor to divide.
    of_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape whose elements are counted.
    axis : int or Sequence[int], optional
        The axes to count along; by default all.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and the dtype of ``data``; half precision is divided in float32.
    """
    return relax.Call(
        Op.get("relax.grad.divide_by_count"),
        [data, as_shape(of_shape)],
        relax.op.squeeze(unused(), axis).attrs,
    )


def _infer_divide_by_count(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data = tensor_type(call, 0, "data")
    shape_values(call, 1, "of_shape")
    ndim, axes = call.args[1].ty.ndim, call.attrs.axis
    if ndim < 0:
        raise ValueError(f"{call.op.name}: the rank of of_shape must be known")
    for axis in axes or ():
        if not -ndim <= int(axis) < ndim:
            raise ValueError(
                f"{call.op.name}: axis must lie in [{-ndim}, {ndim}) for a shape of {ndim} "
                f"dimensions, but it is {axes}"
            )
    return data


declare_op(
    "divide_by_count",
    [
        ("data", "Tensor", "The dividend."),
        ("of_shape", "Shape", "The shape whose extents are counted."),
    ],
    _infer_divide_by_count,
    divide_by_count,
    "relax.attrs.SqueezeAttrs",
)

_GRAD = ("output_grad", "Tensor", "The gradient with respect to the normalized data.")
_DATA = ("data", "Tensor", "The tensor to normalize.")
_GAMMA = ("gamma", "Tensor", "The factors.")
_MEAN = ("mean", "Tensor", "The mean of the data.")
_RSTD = ("rstd", "Tensor", "The reciprocal of the standard deviation.")
_STATISTICS_GRADS = [
    ("mean_grad", "Tensor", "The gradient with respect to the mean."),
    ("variance_grad", "Tensor", "The gradient with respect to the variance."),
]

declare_op(
    "instance_norm_backward_data",
    [_GRAD, _DATA, _GAMMA, _MEAN, _RSTD, *_STATISTICS_GRADS],
    infer_instance_norm_backward_data,
    instance_norm_backward_data,
    "relax.attrs.InstanceNormAttrs",
)
declare_op(
    "instance_norm_backward_gamma",
    [_GRAD, _DATA, _MEAN, _RSTD],
    infer_instance_norm_backward_gamma,
    instance_norm_backward_gamma,
    "relax.attrs.InstanceNormAttrs",
)
declare_op(
    "batch_norm_backward_data",
    [_GRAD, _DATA, _GAMMA, _MEAN, _RSTD, *_STATISTICS_GRADS],
    infer_batch_norm_backward_data,
    batch_norm_backward_data,
    "relax.attrs.BatchNormAttrs",
)
declare_op(
    "batch_norm_backward_gamma",
    [_GRAD, _DATA, _MEAN, _RSTD],
    infer_batch_norm_backward_gamma,
    batch_norm_backward_gamma,
    "relax.attrs.BatchNormAttrs",
)
declare_op(
    "layer_norm_backward_data",
    [_GRAD, _DATA, _GAMMA, _MEAN, _RSTD],
    infer_over_axes_data,
    layer_norm_backward_data,
    "relax.attrs.LayerNormAttrs",
)
declare_op(
    "layer_norm_backward_gamma",
    [_GRAD, _DATA, _MEAN, _RSTD],
    infer_over_axes_gamma,
    layer_norm_backward_gamma,
    "relax.attrs.LayerNormAttrs",
)
declare_op(
    "rms_norm_backward_data",
    [_GRAD, _DATA, ("weight", "Tensor", "The factors."), _RSTD],
    infer_over_axes_data,
    rms_norm_backward_data,
    "relax.attrs.RMSNormAttrs",
)
declare_op(
    "rms_norm_backward_weight",
    [_GRAD, _DATA, _RSTD],
    infer_over_axes_gamma,
    rms_norm_backward_weight,
    "relax.attrs.RMSNormAttrs",
)

# The axes refer to the shape argument, which does not change.
follow_elementwise("relax.grad.divide_by_count")
follow_axis("relax.grad.batch_norm_backward_data", full=(0, 1))
follow_axis("relax.grad.batch_norm_backward_gamma", full=(0, 1), result=False)
_CHANNEL_AND_AXES = ("channel_axis", "axes")
follow_axis(
    "relax.grad.instance_norm_backward_data", full=(0, 1, 3, 4, 5, 6), axes=_CHANNEL_AND_AXES
)
follow_axis("relax.grad.instance_norm_backward_gamma", full=(0, 1, 2, 3), axes=_CHANNEL_AND_AXES)
# Gamma keeps the order of the attribute ``axes``.
follow_axis("relax.grad.layer_norm_backward_data", full=(0, 1, 3, 4), axes=("axes",))
follow_axis("relax.grad.layer_norm_backward_gamma", full=(0, 1, 2, 3), axes=("axes",), result=False)
follow_axis("relax.grad.rms_norm_backward_data", full=(0, 1, 3), axes=("axes",))
follow_axis("relax.grad.rms_norm_backward_weight", full=(0, 1, 2), axes=("axes",), result=False)
