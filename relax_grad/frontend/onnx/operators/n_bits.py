"""Products with weights of few bits, ``MatMulNBits``, as quantisers for ONNX Runtime write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax import op

from ....ir.compat import constant_value
from ....op.quantized import quantized_matmul
from .converters import Attrs, Builder, Inputs, Refused, Result, _dtype, _rank
from .fused import _converts

#: What is added to numbers and zero points of each number of bits, so that the zero point of
#: weights without one is as in ``relax.grad.quantized_matmul``. Numbers of 2 bits are stored
#: in 4.
_OFFSETS = {2: 6, 4: 0, 8: -128}


@_converts("MatMulNBits")
def _matmul_n_bits(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Multiply with a frozen weight of 2, 4 or 8 bits: ``(q - zero) * scale``, by blocks of its
    rows."""
    data, packed, scale, zeros, order, bias = (inputs[i] for i in range(6))
    rows, width, bits, block = (attrs[name] for name in ("N", "K", "bits", "block_size"))
    if bits not in _OFFSETS:
        raise Refused(f"it has {bits} bits; supported are 2, 4 and 8")
    if attrs.get("weight_prepacked", 0):
        raise Refused("it has the attribute weight_prepacked; quantise it without")
    if block < 2 or block % 2:
        raise Refused(f"its block_size is {block}; it must be even")
    numbers, blocks = _constant(packed, "weight B"), -(-width // block)
    numbers = _unpacked(numbers.reshape(rows, blocks, -1), bits)[:, :, :block]
    scale = bb.emit(op.reshape(scale, [rows, blocks]))
    if zeros is not None and "float" in _dtype(zeros):
        zeros = _floats(bb, zeros, [rows, blocks], _OFFSETS[bits], _dtype(scale))
    elif zeros is not None:
        value = _unpacked(_constant(zeros, "zero_points").reshape(rows, -1), bits)[:, :blocks]
        zeros = _stored(value, bits)
    if order is not None:
        columns, groups = _order(_constant(order, "g_idx").reshape(-1), width, blocks, block)
        data = _chosen(bb, data, columns, width, _rank(data) - 1)
        scale = _chosen(bb, scale, groups, blocks, 1)
        zeros = None if zeros is None else _chosen(bb, zeros, groups, blocks, 1)
        permuted = np.zeros((rows, len(groups) * block), "uint8")
        permuted[:, :width] = numbers.reshape(rows, -1)[:, columns]
        numbers = permuted.reshape(rows, len(groups), block)
    weight = _stored(numbers, bits, pairs=bits < 8)
    result = bb.emit(quantized_matmul(data, weight, scale, zeros))
    return result if bias is None else op.add(result, bias)


def _constant(value: relax.Expr, name: str) -> np.ndarray:
    array = constant_value(value)
    if array is None:
        raise Refused(f"its {name} is no constant")
    return array


def _floats(
    bb: Builder, zeros: relax.Expr, shape: Sequence[int], offset: int, dtype: str
) -> relax.Expr:
    zeros = bb.emit(op.reshape(zeros, shape))
    zeros = zeros if _dtype(zeros) == dtype else bb.emit(op.astype(zeros, dtype))
    return bb.emit(op.add(zeros, relax.const(offset, dtype))) if offset else zeros


def _unpacked(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of a few bits in bytes, the lowest bits first, along the last axis."""
    shifts: np.ndarray = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (values[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*values.shape[:-1], -1)


def _stored(values: np.ndarray, bits: int, *, pairs: bool = False) -> relax.Expr:
    """Return numbers in the dtype of ``relax.grad.quantized_matmul``, two in each element or
    one."""
    values = values.astype("int16") + _OFFSETS[bits]
    if pairs:
        values = values[..., ::2] | values[..., 1::2] << 4
    dtype = "int8" if bits == 8 else "uint8"
    return relax.const(np.ascontiguousarray(values.astype(dtype)), dtype)


def _order(order: np.ndarray, width: int, blocks: int, block: int) -> tuple[np.ndarray, list[int]]:
    """Return the columns in the order of their groups, and the groups, of which an incomplete one
    is the last.

    ``g_idx`` has the group of each column, as GPTQ writes it for columns in the order of their
    importance. It may be as long as the padded rows.
    """
    order = order[:width]
    if len(order) < width or order.min() < 0 or order.max() >= blocks:
        raise Refused(f"its g_idx must have {width} numbers from 0 to {blocks - 1}")
    sizes = np.bincount(order, minlength=blocks)
    groups = sorted(np.flatnonzero(sizes).tolist(), key=lambda group: sizes[group] < block)
    if sizes.max() > block or any(sizes[group] < block for group in groups[:-1]):
        raise Refused(
            f"its g_idx has groups of {sorted(set(sizes.tolist()))} columns; all but one must "
            f"have block_size={block}"
        )
    return np.concatenate([np.flatnonzero(order == group) for group in groups]), groups


def _chosen(
    bb: Builder, data: relax.Expr, places: np.ndarray | Sequence[int], extent: int, axis: int
) -> relax.Expr:
    """Return elements along an axis of an extent, unless they are all elements in order."""
    if list(places) == list(range(extent)):
        return data
    return bb.emit(op.take(data, relax.const(np.asarray(places, "int64"), "int64"), axis))
