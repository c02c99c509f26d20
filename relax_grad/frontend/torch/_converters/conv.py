"""Converters of convolution."""

from __future__ import annotations

from tvm import relax

from ._call import Call, converts
from ._support import Converter

CONV: dict[str, Converter] = {}

_op = relax.op


def repeated(value: list[int], rank: int) -> list:
    """Return a setting for each spatial axis: one number, or a list, holds for all of them."""
    value = [value] if isinstance(value, int) else list(value)
    return value * rank if len(value) == 1 else value


@converts(CONV, "convolution.default")
def _convolution(
    call: Call,
    data: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> relax.Expr:
    rank = data.ty.ndim - 2
    stride, padding, dilation, extra = (
        repeated(setting, rank) for setting in (stride, padding, dilation, output_padding)
    )
    if transposed:
        result = _transposed(
            call, data, weight, stride, padding, dilation=dilation, extra=extra, groups=groups
        )
    else:
        function = getattr(_op.nn, f"conv{rank}d")
        result = function(data, weight, stride, padding * 2, dilation, groups)
    if bias is None:
        return result
    return _op.add(result, call.reshape(bias, [1, -1, *[1] * rank]))


def _transposed(
    call: Call,
    data: relax.Expr,
    weight: relax.Expr | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    extra: list,
    groups: int,
) -> relax.Expr:
    """Return a transposed convolution.

    Relax takes an output padding below the stride only. A larger one removes padding at the end of
    the axis and then adds zeros, which no element of the data reaches.
    """
    rank = len(stride)
    larger = [e if e >= s else 0 for e, s in zip(extra, stride, strict=True)]
    after = [max(p - more, 0) for p, more in zip(padding, larger, strict=True)]
    zeros = [max(more - p, 0) for p, more in zip(padding, larger, strict=True)]
    rest = [e - more for e, more in zip(extra, larger, strict=True)]
    function = getattr(_op.nn, f"conv{rank}d_transpose")
    result = function(
        data, weight, stride, [*padding, *after], rest, dilation=dilation, groups=groups
    )
    if not any(zeros):
        return result
    widths = [0, 0, 0, 0, *(width for zero in zeros for width in (0, zero))]
    return _op.nn.pad(call.emit(result), widths)
