"""Frozen weights of 8 and 4 bits: the numbers, the scales, and the choice of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx

from ..ir.compat import dtype_of
from ._readers import Reader, Use, uses_of

#: The bits of each form of frozen weights.
FORMS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class QuantizedWeight:
    """A frozen weight of 8 or 4 bits.

    Attributes
    ----------
    weight : str
        The name of the weight.
    numbers, scale : str
        The names of its numbers and of its scales among the frozen tensors, in the layout of
        ``relax.grad.quantized_matmul``.
    bits : int
        8 or 4.
    transposed : bool
        Whether the shape of the weight is (inputs, outputs).
    shape : tuple[int, ...]
        The shape of the weight.
    dtype : str
        The dtype of the weight.
    """

    weight: str
    numbers: str
    scale: str
    bits: int
    transposed: bool
    shape: tuple[int, ...]
    dtype: str

    def restored(self, tensors: Mapping[str, tvm.runtime.Tensor]) -> tvm.runtime.Tensor:
        """Return the elements that the numbers stand for, in the shape and dtype of the weight."""
        numbers, scale = (tensors[name].numpy() for name in (self.numbers, self.scale))
        inputs = self.shape[0] if self.transposed else self.shape[1]
        matrix = dequantized(numbers, scale)[:, :inputs]
        matrix = matrix.T if self.transposed else matrix
        like = tvm.runtime.empty((0,), self.dtype).numpy().dtype  # NumPy has no bfloat16
        return tvm.runtime.tensor(np.ascontiguousarray(matrix).astype(like))


def quantized(matrix: np.ndarray, bits: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Round the rows of a matrix to numbers of a few bits, by groups.

    Of 8 bits, the element of the largest magnitude of a group is -127 or 127 times its scale. Of 4
    bits, it is -8 times its scale, which may be negative, so that all 16 numbers are used.

    Parameters
    ----------
    matrix : np.ndarray
        ``(outputs, inputs)``, finite. Rows are padded to whole groups by numbers that stand for 0.
    bits : int
        8 or 4.
    size : int
        The elements of a group.

    Returns
    -------
    numbers, scale : np.ndarray
        ``(outputs, groups, width)`` and ``(outputs, groups)``, as ``relax.grad.quantized_matmul``
        takes them. Scales are of float64 for a matrix of float64, and of float32 else.
    """
    outputs, inputs = matrix.shape
    dtype: np.dtype = np.dtype("float64" if matrix.dtype == np.float64 else "float32")
    groups = -(-inputs // size)
    padded = np.zeros((outputs, groups * size), dtype)
    padded[:, :inputs] = matrix
    parts = padded.reshape(outputs, groups, size)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)
    scale = np.abs(largest) / dtype.type(127) if bits == 8 else largest / dtype.type(-8)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        levels = np.where(scale == 0, 0, np.rint(parts / scale))
    if bits == 8:
        return np.clip(levels, -127, 127).astype("int8"), scale[..., 0]
    levels = (np.clip(levels, -8, 7) + 8).astype("uint8")
    return levels[..., ::2] | levels[..., 1::2] << 4, scale[..., 0]


def dequantized(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the elements that numbers stand for, ``(outputs, inputs)`` of the dtype of the
    scales."""
    if numbers.dtype == np.uint8:
        pairs = np.stack([numbers & 15, numbers >> 4], -1).astype("int8") - np.int8(8)
        numbers = pairs.reshape(*numbers.shape[:2], -1)
    return (numbers.astype(scale.dtype) * scale[..., None]).reshape(len(numbers), -1)


def choice(
    readers: Sequence[Reader],
    base: Mapping[str, tvm.runtime.Tensor],
    form: str,
    size: int,
    taken: Iterable[str],
) -> tuple[tuple[QuantizedWeight, ...], dict[str, str]]:
    """Return the weights that can be quantised, and the reasons of the others by their names.

    Parameters
    ----------
    readers : Sequence[Reader]
        The functions that read the weights.
    base : Mapping[str, tvm.runtime.Tensor]
        The weights.
    form : str
        One of :data:`FORMS`.
    size : int
        The elements of a group.
    taken : Iterable[str]
        Names that exist.
    """
    uses: dict[str, list[Use]] = {name: [] for name in base}
    for reader in readers:
        wanted = {variable: name for name, variable in reader.weights.items() if name in base}
        for use in uses_of(reader.function, wanted):
            uses[use.weight].append(use)
    names, bits = set(taken), FORMS[form]
    stored, kept = [], {}
    for name, tensor in base.items():
        shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype)
        reason = _reason(shape, dtype, uses[name], bits, size)
        if reason:
            kept[name] = reason
            continue
        own = f"{name}.{form}", f"{name}.scale"
        for added in own:
            if added in names:
                raise ValueError(f"frozen: the model has a tensor {added!r} already")
        names.update(own)
        transposed = uses[name][0].kind == "transposed"
        stored.append(QuantizedWeight(name, *own, bits, transposed, shape, dtype))
    if not stored:
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:8])
        raise ValueError(f"frozen: no weight can be stored in {bits} bits ({shown})")
    return tuple(stored), kept


def _reason(shape: tuple, dtype: str, uses: Sequence[Use], bits: int, size: int) -> str:
    """Return why a weight stays as it is, or an empty text."""
    if not dtype.startswith(("float", "bfloat")):
        return f"it is of {dtype}"
    if not uses:
        return "no function reads it"
    kinds = {use.kind for use in uses}
    for use in uses:
        if use.kind not in ("linear", "transposed"):
            return f"{use.user} reads it; only weights of matrix products are stored in few bits"
        assert use.binding is not None, "only a binding has a kind"
        data = use.binding.value.args[0].ty
        if not isinstance(data.shape, relax.ShapeExpr) or data.dtype is None:
            return "the shape of the other factor is unknown"
        if not isinstance(data.shape.values[-1], tirx.IntImm):
            return "the axis that is summed over is symbolic"
        if not dtype_of(data).startswith(("float", "bfloat")):
            return f"the other factor is of {dtype_of(data)}"
    if len(kinds) > 1:
        return "it is read as it is, and transposed"
    outputs, inputs = shape if kinds == {"linear"} else shape[::-1]
    groups, wide = -(-inputs // size), 8 if dtype == "float64" else 4
    if (
        outputs * groups * (size * bits // 8 + wide)
        >= outputs * inputs * tvm.DataType(dtype).bits // 8
    ):
        return f"groups of {size} would take no less memory than its {inputs} inputs"
    return ""


def tensors_of(
    base: Mapping[str, tvm.runtime.Tensor], weights: Iterable[QuantizedWeight], size: int
) -> dict[str, tvm.runtime.Tensor]:
    """Return the frozen tensors in the order of the weights, with integers and scales instead of
    some of them.

    Raises
    ------
    ValueError
        If an element of a weight is not finite.
    """
    by_name = {weight.weight: weight for weight in weights}
    tensors = {}
    for name, tensor in base.items():
        weight = by_name.get(name)
        if weight is None:
            tensors[name] = tensor
            continue
        matrix = tensor.numpy()
        matrix = matrix.astype("float32") if matrix.dtype != np.float64 else matrix
        if not np.isfinite(matrix).all():
            raise ValueError(f"frozen: {name} has elements that are not finite")
        numbers, scale = quantized(matrix.T if weight.transposed else matrix, weight.bits, size)
        tensors[weight.numbers] = tvm.runtime.tensor(numbers)
        tensors[weight.scale] = tvm.runtime.tensor(np.ascontiguousarray(scale))
    return tensors
