"""The backward operators of the normalisations.

They take the statistics of the data as arguments, as the libraries' primitives do: ``mean`` and ``rstd``,
which is ``1 / sqrt(variance + epsilon)``. So those of the data and of gamma share them, and each reads the
large tensors once or twice and writes nothing of their size but its result. The gradient of beta is a plain
sum of the output gradient, which has no need of an operator.

Half precision is computed in float32; the statistics of it are best given in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import Op

from .._compat import dtype_of, shapes_differ
from ._declare import Shape, as_shape, check_shape, declare_op, shape_values, tensor_type
from ._layout import follow_axis, follow_elementwise


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
        The gradients with respect to the mean and the biased variance of each channel. With the sums ``t``
        of ``output_grad`` and ``u`` of ``output_grad * (data - mean) * rstd``, which are the gradients of
        beta and gamma as well, the normalized data contributes ``-gamma * rstd * t`` and ``-gamma *
        rstd**2 * u / 2``; the running statistics contribute too if their results are used.
    axis, epsilon, center, scale, momentum, training
        As given to ``relax.op.nn.batch_norm``; ``scale=False`` ignores ``gamma``. Without ``training`` the
        gradient is ``gamma * rstd * output_grad``, which needs no operator.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``.
    """
    return relax.Call(
        Op.get("relax.grad.batch_norm_backward_data"),
        [output_grad, data, gamma, mean, rstd, mean_grad, variance_grad],
        _batch_norm_attrs(axis, epsilon, center, scale, momentum, training),
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

    The sum of ``output_grad * (data - mean) * rstd`` over each channel.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the normalized data.
    data : relax.Expr
        As given to ``relax.op.nn.batch_norm``.
    mean, rstd : relax.Expr
        The mean that is subtracted in each channel, and ``1 / sqrt(variance + epsilon)``.
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
        _batch_norm_attrs(axis, epsilon, center, scale, momentum, training),
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

    ``rstd * (g - average(g) - z * average(g * z))`` with ``g = gamma * output_grad`` and ``z = (data -
    mean) * rstd``, the averages over the axes.

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
        _layer_norm_attrs(axes, epsilon, center, scale),
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

    The sum of ``output_grad * (data - mean) * rstd`` over all but the axes.

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
        _layer_norm_attrs(axes, epsilon, center, scale),
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

    ``rstd * (g - z * average(g * z))`` with ``g = weight * output_grad`` and ``z = data * rstd``, the
    average over the axes.

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
        relax.op.nn.rms_norm(_UNUSED, _UNUSED, axes, epsilon).attrs,
    )


