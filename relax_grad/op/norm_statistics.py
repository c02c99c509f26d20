"""The operators of the statistics of normalisations: the mean, and
``rstd = 1 / sqrt(variance + epsilon)``.

A gradient takes the statistics as arguments, and its rule calls one of these operators for them. On
CPUs the kernel of the forward pass returns the statistics too, and no second pass over the data is
made.

The attributes are the normalisation's. The statistics of half precision are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op
from tvm.relax import op

from ..ir.compat import dtype_of
from ._layout import follow_axis
from ._norm_attrs import (
    batch_norm_attrs,
    group_norm_attrs,
    instance_norm_attrs,
    layer_norm_attrs,
    rms_norm_attrs,
)
from ._norm_types import (
    infer_channel_statistics,
    infer_group_statistics,
    infer_instance_statistics,
    infer_root_mean_square,
    infer_row_statistics,
)
from .declare import declare_op


def batch_norm_statistics(
    data: relax.Expr,
    axis: int,
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
    momentum: float = 0.1,
    training: bool = True,
) -> relax.Call:
    """Mean and reciprocal standard deviation of each channel.

    Parameters
    ----------
    data : relax.Expr
        A floating-point tensor.
    axis, epsilon, center, scale, momentum, training
        As given to ``relax.op.nn.batch_norm``. Only ``axis`` and ``epsilon`` change the result.

    Returns
    -------
    result : relax.Call
        The tuple ``(mean, rstd)`` of vectors with an element for each channel, in float32 for half
        precision and otherwise in the dtype of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.batch_norm_statistics"),
        [data],
        batch_norm_attrs(axis, epsilon, center, scale, momentum, training=training),
    )


def layer_norm_statistics(
    data: relax.Expr,
    axes: int | Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Mean and reciprocal standard deviation over axes.

    Parameters
    ----------
    data : relax.Expr
        A floating-point tensor.
    axes, epsilon, center, scale
        As given to ``relax.op.nn.layer_norm``. Only ``axes`` and ``epsilon`` change the result.

    Returns
    -------
    result : relax.Call
        The tuple ``(mean, rstd)`` of tensors of the shape of ``data``, in which the axes have
        extent 1, in float32 for half precision and otherwise in the dtype of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.layer_norm_statistics"),
        [data],
        layer_norm_attrs(axes, epsilon, center, scale),
    )


def instance_norm_statistics(
    data: relax.Expr,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Mean and reciprocal standard deviation over axes, for ``instance_norm``.

    Parameters
    ----------
    data : relax.Expr
        A floating-point tensor.
    channel_axis, axes, epsilon, center, scale
        As given to ``relax.op.nn.instance_norm``. Only ``axes`` and ``epsilon`` change the result.

    Returns
    -------
    result : relax.Call
        As for ``layer_norm_statistics``.
    """
    return relax.Call(
        Op.get("relax.grad.instance_norm_statistics"),
        [data],
        instance_norm_attrs(channel_axis, axes, epsilon, center, scale),
    )


def group_norm_statistics(
    data: relax.Expr,
    num_groups: int,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
) -> relax.Call:
    """Mean and reciprocal standard deviation over axes and over groups of channels.

    Parameters
    ----------
    data : relax.Expr
        A floating-point tensor.
    num_groups, channel_axis, axes, epsilon, center, scale
        As given to ``relax.op.nn.group_norm``; ``center`` and ``scale`` do not change the result.

    Returns
    -------
    result : relax.Call
        As for ``layer_norm_statistics``. Each channel has the statistics of its group.
    """
    return relax.Call(
        Op.get("relax.grad.group_norm_statistics"),
        [data],
        group_norm_attrs(num_groups, channel_axis, axes, epsilon, center, scale=scale),
    )


def rms_norm_statistics(
    data: relax.Expr, axes: int | Sequence[int] = -1, epsilon: float = 1e-5
) -> relax.Call:
    """Reciprocal root mean square over axes: ``1 / sqrt(mean(data**2) + epsilon)``.

    Parameters
    ----------
    data : relax.Expr
        A floating-point tensor.
    axes, epsilon
        As given to ``relax.op.nn.rms_norm``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of ``data``, in which the axes have extent 1, in float32 for half
        precision and otherwise in the dtype of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.rms_norm_statistics"),
        [data],
        rms_norm_attrs(axes, epsilon),
    )


def deviation(bb: relax.BlockBuilder, variance: relax.Expr, epsilon: float) -> relax.Expr:
    """Return the standard deviation ``sqrt(variance + epsilon)`` as normalisations compute it.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder, which infers types.
    variance : relax.Expr
        A tensor of known dtype.
    epsilon : float
        The attribute of the normalisation.

    Returns
    -------
    result : relax.Expr
        A tensor of the type of ``variance``, which is not bound to a variable.
    """
    dtype = dtype_of(bb.normalize(variance).ty)
    return op.sqrt(op.add(variance, relax.const(float(epsilon), dtype)))


#: The builders, the type keys of their attributes, the attributes that name axes, and the inference
#: of types.
_OPERATORS = (
    (batch_norm_statistics, "BatchNormAttrs", ("axis",), infer_channel_statistics),
    (layer_norm_statistics, "LayerNormAttrs", ("axes",), infer_row_statistics),
    (
        instance_norm_statistics,
        "InstanceNormAttrs",
        ("channel_axis", "axes"),
        infer_instance_statistics,
    ),
    (group_norm_statistics, "GroupNormAttrs", ("channel_axis", "axes"), infer_group_statistics),
    (rms_norm_statistics, "RMSNormAttrs", ("axes",), infer_root_mean_square),
)

for _builder, _attrs, _axes, _infer in _OPERATORS:
    declare_op(
        _builder.__name__,
        [("data", "Tensor", "The normalized tensor.")],
        _infer,
        _builder,
        f"relax.attrs.{_attrs}",
    )
    _has_axes = _infer is not infer_channel_statistics
    follow_axis(f"relax.grad.{_builder.__name__}", axes=_axes, result=_has_axes)
