"""Operators of ONNX Runtime's domain: normalisations of groups and dropout with a bias, for GPUs,
and operators that ONNX has in later versions."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from .converters import CONVERTERS, Attrs, Builder, Inputs, Refused, Result, _dtype, _rank
from .fused import _converted, _converts, _sum_of


@_converts("GroupNorm")
def _group_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Normalise groups of channels, which stand last unless ``channels_last`` is 0; SiLU may
    follow."""
    return _normalized(bb, inputs[0], inputs[1], inputs[2], attrs)


@_converts("SkipGroupNorm")
def _skip_group_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the normalised sum of the data, the skipped data and a bias, and the sum."""
    data, gamma, beta, skip, bias = (inputs[i] for i in range(5))
    if _rank(skip) == 2:  # one number of each channel
        skip = bb.emit(op.expand_dims(skip, [1, 2]))
    if not attrs.get("channels_last", 1):
        raise Refused(
            "its channels stand before the pictures; ONNX Runtime has channels_last=1 only"
        )
    total = _sum_of(bb, data, skip, bias)
    result = _normalized(bb, total, gamma, beta, attrs)
    return result if attrs["tvm_custom"]["num_outputs"] < 2 else relax.Tuple([result, total])


def _normalized(
    bb: Builder, data: relax.Expr, gamma: relax.Expr, beta: relax.Expr, attrs: Attrs
) -> relax.Expr:
    is_last, dtype = attrs.get("channels_last", 1), _dtype(data)
    if _rank(data) != 4:
        raise Refused(f"its operand has {_rank(data)} axes; pictures of 4 axes are supported")
    if is_last:
        data = bb.emit(op.permute_dims(data, [0, 3, 1, 2]))
    scale, shift = (
        factor if _dtype(factor) == dtype else bb.emit(op.astype(factor, dtype))
        for factor in (gamma, beta)
    )
    groups, epsilon = attrs["groups"], attrs.get("epsilon", 1e-5)
    result = bb.emit(op.nn.group_norm(data, scale, shift, groups, 1, [2, 3], epsilon))
    if attrs.get("activation", 0) == 1:
        result = bb.emit(op.nn.silu(result))
    elif attrs.get("activation", 0):
        raise Refused(f"it has the activation {attrs['activation']}; 0 is none and 1 is SiLU")
    return bb.emit(op.permute_dims(result, [0, 2, 3, 1])) if is_last else result


@_converts("BiasDropout")
def _bias_dropout(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the sum of the data and a bias with dropped elements, plus a residual; and the
    mask."""
    data, bias, residual, ratio, training = (inputs[i] for i in range(5))
    total = bb.emit(op.add(data, bias))
    dropped = CONVERTERS["Dropout"](bb, [total, ratio, training], attrs, max(opset, 13))
    parts = list(dropped.fields) if isinstance(dropped, relax.Tuple) else [dropped]
    if residual is not None:
        parts[0] = bb.emit(op.add(parts[0], residual))
    return parts[0] if len(parts) == 1 else relax.Tuple(parts)


@_converts("GridSample")
def _grid_sample(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ONNX's operator of version 16, which names its modes likewise."""
    return _converted("GridSample", bb, inputs, attrs, max(opset, 16))


@_converts("Trilu")
def _trilu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ONNX's operator of version 14."""
    return _converted("Trilu", bb, inputs, attrs, max(opset, 14))