def rms_norm_backward_weight(
    output_grad: relax.Expr,
    data: relax.Expr,
    rstd: relax.Expr,
    axes: int | Sequence[int] = -1,
    epsilon: float = 1e-5,
) -> relax.Call:
    """Gradient of rms_norm with respect to its weight.

    The sum of ``output_grad * data * rstd`` over all but the axes.

    Parameters
    ----------
    output_grad, data, rstd, axes, epsilon
        As for ``rms_norm_backward_data``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of the weight, which has the axes in the order given, and of the dtype of
        ``rstd``.
    """
    return relax.Call(
        Op.get("relax.grad.rms_norm_backward_weight"),
        [output_grad, data, rstd],
        relax.op.nn.rms_norm(_UNUSED, _UNUSED, axes, epsilon).attrs,
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
        epsilon)``. For ``group_norm``, those of the group stand for each of its channels.
    mean_grad, variance_grad : relax.Expr
        The gradients with respect to mean and biased variance, as for ``batch_norm_backward_data``. For
        ``group_norm``, the average over the channels of the group stands for each of them.
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
        _instance_norm_attrs(channel_axis, axes, epsilon, center, scale),
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

    The sum of ``output_grad * (data - mean) * rstd`` over the axes. That of gamma is the sum of it over the
    instances; the gradient of the data needs it for each of them.

    Parameters
    ----------
    output_grad, data, mean, rstd, channel_axis, axes, epsilon, center, scale
        As for ``instance_norm_backward_data``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of ``data``, in which the axes have extent 1, and of the dtype of ``rstd``.
    """
    return relax.Call(
        Op.get("relax.grad.instance_norm_backward_gamma"),
        [output_grad, data, mean, rstd],
        _instance_norm_attrs(channel_axis, axes, epsilon, center, scale),
    )


def divide_by_count(
    data: relax.Expr, of_shape: relax.Expr | Shape, axis: int | Sequence[int] | None = None
) -> relax.Call:
    """Divide by the number of elements that a tensor of the given shape has along the axes.

    A sum becomes a mean without a constant for the number, which there is none of for a symbolic
    extent, and without a pass over the tensor to count it.

    Parameters
    ----------
    data : relax.Expr
        What to divide.
    of_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape to count in.
    axis : int or Sequence[int], optional
        The axes to count along; by default all of them.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and the dtype of ``data``; half precision is divided in float32.
    """
    return relax.Call(
        Op.get("relax.grad.divide_by_count"),
        [data, as_shape(of_shape)],
        relax.op.squeeze(_UNUSED, axis).attrs,
    )


#: The extents of a tensor, each None where it is not known.
Extents = list["tirx.PrimExpr | None"]

#: Stands for the arguments of a forward operator of which only the attributes are wanted.
_UNUSED = relax.Var("unused", relax.TensorType(dtype="float32"))


def _batch_norm_attrs(axis, epsilon, center, scale, momentum, training) -> tvm.ir.Attrs:
    return relax.op.nn.batch_norm(
        *[_UNUSED] * 5, axis, epsilon, center, scale, momentum, training
    ).attrs


def _layer_norm_attrs(axes, epsilon, center, scale) -> tvm.ir.Attrs:
    return relax.op.nn.layer_norm(*[_UNUSED] * 3, axes, epsilon, center, scale).attrs


def _instance_norm_attrs(channel_axis, axes, epsilon, center, scale) -> tvm.ir.Attrs:
    return relax.op.nn.instance_norm(
        *[_UNUSED] * 3, channel_axis, axes, epsilon, center, scale
    ).attrs


def _infer_batch_norm_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
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


def _infer_batch_norm_backward_gamma(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, shape = _check_data(call)
    channels = _channels(call, data, shape)
    _check_extents(call, 2, channels)
    rstd = _check_extents(call, 3, channels)
    return _typed(channels, rstd)


def _infer_instance_norm_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, shape = _check_data(call)
    _check_extents(call, 2, [shape[_in_range(call, "channel_axis", call.attrs.channel_axis, data)]])
    for index in range(3, len(call.args)):
        _check_extents(call, index, _reduced(shape, _axes(call, data)))
    return data


def _infer_instance_norm_backward_gamma(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, shape = _check_data(call)
    _in_range(call, "channel_axis", call.attrs.channel_axis, data)
    reduced = _reduced(shape, _axes(call, data))
    _check_extents(call, 2, reduced)
    return _typed(reduced, _check_extents(call, 3, reduced))


def _infer_over_axes_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """The type of the gradient of the data, for a normalization over the axes that gamma has."""
    data, shape = _check_data(call)
    axes = _axes(call, data)
    _check_extents(call, 2, _take(shape, axes))
    for index in range(3, len(call.args)):
        _check_extents(call, index, _reduced(shape, axes))
    return data


def _infer_over_axes_gamma(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """The type of the gradient of gamma, for a normalization over the axes that it has."""
    data, shape = _check_data(call)
    axes = _axes(call, data)
    for index in range(2, len(call.args)):  # of which rstd is the last
        rstd = _check_extents(call, index, _reduced(shape, axes))
    return _typed(_take(shape, axes), rstd)


def _check_data(call: relax.Call) -> tuple[relax.TensorType, Extents]:
    """Return the type of the data and its extents, each None where it is not known.

    Raises
    ------
    TypeError, ValueError
        If the data has no known rank or is not of floating-point numbers, or if the output gradient is of
        another shape or dtype.
    """
    output_grad, data = tensor_type(call, 0, "output_grad"), tensor_type(call, 1, "data")
    if data.ndim < 0:
        raise ValueError(f"{call.op.name}: the rank of data must be known, but its type is {data}")
    if data.dtype is not None and "float" not in dtype_of(data):
        raise TypeError(f"{call.op.name}: data must be floating-point, but its type is {data}")
    known = data.dtype is not None and output_grad.dtype is not None
    if known and dtype_of(data) != dtype_of(output_grad):
        raise TypeError(
            f"{call.op.name}: output_grad must have the dtype of data, {dtype_of(data)}, but its type is "
            f"{output_grad}"
        )
    check_shape(call, "output_grad", output_grad, data)
    if not isinstance(data.shape, relax.ShapeExpr):
        return data, [None] * data.ndim
    return data, list(data.shape.values)


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
            f"{call.op.name}: {name} must lie in [{-data.ndim}, {data.ndim}) for data of {data.ndim} "
            f"dimensions, but it is {getattr(call.attrs, name)}"
        )
    return int(axis) % data.ndim


def _take(shape: Extents, axes: Sequence[int]) -> Extents:
    return [shape[axis] for axis in axes]


def _reduced(shape: Extents, axes: Sequence[int]) -> Extents:
    """The extents with those of the axes 1."""
    return [tirx.const(1, "int64") if axis in axes else extent for axis, extent in enumerate(shape)]


def _typed(extents: Extents, like: relax.TensorType) -> relax.TensorType:
    """A tensor of these extents, of the dtype and on the device of another."""
    unknown = any(extent is None for extent in extents)  # `in` would compare expressions
    of_shape = {"ndim": len(extents)} if unknown else {"shape": extents}
    return relax.TensorType(**of_shape, dtype=like.dtype, vdevice=like.vdevice)


def _check_extents(call: relax.Call, index: int, extents: Extents) -> relax.TensorType:
    """Return the type of an argument, whose extents must not provably differ from these.

    Raises
    ------
    TypeError, ValueError
        Names the operator and the argument, and says what was expected and found.
    """
    name = call.op.arguments[index].name
    found = tensor_type(call, index, name)
    if shapes_differ(found, _typed(extents, found)):
        expected = ", ".join(
            "?" if extent is None else str(getattr(extent, "value", extent)) for extent in extents
        )
        raise ValueError(
            f"{call.op.name}: {name} must have the shape ({expected}) for the data's "
            f"{call.args[1].ty}, but its type is {found}"
        )
    return found


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
        ("data", "Tensor", "What to divide."),
        ("of_shape", "Shape", "The shape to count in."),
    ],
    _infer_divide_by_count,
    divide_by_count,
    "relax.attrs.SqueezeAttrs",
)

_GRAD = ("output_grad", "Tensor", "The gradient with respect to the normalized data.")
_DATA = ("data", "Tensor", "What is normalized.")
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
    _infer_instance_norm_backward_data,
    instance_norm_backward_data,
    "relax.attrs.InstanceNormAttrs",
)
declare_op(
    "instance_norm_backward_gamma",
    [_GRAD, _DATA, _MEAN, _RSTD],
    _infer_instance_norm_backward_gamma,
    instance_norm_backward_gamma,
    "relax.attrs.InstanceNormAttrs",
)
declare_op(
    "batch_norm_backward_data",
    [_GRAD, _DATA, _GAMMA, _MEAN, _RSTD, *_STATISTICS_GRADS],
    _infer_batch_norm_backward_data,
    batch_norm_backward_data,
    "relax.attrs.BatchNormAttrs",
)
declare_op(
    "batch_norm_backward_gamma",
    [_GRAD, _DATA, _MEAN, _RSTD],
    _infer_batch_norm_backward_gamma,
    batch_norm_backward_gamma,
    "relax.attrs.BatchNormAttrs",
)
declare_op(
    "layer_norm_backward_data",
    [_GRAD, _DATA, _GAMMA, _MEAN, _RSTD],
    _infer_over_axes_data,
    layer_norm_backward_data,
    "relax.attrs.LayerNormAttrs",
)
declare_op(
    "layer_norm_backward_gamma",
    [_GRAD, _DATA, _MEAN, _RSTD],
    _infer_over_axes_gamma,
    layer_norm_backward_gamma,
    "relax.attrs.LayerNormAttrs",
)
declare_op(
    "rms_norm_backward_data",
    [_GRAD, _DATA, ("weight", "Tensor", "The factors."), _RSTD],
    _infer_over_axes_data,
    rms_norm_backward_data,
    "relax.attrs.RMSNormAttrs",
)
declare_op(
    "rms_norm_backward_weight",
    [_GRAD, _DATA, _RSTD],
    _infer_over_axes_gamma,
    rms_norm_backward_weight,
    "relax.attrs.RMSNormAttrs",
)

# The axes are those of the shape, which stays as it is.
follow_elementwise("relax.grad.divide_by_count")
follow_axis("relax.grad.batch_norm_backward_data", full=(0, 1))
follow_axis("relax.grad.batch_norm_backward_gamma", full=(0, 1), result=False)
_CHANNEL_AND_AXES = ("channel_axis", "axes")
follow_axis(
    "relax.grad.instance_norm_backward_data", full=(0, 1, 3, 4, 5, 6), axes=_CHANNEL_AND_AXES
)
follow_axis("relax.grad.instance_norm_backward_gamma", full=(0, 1, 2, 3), axes=_CHANNEL_AND_AXES)
# Gamma keeps its order, which is that of the attribute.
follow_axis("relax.grad.layer_norm_backward_data", full=(0, 1, 3, 4), axes=("axes",))
follow_axis("relax.grad.layer_norm_backward_gamma", full=(0, 1, 2, 3), axes=("axes",), result=False)
follow_axis("relax.grad.rms_norm_backward_data", full=(0, 1, 3), axes=("axes",))
follow_axis("relax.grad.rms_norm_backward_weight", full=(0, 1, 2), axes=("axes",), result=False)
