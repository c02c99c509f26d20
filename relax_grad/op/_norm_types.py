"""Type inference of the backward operators of the normalisations, and of the operators of their
statistics."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from ..ir.compat import dtype_of, shapes_may_differ
from ..ir.dtypes import accumulation_dtype
from ._infer import check_shape, tensor_type, type_of_shape

#: The extents of a tensor, each None if unknown.
Extents = list["tirx.PrimExpr | None"]


def infer_batch_norm_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of the data gradient of batch_norm: the data's."""
    data, shape = _check_data(call)
    if not call.attrs.training:
        raise ValueError(
            f"{call.op.name}: training must be True: with running statistics the gradient is "
            "gamma * rstd * output_grad"
        )
    channels = _channels(call, data, shape)
    for index in range(2, len(call.args)):
        _check_extents(call, index, channels)
    return data


def infer_batch_norm_backward_gamma(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of the gradient of gamma: an element for each channel, in the dtype of
    ``rstd``."""
    data, shape = _check_data(call)
    channels = _channels(call, data, shape)
    _check_extents(call, 2, channels)
    rstd = _check_extents(call, 3, channels)
    return _typed(channels, rstd)


def infer_instance_norm_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of the data gradient of instance_norm: the data's."""
    data, shape = _check_data(call)
    _check_extents(call, 2, [shape[_in_range(call, "channel_axis", call.attrs.channel_axis, data)]])
    for index in range(3, len(call.args)):
        _check_extents(call, index, _reduced(shape, _axes(call, data)))
    return data


def infer_instance_norm_backward_gamma(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of the gradient of gamma before it is summed over instances, in the dtype of
    ``rstd``."""
    data, shape = _check_data(call)
    _in_range(call, "channel_axis", call.attrs.channel_axis, data)
    reduced = _reduced(shape, _axes(call, data))
    _check_extents(call, 2, reduced)
    return _typed(reduced, _check_extents(call, 3, reduced))


def infer_over_axes_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of the data gradient of a normalization over the axes of gamma."""
    data, shape = _check_data(call)
    axes = _axes(call, data)
    _check_extents(call, 2, _take(shape, axes))
    for index in range(3, len(call.args)):
        _check_extents(call, index, _reduced(shape, axes))
    return data


def infer_over_axes_gamma(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of the gradient of gamma, for a normalization over its axes."""
    data, shape = _check_data(call)
    axes = _axes(call, data)
    for index in range(2, len(call.args)):  # the last one is rstd
        rstd = _check_extents(call, index, _reduced(shape, axes))
    return _typed(_take(shape, axes), rstd)


def infer_channel_statistics(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of mean and rstd of each channel."""
    data, shape = _float_data(call, 0)
    return relax.TupleType([_widened(_channels(call, data, shape), data)] * 2)


def infer_row_statistics(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of mean and rstd over axes, which have extent 1."""
    return relax.TupleType([infer_root_mean_square(call, ctx)] * 2)


def infer_instance_statistics(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of mean and rstd of each channel over axes, which have extent 1."""
    data, _ = _float_data(call, 0)
    _in_range(call, "channel_axis", call.attrs.channel_axis, data)
    return infer_row_statistics(call, ctx)


def infer_group_statistics(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of mean and rstd over axes, which have extent 1, and over groups of
    channels."""
    data, shape = _float_data(call, 0)
    axis, groups = call.attrs.channel_axis, int(call.attrs.num_groups)
    channel = _in_range(call, "channel_axis", axis, data)
    if channel in _axes(call, data):
        raise ValueError(
            f"{call.op.name}: axes must not contain the channel axis {axis} of data of "
            f"{data.ndim} dimensions, but they are {call.attrs.axes}"
        )
    channels = shape[channel]
    if groups < 1 or (isinstance(channels, tirx.IntImm) and int(channels) % groups):
        raise ValueError(
            f"{call.op.name}: num_groups must be positive and divide the channels of data, whose "
            f"type is {data}, but it is {groups}"
        )
    return infer_row_statistics(call, ctx)


def infer_root_mean_square(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Return the type of a statistic over axes, which have extent 1."""
    data, shape = _float_data(call, 0)
    return _widened(_reduced(shape, _axes(call, data)), data)


def _float_data(call: relax.Call, index: int) -> tuple[relax.TensorType, Extents]:
    """Return the type of the data, which is the argument at an index, and its extents, each None if
    unknown.

    Raises
    ------
    TypeError, ValueError
        If the rank of the data is unknown, or its dtype is not floating-point.
    """
    data = tensor_type(call, index, "data")
    if data.ndim < 0:
        raise ValueError(f"{call.op.name}: the rank of data must be known, but its type is {data}")
    if data.dtype is not None and "float" not in dtype_of(data):
        raise TypeError(f"{call.op.name}: data must be floating-point, but its type is {data}")
    known = isinstance(data.shape, relax.ShapeExpr)
    return data, list(data.shape.values) if known else [None] * data.ndim


def _check_data(call: relax.Call) -> tuple[relax.TensorType, Extents]:
    """Return the type of the data and its extents, each None if unknown.

    Raises
    ------
    TypeError, ValueError
        As for :func:`_float_data`, or if the output gradient has another shape or dtype.
    """
    output_grad = tensor_type(call, 0, "output_grad")
    data, extents = _float_data(call, 1)
    known = data.dtype is not None and output_grad.dtype is not None
    if known and dtype_of(data) != dtype_of(output_grad):
        raise TypeError(
            f"{call.op.name}: output_grad must have the dtype of data, {dtype_of(data)}, but its "
            f"type is {output_grad}"
        )
    check_shape(call, "output_grad", output_grad, data)
    return data, extents


def _channels(call: relax.Call, data: relax.TensorType, shape: Extents) -> Extents:
    return [shape[_in_range(call, "axis", call.attrs.axis, data)]]


def _axes(call: relax.Call, data: relax.TensorType) -> list[int]:
    axes = [_in_range(call, "axes", axis, data) for axis in call.attrs.axes]
    if len(set(axes)) != len(axes):
        raise ValueError(
            f"{call.op.name}: axes must differ from each other, but they are {call.attrs.axes}"
        )
    return axes


def _in_range(call: relax.Call, name: str, axis: int, data: relax.TensorType) -> int:
    """Return an axis counted from the start."""
    if not -data.ndim <= int(axis) < data.ndim:
        raise ValueError(
            f"{call.op.name}: {name} must lie in [{-data.ndim}, {data.ndim}) for data of "
            f"{data.ndim} dimensions, but it is {getattr(call.attrs, name)}"
        )
    return int(axis) % data.ndim


def _take(shape: Extents, axes: Sequence[int]) -> Extents:
    return [shape[axis] for axis in axes]


def _reduced(shape: Extents, axes: Sequence[int]) -> Extents:
    """Return the extents, with 1 for the axes."""
    return [tirx.const(1, "int64") if axis in axes else extent for axis, extent in enumerate(shape)]


def _typed(extents: Extents, like: relax.TensorType, dtype: str | None = None) -> relax.TensorType:
    """Return the type of a tensor of these extents, with the device of ``like`` and its dtype if
    None is given."""
    unknown = any(extent is None for extent in extents)  # `in` would compare expressions
    return type_of_shape(like, None if unknown else extents, len(extents), dtype)


def _widened(extents: Extents, like: relax.TensorType) -> relax.TensorType:
    """Return the type of a tensor of these extents, with the dtype that ``like`` is accumulated
    in."""
    dtype = None if like.dtype is None else accumulation_dtype(dtype_of(like))
    return _typed(extents, like, dtype)


def _check_extents(call: relax.Call, index: int, extents: Extents) -> relax.TensorType:
    """Return the type of an argument, after a check that its known extents are these.

    Raises
    ------
    TypeError, ValueError
        Names the operator and the argument, and the expected and the found extents.
    """
    name = call.op.arguments[index].name
    kind = tensor_type(call, index, name)
    if shapes_may_differ(kind, _typed(extents, kind)):
        expected = ", ".join(
            "?" if extent is None else str(getattr(extent, "value", extent)) for extent in extents
        )
        raise ValueError(
            f"{call.op.name}: {name} must have the shape ({expected}) for the data's "
            f"{call.args[1].ty}, but its type is {kind}"
        )
    return kind
