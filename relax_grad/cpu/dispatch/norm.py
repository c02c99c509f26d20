"""Kernels of the normalisations, of their statistics, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TypeAlias

from tvm import relax, tirx

from ..kernel.language.builder import Extent
from ..kernel.reduction import norm, norm_backward
from ..kernel.reduction.reduce import Channels
from .registry import CallSite, Kernel, Shape, kernel_for

#: The operators of rows whose mean is taken to be 0.
_ROOT_MEAN_SQUARE = (
    "relax.grad.rms_norm_statistics",
    "relax.grad.rms_norm_backward_data",
    "relax.grad.rms_norm_backward_weight",
)

#: The shortest rows that have a kernel: most lanes of a vector are unused with shorter ones.
_SHORTEST = 8

#: (outer, groups, channels of a group, inner), as :func:`_groups` returns them.
_Groups: TypeAlias = "tuple[Extent, Extent, int, Extent]"

#: Divides a shape into groups, given the attributes of the call.
_Split: TypeAlias = "Callable[[Shape, relax.op.op_attrs.Attrs], _Groups | None]"


@kernel_for("relax.nn.batch_norm")
def batch_norm(site: CallSite, statistics: Shape | None = None) -> Kernel | None:
    """Return the kernel of batch_norm in training; None in inference, where it is element-wise and
    is fused.

    With the shape of the statistics, the kernel returns them too.
    """
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args[:5])
    if shapes is None or not attrs.training:
        return None
    if (of := _channels(shapes[0], int(attrs.axis))) is None:
        return None
    of, shapes = _of_any_number(of, shapes, int(attrs.axis), of_images=True)
    generator = partial(
        norm.batch_norm,
        of,
        shapes[:2],
        site.cpu,
        float(attrs.epsilon),
        float(attrs.momentum),
        bool(attrs.center),
        bool(attrs.scale),
        statistics and [of.channels],
    )
    data, parameter = shapes[:2]
    results = [data, *[parameter] * (4 if statistics else 2)]
    return Kernel(generator, site.call.args, shapes=[*shapes, *results], rectifiable=True)


@kernel_for("relax.grad.batch_norm_backward_data")
def batch_norm_backward_data(site: CallSite) -> Kernel | None:
    """Return the kernel of the data gradient of batch_norm."""
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args[:7])
    if shapes is None or (of := _channels(shapes[1], int(attrs.axis))) is None:
        return None
    of, shapes = _of_any_number(of, shapes, int(attrs.axis))
    generator = partial(
        norm_backward.channel_norm_backward_data,
        of,
        [*shapes, shapes[1]],
        site.cpu,
        of.channels,
        of.outer * of.inner,
        bool(attrs.scale),
    )
    return Kernel(generator, site.call.args, shapes=[*shapes, shapes[1]])


@kernel_for("relax.grad.batch_norm_backward_gamma")
def batch_norm_backward_gamma(site: CallSite, beta: Shape | None = None) -> Kernel | None:
    """Return the kernel of the gradient of gamma; with the shape of beta, it returns the gradient
    of beta too."""
    shapes = site.shapes(*site.call.args[:4])
    axis = int(site.call.attrs.axis)
    if shapes is None or (of := _channels(shapes[1], axis)) is None:
        return None
    of, shapes = _of_any_number(of, shapes, axis)
    taken, result = [*shapes, shapes[-1]], shapes[-1:]
    generator = partial(
        norm_backward.channel_norm_backward_gamma,
        of,
        taken,
        site.cpu,
        beta=beta and [of.channels],
    )
    return Kernel(generator, site.call.args, shapes=[*taken, *(result if beta else [])])


@kernel_for("relax.nn.instance_norm")
def instance_norm(site: CallSite, statistics: Shape | None = None) -> Kernel | None:
    """Return the kernel of instance_norm, which normalises each channel over all axes after the
    channel axis.

    With the shape of the statistics, the kernel returns them too.
    """
    return _of_groups(site, "instance_norm", _each_channel, statistics)


@kernel_for("relax.nn.group_norm")
def group_norm(site: CallSite, statistics: Shape | None = None) -> Kernel | None:
    """Return the kernel of group_norm, which normalises groups of channels over all axes after the
    channel axis.

    With the shape of the statistics, the kernel returns them too.
    """
    return _of_groups(site, "group_norm", _groups, statistics)


def _of_groups(site: CallSite, name: str, split: _Split, statistics: Shape | None) -> Kernel | None:
    """Return the kernel of a normalisation of groups of channels, which ``split`` finds in a
    shape."""
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args[:3])
    if shapes is None or (sizes := split(shapes[0], attrs)) is None:
        return None
    outer, groups, size, inner = sizes
    generator = partial(
        norm.row_norm,
        outer * groups,
        size,
        inner,
        shapes,
        site.cpu,
        float(attrs.epsilon),
        groups,
        bool(attrs.center),
        bool(attrs.scale),
        name,
        statistics,
        size,
    )
    return Kernel(generator, site.call.args, rectifiable=True)


@kernel_for("relax.grad.batch_norm_statistics")
def batch_norm_statistics(site: CallSite) -> Kernel | None:
    """Return the kernel of the statistics of each channel."""
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args[:1])
    if shapes is None or (of := _channels(shapes[0], int(attrs.axis))) is None:
        return None
    of, (data,) = _of_any_number(of, shapes, int(attrs.axis))
    result = [of.channels]
    generator = partial(norm.statistics, of, (data, result), site.cpu, float(attrs.epsilon))
    return Kernel(generator, site.call.args, shapes=[data, result, result])


@kernel_for("relax.grad.layer_norm_statistics", "relax.grad.rms_norm_statistics")
def row_statistics(site: CallSite) -> Kernel | None:
    """Return the kernel of the statistics of layer_norm or rms_norm."""
    shapes = site.shapes(*site.call.args[:1])
    if shapes is None or (split := _rows(shapes[0], site.call.attrs.axes)) is None:
        return None
    return _statistics(site, shapes[0], *split, center=_is_centered(site.call))


@kernel_for("relax.grad.instance_norm_statistics")
def instance_norm_statistics(site: CallSite) -> Kernel | None:
    """Return the kernel of the statistics of instance_norm."""
    return _group_statistics(site, _each_channel)


@kernel_for("relax.grad.group_norm_statistics")
def group_norm_statistics(site: CallSite) -> Kernel | None:
    """Return the kernel of the statistics of group_norm."""
    return _group_statistics(site, _groups)


def _group_statistics(site: CallSite, split: _Split) -> Kernel | None:
    """Return the kernel of the statistics of groups of channels, which ``split`` finds in a
    shape."""
    shapes = site.shapes(*site.call.args[:1])
    if shapes is None or (sizes := split(shapes[0], site.call.attrs)) is None:
        return None
    outer, groups, size, inner = sizes
    return _statistics(site, shapes[0], outer * groups, size * inner, copies=size)


def _statistics(
    site: CallSite, data: Shape, rows: Extent, columns: Extent, center: bool = True, copies: int = 1
) -> Kernel | None:
    """Return the kernel of the statistics of rows."""
    kind = site.call.ty.fields[0] if center else site.call.ty
    result = site.extents(kind)
    if result is None:
        return None
    generator = partial(
        norm.statistics,
        Channels(1, rows, columns),
        (data, result),
        site.cpu,
        float(site.call.attrs.epsilon),
        center,
        copies,
    )
    return Kernel(generator, site.call.args)


@kernel_for("relax.grad.instance_norm_backward_data")
def instance_norm_backward_data(site: CallSite) -> Kernel | None:
    """Return the kernel of the data gradient of instance_norm."""
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args[:7])
    if shapes is None or (split := _instances(shapes[1], attrs)) is None:
        return None
    outer, channels, inner = split
    generator = partial(
        norm_backward.channel_norm_backward_data,
        Channels(1, outer * channels, inner),
        [*shapes, shapes[1]],
        site.cpu,
        channels,
        inner,
        bool(attrs.scale),
        "instance_norm_backward_data",
    )
    return Kernel(generator, site.call.args)


@kernel_for("relax.grad.instance_norm_backward_gamma")
def instance_norm_backward_gamma(site: CallSite, beta: Shape | None = None) -> Kernel | None:
    """Return the kernel of the gradient of gamma; with the shape of beta, it returns the gradient
    of beta too."""
    shapes = site.shapes(*site.call.args[:4])
    if shapes is None or (split := _instances(shapes[1], site.call.attrs)) is None:
        return None
    outer, channels, inner = split
    generator = partial(
        norm_backward.channel_norm_backward_gamma,
        Channels(1, outer * channels, inner),
        [*shapes, shapes[-1]],
        site.cpu,
        "instance_norm_backward_gamma",
        beta,
    )
    return Kernel(generator, site.call.args)


@kernel_for("relax.nn.layer_norm")
def layer_norm(site: CallSite, statistics: Shape | None = None) -> Kernel | None:
    """Return the kernel of layer_norm; with the shape of the statistics, the kernel returns them
    too."""
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args[:3])
    if shapes is None or (split := _rows(shapes[0], attrs.axes)) is None:
        return None
    rows, columns = split
    generator = partial(
        norm.row_norm,
        rows,
        columns,
        1,
        shapes,
        site.cpu,
        float(attrs.epsilon),
        center=bool(attrs.center),
        scale=bool(attrs.scale),
        statistics=statistics,
    )
    return Kernel(generator, site.call.args, rectifiable=True)


@kernel_for("relax.nn.rms_norm")
def rms_norm(site: CallSite, statistics: Shape | None = None) -> Kernel | None:
    """Return the kernel of rms_norm; with the shape of the statistics, the kernel returns them
    too."""
    shapes = site.shapes(*site.call.args[:2])
    if shapes is None or (split := _rows(shapes[0], site.call.attrs.axes)) is None:
        return None
    epsilon = float(site.call.attrs.epsilon)
    generator = partial(norm.rms_norm, *split, shapes, site.cpu, epsilon, statistics)
    return Kernel(generator, site.call.args)


@kernel_for("relax.grad.layer_norm_backward_data", "relax.grad.rms_norm_backward_data")
def row_norm_backward_data(site: CallSite) -> Kernel | None:
    """Return the kernel of the data gradient of layer_norm or rms_norm."""
    attrs, shapes = site.call.attrs, site.shapes(*site.call.args)
    if shapes is None or (split := _rows(shapes[1], attrs.axes)) is None:
        return None
    generator = partial(
        norm_backward.row_norm_backward_data,
        *split,
        [*shapes, shapes[1]],
        site.cpu,
        centered=_is_centered(site.call),
        scale=bool(getattr(attrs, "scale", True)),
    )
    return Kernel(generator, site.call.args)


@kernel_for("relax.grad.layer_norm_backward_gamma", "relax.grad.rms_norm_backward_weight")
def row_norm_backward_gamma(site: CallSite, beta: Shape | None = None) -> Kernel | None:
    """Return the kernel of the gradient of gamma; with the shape of beta, it returns the gradient
    of beta too."""
    shapes = site.shapes(*site.call.args)
    result = site.shape(site.call)
    if shapes is None or result is None:
        return None
    split = _rows(shapes[1], site.call.attrs.axes)
    if split is None or not isinstance(split[1], int):
        return None
    centered = _is_centered(site.call)
    generator = partial(
        norm_backward.row_norm_backward_gamma, *split, [*shapes, result], site.cpu, centered, beta
    )
    return Kernel(generator, site.call.args)


def _is_centered(call: relax.Call) -> bool:
    """Tell whether a normalisation of rows subtracts the mean."""
    return call.op.name not in _ROOT_MEAN_SQUARE


def _channels(shape: Shape, axis: int) -> Channels | None:
    """Return the data as channels along an axis; None if the rows of the channels are too short."""
    axis %= len(shape)
    inner = prod(shape[axis + 1 :])
    if isinstance(inner, int) and inner < _SHORTEST:
        return None
    return Channels(prod(shape[:axis]), shape[axis], inner)


def _of_any_number(
    of: Channels, shapes: list[Shape], axis: int, *, of_images: bool = False
) -> tuple[Channels, list[Shape]]:
    """Return the channels and the shapes of their tensors with a symbolic number of channels, and
    with ``of_images`` also of images, if there are several.

    Calls that differ only in these numbers share a kernel, which reads them from its arguments. The
    code for a constant number of channels is the same, because vectors run along a channel. LLVM
    repeats the code of a row for each of a constant number of images, and gains nothing by it.
    """
    channels, images = tirx.Var("channels", "int32"), tirx.Var("images", "int32")
    changed = [[*shape] for shape in shapes]
    has_several = of_images and axis == 1 and isinstance(of.outer, int) and of.outer > 1
    for shape in changed:
        shape[axis if len(shape) > 1 else 0] = channels
        if has_several and len(shape) > 1:
            shape[0] = images
    return replace(of, channels=channels, outer=images if has_several else of.outer), changed


def _instances(
    shape: Shape, attrs: relax.op.op_attrs.Attrs
) -> tuple[Extent, Extent, Extent] | None:
    """Return (outer, channels, inner) if the axes are exactly those after the channel axis, else
    None.

    The result is also None if ``inner`` is too short.
    """
    channel = int(attrs.channel_axis) % len(shape)
    axes = sorted(int(axis) % len(shape) for axis in attrs.axes)
    inner = prod(shape[channel + 1 :])
    if axes != list(range(channel + 1, len(shape))):
        return None
    if isinstance(inner, int) and inner < _SHORTEST:
        return None
    return prod(shape[:channel]), shape[channel], inner


def _each_channel(shape: Shape, attrs: relax.op.op_attrs.Attrs) -> _Groups | None:
    """Return (outer, channels, 1, inner) as :func:`_groups` does: each channel is a group."""
    split = _instances(shape, attrs)
    return split and (split[0], split[1], 1, split[2])


def _groups(shape: Shape, attrs: relax.op.op_attrs.Attrs) -> _Groups | None:
    """Return (outer, groups, channels of a group, inner) as :func:`_instances` does.

    The result is also None if the groups do not divide the channels.
    """
    split = _instances(shape, attrs)
    if split is None:
        return None
    outer, channels, inner = split
    groups = int(attrs.num_groups)
    if not isinstance(channels, int) or channels % groups:
        return None
    return outer, groups, channels // groups, inner


def _rows(shape: Shape, axes: Sequence) -> tuple[Extent, Extent] | None:
    """Return (rows, columns) if the axes are the last ones in ascending order, else None."""
    first = len(shape) - len(axes)
    if [int(axis) % len(shape) for axis in axes] != list(range(first, len(shape))) or not axes:
        return None
    return prod(shape[:first]), prod(shape[first:])
