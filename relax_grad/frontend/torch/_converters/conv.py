"""Converters of convolution."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ._call import converts

CONV: dict[str, Callable] = {}

_op = relax.op


def repeated(value, rank: int) -> list:
    """Return a setting for each spatial axis: one number, or a list, holds for all of them."""
    value = [value] if isinstance(value, int) else list(value)
    return value * rank if len(value) == 1 else value


@converts(CONV, "convolution.default")
def _convolution(
    call, data, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    rank = data.ty.ndim - 2
    stride, padding, dilation, extra = (
        repeated(setting, rank) for setting in (stride, padding, dilation, output_padding)
    )
    if transposed:
        function = getattr(_op.nn, f"conv{rank}d_transpose")
        result = function(
            data, weight, stride, padding * 2, extra, dilation=dilation, groups=groups
        )
    else:
        function = getattr(_op.nn, f"conv{rank}d")
        result = function(data, weight, stride, padding * 2, dilation, groups)
    if bias is None:
        return result
    return _op.add(result, call.reshape(bias, [1, -1, *[1] * rank]))
