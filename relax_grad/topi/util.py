"""Helpers that the tensor expressions share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import te, tirx, topi

from ..ir.compat import Analyzer
from ..ir.expressions import variables

Shape = Sequence["int | tirx.PrimExpr"]


def analyzer_of_extents(extents: Shape) -> Analyzer:
    """Return an analyzer that knows that the variables in some extents are extents: not
    negative. The length of a slice is a longer expression of a symbolic extent without that."""
    analyzer = Analyzer()
    symbolic = [extent for extent in extents if not isinstance(extent, int)]
    for variable in {each for extent in symbolic for each in variables(extent)}:
        dtype = str(variable.ty.dtype)
        largest = int(tvm_ffi.dtype(dtype).itemsize * 8 - 2)
        analyzer.bind(variable, tvm.ir.Range(tirx.const(0, dtype), tirx.const(2**largest, dtype)))
    return analyzer


def cast(tensor: te.Tensor, dtype: str) -> te.Tensor:
    """Cast every element; return the tensor itself if it has the dtype."""
    if tensor.dtype == dtype:
        return tensor
    return te.compute(
        tensor.shape, lambda *i: tensor(*i).astype(dtype), name=f"{tensor.op.name}_cast"
    )


def sum_of_parts(partial: te.Tensor, number: int, out_dtype: str) -> te.Tensor:
    """Return the sum over the leading axes of a tensor.

    Parameters
    ----------
    partial : te.Tensor
        The sums of the parts.
    number : int
        The number of leading axes.
    out_dtype : str
        The dtype of the result.
    """
    parts = [te.reduce_axis((0, extent), "part") for extent in partial.shape[:number]]
    total = te.compute(
        partial.shape[number:],
        lambda *index: te.sum(partial(*parts, *index), axis=parts),
        name="sum_of_parts",
    )
    return cast(total, out_dtype)


def on_gpu() -> bool:
    """Tell whether the target in scope has the threads of a GPU, by the same check as TVM's own
    legalizations.

    Computed tensors are scheduled later. Explicit loops in statements are not, so they choose here
    between CPU and GPU.
    """
    target = tvm.target.Target.current(allow_none=True)
    return target is not None and "gpu" in target.keys


def constant(value: float, dtype: str) -> tirx.PrimExpr:
    """Return a constant, which may be infinite or NaN.

    TVM's code for CUDA writes bfloat16 numbers that are not finite as ``inff`` and ``nanf``, which
    are no constants, so a GPU reads their bits.
    """
    if str(dtype) != "bfloat16" or math.isfinite(value) or not on_gpu():
        return tirx.const(value, dtype)
    bits = np.array(value, "float32").view("uint32") >> 16  # bfloat16 is the upper half
    return tirx.reinterpret(dtype, tirx.const(int(bits), "uint16"))


def axes(layout: str, names: str) -> list[int]:
    """Return the positions of the named axes in a layout:
    ``axes("NHWC", "NCHW") == [0, 3, 1, 2]``."""
    return [layout.index(name) for name in names]


def spatial_names(layout: str, others: str) -> str:
    """Return a layout's axes without the named ones: ``("NWHC", "NC")`` gives ``"HW"``.

    They are in the order D, H, W, in which attributes list strides, padding and dilation, whatever
    the order in the layout.
    """
    return "".join(sorted(name for name in layout if name not in others))


def is_static(extent: int | tirx.PrimExpr) -> bool:
    """Tell whether an extent is a constant."""
    return isinstance(extent, (int, tirx.IntImm))


def is_one(extent: int | tirx.PrimExpr) -> bool:
    """Tell whether an extent is known to be 1."""
    return is_static(extent) and int(extent) == 1


def at_least_1(extent: int | tirx.PrimExpr) -> int | tirx.PrimExpr:
    """Return an extent as a divisor: at least 1, even for an empty axis."""
    return max(extent, 1) if isinstance(extent, int) else tirx.max(extent, 1)


def is_empty(shape: Shape) -> bool:
    """Tell whether an extent is known to be 0."""
    return any(is_static(extent) and int(extent) == 0 for extent in shape)


def zeros(shape: Shape, dtype: str) -> te.Tensor:
    """Return a tensor of zeros."""
    return te.compute(shape, lambda *_: tirx.const(0, dtype), name="zeros", tag=topi.tag.INJECTIVE)


def count_along(shape: Shape, axes: Sequence[int]) -> tirx.PrimExpr:
    """Return the number of elements along axes."""
    count = tirx.const(1, "int64")
    for axis in axes:
        count = count * shape[axis]
    return count


def broadcast_index(shape: Shape, at: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
    """Return the index into a tensor of this shape for an index into its broadcast."""
    at = at[len(at) - len(shape) :]
    return [0 if is_one(extent) else i for i, extent in zip(at, shape, strict=True)]


def fill_where_empty(total: te.Tensor, extents: Shape, fill: int = 0) -> te.Tensor:
    """Return a reduction, with ``fill`` over an empty axis, for which its loops leave the result
    undefined."""
    extents = [extent for extent in extents if not (is_static(extent) and int(extent) > 0)]
    if not extents:
        return total
    filled = tirx.all(*(extent > 0 for extent in extents))
    return te.compute(
        total.shape,
        lambda *i: tirx.if_then_else(filled, total(*i), tirx.const(fill, total.dtype)),
        name=f"{total.op.name}_or_{fill}",
        tag=topi.tag.INJECTIVE,
    )


def spread(
    tensor: te.Tensor,
    spatial_axes: Sequence[int],
    extents: Shape,
    origins: Shape,
    steps: Sequence[int],
    dtype: str,
    fill: int = 0,
) -> te.Tensor:
    """Copy a tensor so that element ``i`` of a spatial axis is at ``origin + i * step``.

    Elements outside ``[0, extent)`` are dropped; all other positions hold ``fill``.
    """
    shape = list(tensor.shape)
    for axis, extent in zip(spatial_axes, extents, strict=True):
        shape[axis] = extent

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = list(index)
        inside = []
        for axis, origin, step in zip(spatial_axes, origins, steps, strict=True):
            offset = at[axis] - origin
            at[axis] = offset // step
            inside += [offset >= 0, at[axis] < tensor.shape[axis]]
            if step != 1:
                inside.append(offset % step == 0)
        value = tensor(*at).astype(dtype)
        return tirx.if_then_else(tirx.all(*inside), value, tirx.const(fill, dtype))

    return te.compute(shape, element, name=f"{tensor.op.name}_spread", tag=topi.tag.INJECTIVE)
