"""The arguments of one step: numbers and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import tvm
from tvm import relax

from ..cpu.threads import let_torch_threads_sleep
from ..ir.compat import dtype_of
from ..ir.index_ranges import IndexRange, index_ranges

#: The alignment in bytes of tensors whose memory compiled functions read.
_ALIGNMENT = 64


def number(name: str, value: object) -> float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy or PyTorch
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number, but it is {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, but it is {value}")
    return float(value)


def result_of(start: str, value: object) -> float:
    """Return the number that a caller's function returned, also as an array or a tensor of one element."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{start} {value!r}") from error


def as_input(name: str, value: object, kind: relax.TensorType, symbols: dict) -> tvm.runtime.Tensor:
    """Return an input as a tensor of TVM; a copy only of memory that TVM cannot read."""
    if isinstance(value, tvm.runtime.Tensor):
        # TVM refuses memory of others that is strided or not aligned.
        if not str(value.device).startswith("cpu"):
            raise ValueError(f"{name} must be on the CPU, but it is on {value.device}")
        tensor = value
    elif hasattr(value, "detach"):  # of PyTorch
        if value.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, but it is on {value.device}")
        tensor = _of_torch(value.detach().contiguous())
    else:
        try:
            tensor = tvm.runtime.tensor(np.array(value, order="C"))
        except (TypeError, ValueError) as error:  # such as lists of different lengths, and strings
            raise TypeError(f"{name} must be an array or a tensor, but it is {value!r}") from error
    dtype, shape = dtype_of(kind), tuple(tensor.shape)
    wanted = tuple(kind.shape.values)
    fits = len(shape) == len(wanted)
    for found, extent in zip(shape, wanted, strict=False):
        if hasattr(extent, "value"):
            fits = fits and int(extent) == found
        elif isinstance(extent, tvm.tirx.Var):
            fits = fits and symbols.setdefault(extent.name, found) == found
    if not fits or str(tensor.dtype) != dtype:
        written = ", ".join(str(getattr(each, "value", each)) for each in wanted)
        raise ValueError(
            f"{name} must have shape ({written}) and dtype {dtype}, but it has {shape} and {tensor.dtype}"
        )
    return tensor


#: The end of the error of an index out of range.
_REMEDY = "; check_inputs=False leaves such values to the compiled step, whose results are then NaN"


def ranges_of(step) -> tuple[IndexRange, ...]:
    """Return the ranges of the indices and classes in the batch of a ``TrainStep``."""
    source = step._source
    return _decided(index_ranges(source.module, source.name, step.batch), step.batch)


def forward_ranges_of(step) -> tuple[IndexRange, ...]:
    """Return the ranges of the indices among the inputs of the prediction of a ``TrainStep``."""
    if step.forward is None:
        return ()
    params = list(step.module[step.forward.name].params)
    types = {each.name: each.ty for each in params[: len(params) - len(step.forward.values)]}
    return _decided(index_ranges(step.module, step.forward.name, types), types)


def _decided(
    ranges: Sequence[IndexRange], types: Mapping[str, relax.TensorType]
) -> tuple[IndexRange, ...]:
    """Return the ranges whose extents the shapes of the inputs decide."""
    extents = (extent for kind in types.values() for extent in kind.shape.values)
    symbols = {extent.name for extent in extents if isinstance(extent, tvm.tirx.Var)}
    return tuple(each for each in ranges if isinstance(each.extent, int) or each.extent in symbols)


def check_ranges(
    ranges: Sequence[IndexRange], tensors: Mapping[str, tvm.runtime.Tensor], symbols: Mapping
) -> None:
    """Raise IndexError if an element is out of range."""
    for each in ranges:
        each.check(np.from_dlpack(tensors[each.input]), symbols, _REMEDY)


def _of_torch(value) -> tvm.runtime.Tensor:
    let_torch_threads_sleep()
    if value.data_ptr() % _ALIGNMENT:
        value = value.clone()
    return tvm.runtime.from_dlpack(value)
