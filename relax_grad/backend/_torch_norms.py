"""The normalisations of the library "torch", forward and backward.

The arguments of a function are described in :mod:`relax_grad.backend.primitives`. Half precision is
computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ._torch_function import Function, in_float32

__all__ = ["FUNCTIONS"]


def _copy(results: Sequence, values: Sequence) -> None:
    for result, value in zip(results, values, strict=True):
        if value is not None:
            result.copy_(value.reshape(result.shape))


def _like(data: Any, *parameters: Any) -> list:
    """Return factors and offsets in the dtype of the data."""
    return [each.to(data.dtype) for each in parameters]


# Batch normalisation.


def _batch_norm(torch: Any, given: Sequence, results: Sequence) -> None:
    """Normalize channels; the third to fifth result, if there are any, are the statistics."""
    data, gamma, beta, moving_mean, moving_var, axis, training, *rest = given
    scale, center, epsilon, momentum = rest
    (data,) = in_float32(torch, [data])
    data, result = data.movedim(axis, 1), results[0].movedim(axis, 1)
    gamma, beta, moving_mean, moving_var = (
        each.to(_wide(torch, data)) for each in (gamma, beta, moving_mean, moving_var)
    )
    factors = gamma if scale else None, beta if center else None
    if not training:
        normalized, _, _ = torch.ops.aten.native_batch_norm(
            data, *factors, moving_mean, moving_var, False, momentum, epsilon
        )
        result.copy_(normalized)
        _copy(results[1:], (moving_mean, moving_var))
        return
    # With a momentum of 1, they become the statistics of the batch.
    mean, variance = torch.zeros_like(moving_mean), torch.zeros_like(moving_var)
    normalized, mean, rstd = torch.ops.aten.native_batch_norm(
        data, *factors, mean, variance, True, 1.0, epsilon
    )
    result.copy_(normalized)
    count = data.numel() // data.shape[1]
    # PyTorch's variance is unbiased.
    variance = variance * ((count - 1) / count) if count > 1 else torch.zeros_like(variance)
    kept = 1 - momentum
    moving = (moving_mean * kept + mean * momentum, moving_var * kept + variance * momentum)
    _copy(results[1:3], moving)
    if len(results) > 3:
        _copy(results[3:], (mean, rstd))


def _wide(torch: Any, data: Any) -> Any:
    """Return the dtype of statistics."""
    return torch.float64 if data.dtype == torch.float64 else torch.float32


def _batch_norm_statistics(torch: Any, given: Sequence, results: Sequence) -> None:
    data, axis, _, _, _, epsilon, _ = given
    axes = [each for each in range(data.ndim) if each != axis]
    _statistics(torch, data, axes, epsilon, results)


def _statistics(
    torch: Any, data: Any, axes: Sequence[int], epsilon: float, results: Sequence
) -> None:
    wide = data.to(_wide(torch, data))
    if axes:
        variance, mean = torch.var_mean(wide, list(axes), correction=0, keepdim=True)
    else:
        variance, mean = torch.zeros_like(wide), wide
    _copy(results, (mean, torch.rsqrt(variance + epsilon)))


def _batch_norm_gradients(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, data, gamma, mean, rstd, axis, _, scale, _, epsilon, _, *mask = given
    output_grad, data = in_float32(torch, [output_grad, data])
    output_grad, data = output_grad.movedim(axis, 1), data.movedim(axis, 1)
    wide = _wide(torch, data)
    gradients = torch.ops.aten.native_batch_norm_backward(
        output_grad,
        data,
        gamma.to(wide) if scale else None,
        None,
        None,
        mean.to(wide),
        rstd.to(wide),
        True,
        epsilon,
        [True, *map(bool, mask)],
    )
    results[0].movedim(axis, 1).copy_(gradients[0])
    # Without factors, PyTorch returns no gradient of them.
    if gradients[1] is None and mask[0]:
        gradients = (gradients[0], _twist(data, output_grad, mean, rstd), gradients[2])
    _copy(results[1:], gradients[1:])


def _twist(data: Any, output_grad: Any, mean: Any, rstd: Any) -> Any:
    """Return the sum of the gradient times the normalized data, for each channel (axis 1)."""
    axes = [axis for axis in range(data.ndim) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(data.ndim)]
    normalized = (data - mean.reshape(shape)) * rstd.reshape(shape)
    return (output_grad * normalized).sum(axes)


def _batch_norm_backward_gamma(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, data, mean, rstd, axis, *_ = given
    output_grad, data = in_float32(torch, [output_grad, data])
    mean, rstd = (each.to(_wide(torch, data)) for each in (mean, rstd))
    ones = torch.ones_like(mean)
    _, gradient, _ = torch.ops.aten.native_batch_norm_backward(
        output_grad.movedim(axis, 1),
        data.movedim(axis, 1),
        ones,
        None,
        None,
        mean,
        rstd,
        True,
        0.0,
        [False, True, False],
    )
    _copy(results, [gradient])


# Normalisations of the last axes.


def _layer_norm(torch: Any, given: Sequence, results: Sequence) -> None:
    """Normalize rows; the second and third result, if there are any, are the statistics."""
    data, gamma, beta, count, scale, center, epsilon = given
    (data,) = in_float32(torch, [data])
    gamma, beta = _like(data, gamma, beta)
    factors = gamma if scale else None, beta if center else None
    shape = data.shape[data.ndim - count :]
    values = torch.ops.aten.native_layer_norm(data, shape, *factors, epsilon)
    _copy(results, values[: len(results)])


def _layer_norm_statistics(torch: Any, given: Sequence, results: Sequence) -> None:
    data, count, _, _, epsilon = given
    _statistics(torch, data, range(data.ndim - count, data.ndim), epsilon, results)


def _layer_norm_gradients(
    mask: Sequence[bool] | None, torch: Any, given: Sequence, results: Sequence
) -> None:
    if mask is None:
        output_grad, data, gamma, mean, rstd, count, scale, _, _, *flags = given
        mask = [True, *map(bool, flags)]
    elif mask[0]:
        output_grad, data, gamma, mean, rstd, count, scale, _, _ = given
    else:
        output_grad, data, mean, rstd, count, scale, _, _ = given
        gamma = data.new_ones(data.shape[data.ndim - count :])
    output_grad, data = in_float32(torch, [output_grad, data])
    (gamma,) = _like(data, gamma)
    wide = _wide(torch, data)
    gradients = torch.ops.aten.native_layer_norm_backward(
        output_grad,
        data,
        data.shape[data.ndim - count :],
        mean.to(wide),
        rstd.to(wide),
        gamma if scale or not mask[0] else torch.ones_like(gamma),
        torch.zeros_like(gamma),
        list(mask),
    )
    wanted = gradients if len(results) == len(gradients) else (gradients[mask.index(True)],)
    _copy(results, wanted)


def _rms_norm(torch: Any, given: Sequence, results: Sequence) -> None:
    """Normalize rows; the second result, if there is one, is the statistic."""
    data, weight, count, _, _, epsilon = given
    (data,) = in_float32(torch, [data])
    (weight,) = _like(data, weight)
    shape = data.shape[data.ndim - count :]
    if hasattr(torch.ops.aten, "_fused_rms_norm"):
        values = torch.ops.aten._fused_rms_norm(data, shape, weight, epsilon)
    else:
        values = torch.nn.functional.rms_norm(data, shape, weight, epsilon), None
    if len(results) > 1 and values[1] is None:
        _rms_norm_statistics(torch, [data, count, 1, 1, epsilon], results[1:])
    _copy(results, values[: len(results)])


def _rms_norm_statistics(torch: Any, given: Sequence, results: Sequence) -> None:
    data, count, _, _, epsilon = given
    wide = data.to(_wide(torch, data))
    axes = list(range(data.ndim - count, data.ndim))
    _copy(results, [torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)])


def _rms_norm_gradients(
    mask: tuple[bool, bool], torch: Any, given: Sequence, results: Sequence
) -> None:
    if mask[0]:
        output_grad, data, weight, rstd, count, _, _, _ = given
    else:
        output_grad, data, rstd, count, _, _, _ = given
        weight = data.new_ones(data.shape[data.ndim - count :])
    output_grad, data = in_float32(torch, [output_grad, data])
    (weight,) = _like(data, weight)
    rstd = rstd.to(_wide(torch, data))
    shape = data.shape[data.ndim - count :]
    if data.device.type == "cuda" and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        gradients = torch.ops.aten._fused_rms_norm_backward(
            output_grad, data, shape, rstd, weight, list(mask)
        )
    else:
        gradients = _rms_norm_composed(output_grad, data, weight, rstd, count)
    _copy(results, [each for each, wanted in zip(gradients, mask, strict=True) if wanted])


def _rms_norm_composed(
    output_grad: Any, data: Any, weight: Any, rstd: Any, count: int
) -> tuple[Any, Any]:
    """Return the gradients of data and weight; PyTorch has no operator for them on a CPU."""
    axes = list(range(data.ndim - count, data.ndim))
    others = list(range(data.ndim - count))
    normalized, scaled = data * rstd, output_grad * weight
    twist = (scaled * normalized).mean(axes, keepdim=True)
    product = output_grad * normalized
    return (scaled - normalized * twist) * rstd, product.sum(others) if others else product


# Normalisations of groups of channels.


def _group_norm(torch: Any, given: Sequence, results: Sequence) -> None:
    """Normalize groups; the second and third result, if there are any, are the statistics."""
    data, gamma, beta, groups, scale, center, epsilon = given
    (data,) = in_float32(torch, [data])
    gamma, beta = _like(data, gamma, beta)
    instances, channels = data.shape[:2]
    groups = groups or channels
    normalized, mean, rstd = torch.ops.aten.native_group_norm(
        data,
        gamma if scale else None,
        beta if center else None,
        *(instances, channels, math.prod(data.shape[2:])),
        groups,
        epsilon,
    )
    _copy(results[:1], [normalized])
    if len(results) > 1:
        _copy(results[1:], [_of_channels(each, channels) for each in (mean, rstd)])


def _of_channels(statistic: Any, channels: int) -> Any:
    """Return the statistic of each channel's group."""
    return statistic.repeat_interleave(channels // statistic.shape[1], 1)


def _group_norm_statistics(torch: Any, given: Sequence, results: Sequence) -> None:
    data, groups, _, _, epsilon = given
    instances, channels = data.shape[:2]
    groups = groups or channels
    wide = data.to(_wide(torch, data)).reshape(instances, groups, -1)
    variance, mean = torch.var_mean(wide, [2], correction=0)
    values = mean, torch.rsqrt(variance + epsilon)
    _copy(results, [_of_channels(each, channels) for each in values])


def _group_norm_gradients(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, data, gamma, mean, rstd, groups, scale, *mask = given
    output_grad, data = in_float32(torch, [output_grad, data])
    (gamma,) = _like(data, gamma)
    instances, channels = data.shape[:2]
    groups = groups or channels
    # Each channel has the statistics of its group.
    mean, rstd = (
        each.reshape(instances, channels)[:, :: channels // groups].contiguous()
        for each in (mean, rstd)
    )
    gradients = torch.ops.aten.native_group_norm_backward(
        output_grad,
        data,
        mean,
        rstd,
        gamma if scale else None,
        *(instances, channels, math.prod(data.shape[2:])),
        groups,
        [True, *map(bool, mask)],
    )
    _copy(results, gradients)


FUNCTIONS: dict[str, Function] = {
    "nn.batch_norm": Function(_batch_norm, 3),
    "batch_norm_and_statistics": Function(_batch_norm, 5),
    "batch_norm_gradients": Function(_batch_norm_gradients, 3),
    "grad.batch_norm_statistics": Function(_batch_norm_statistics, 2),
    "grad.batch_norm_backward_gamma": Function(_batch_norm_backward_gamma),
    "nn.layer_norm": Function(_layer_norm),
    "layer_norm_and_statistics": Function(_layer_norm, 3),
    "layer_norm_gradients": Function(partial(_layer_norm_gradients, None), 3),
    "grad.layer_norm_statistics": Function(_layer_norm_statistics, 2),
    "grad.layer_norm_backward_data": Function(partial(_layer_norm_gradients, [True, False, False])),
    "grad.layer_norm_backward_gamma": Function(
        partial(_layer_norm_gradients, [False, True, False])
    ),
    "nn.rms_norm": Function(_rms_norm),
    "rms_norm_and_statistics": Function(_rms_norm, 2),
    "rms_norm_gradients": Function(partial(_rms_norm_gradients, (True, True)), 2),
    "grad.rms_norm_statistics": Function(_rms_norm_statistics),
    "grad.rms_norm_backward_data": Function(partial(_rms_norm_gradients, (True, False))),
    "grad.rms_norm_backward_weight": Function(partial(_rms_norm_gradients, (False, True))),
    "nn.group_norm": Function(_group_norm),
    "nn.instance_norm": Function(_group_norm),
    "group_norm_and_statistics": Function(_group_norm, 3),
    "group_norm_gradients": Function(_group_norm_gradients, 3),
    "grad.group_norm_statistics": Function(_group_norm_statistics, 2),
    "grad.instance_norm_statistics": Function(_group_norm_statistics, 2),
}
