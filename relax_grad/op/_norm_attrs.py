"""The attributes of the normalisations.

The operators of their statistics and of their gradients have the same attributes. Each function
takes the attributes as the builder in ``relax.op.nn`` does, without the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm.relax.op import nn

from ._infer import unused


def batch_norm_attrs(
    axis: int, epsilon: float, center: bool, scale: bool, momentum: float, training: bool
) -> tvm.ir.Attrs:
    """Return the attributes of ``batch_norm``."""
    return nn.batch_norm(*[unused()] * 5, axis, epsilon, center, scale, momentum, training).attrs


def layer_norm_attrs(
    axes: int | Sequence[int], epsilon: float, center: bool, scale: bool
) -> tvm.ir.Attrs:
    """Return the attributes of ``layer_norm``."""
    return nn.layer_norm(*[unused()] * 3, axes, epsilon, center, scale).attrs


def instance_norm_attrs(
    channel_axis: int, axes: Sequence[int], epsilon: float, center: bool, scale: bool
) -> tvm.ir.Attrs:
    """Return the attributes of ``instance_norm``."""
    return nn.instance_norm(*[unused()] * 3, channel_axis, axes, epsilon, center, scale).attrs


def group_norm_attrs(
    num_groups: int,
    channel_axis: int,
    axes: Sequence[int],
    epsilon: float,
    center: bool,
    scale: bool,
) -> tvm.ir.Attrs:
    """Return the attributes of ``group_norm``."""
    return nn.group_norm(
        *[unused()] * 3, num_groups, channel_axis, axes, epsilon, center, scale
    ).attrs


def rms_norm_attrs(axes: int | Sequence[int], epsilon: float) -> tvm.ir.Attrs:
    """Return the attributes of ``rms_norm``."""
    return nn.rms_norm(unused(), unused(), axes, epsilon).attrs
