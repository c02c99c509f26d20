"""Tensors in half precision, which kernels read and write as float32.

Elements are widened in registers when they are read, and rounded to the nearest, ties to even, when
they are stored. TVM computes bfloat16 by rewriting the arithmetic after a function is made. Here
elements of bfloat16 are integers of 16 bits to TVM, so that no pass changes the arithmetic of a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.tirx import Broadcast, Ramp

from ....ir.compat import masked_load, masked_store
from ....ir.dtypes import HALVES

#: The dtypes in which the tensors of a kernel are stored, and how many of the last ones are
#: results.
_STORED: ContextVar[tuple[Sequence[str], int] | None] = ContextVar("stored", default=None)


def stored_as(
    dtypes: Sequence[str], results: int, make: Callable[[], tirx.PrimFunc]
) -> tirx.PrimFunc:
    """Return the kernel that a generator makes, with its float32 tensors stored in other dtypes.

    Parameters
    ----------
    dtypes : Sequence[str]
        The dtype of each tensor; a half in place of float32, otherwise the kernel's dtype.
    results : int
        The number of results, which are the last tensors.
    make : Callable
        Returns the kernel.
    """
    token = _STORED.set((dtypes, results))
    try:
        return make()
    finally:
        _STORED.reset(token)


def stored_params(
    params: Sequence[tuple[str, Sequence, str]],
) -> tuple[list[tuple[str, Sequence, str]], int]:
    """Return the parameters of a kernel in the dtypes of :func:`stored_as`, and the number of
    results."""
    stored = _STORED.get()
    if stored is None:
        return list(params), 0
    dtypes, results = stored
    changed = []
    for (name, shape, dtype), wanted in zip(params, dtypes, strict=True):
        if dtype != wanted and (dtype != "float32" or wanted not in HALVES):
            raise ValueError(f"{name} is {dtype} in the kernel, and cannot be stored as {wanted}")
        changed.append((name, shape, wanted))
    return changed, results


class Half:
    """A flat buffer of elements in half precision; reads and writes are in float32.

    Attributes
    ----------
    raw : tirx.Buffer
        The elements as they are stored: float16, or the bits of bfloat16.
    dtype : str
        Their dtype.
    was_read : bool
        Whether an element was read.
    bias : Callable, optional
        Takes an index, and returns the number that is added to the element that is stored there, or
        to the vector of elements that begins there.
    rectifies : bool
        Whether ReLU is applied to the elements that are stored, after the bias.
    """

    def __init__(self, tensor: tirx.Buffer, size: int | tirx.PrimExpr, dtype: str):
        stored = "uint16" if dtype == "bfloat16" else dtype
        self.raw = T.decl_buffer([size], stored, data=tensor.data, layout=None)
        self.dtype, self.was_read = dtype, False
        self.bias: Callable | None = None
        self.rectifies = False

    def __getitem__(self, index: tirx.PrimExpr) -> tirx.PrimExpr:
        self.was_read = True
        return widened(self.raw[index], self.dtype)

    def store(
        self, index: tirx.PrimExpr, value: tirx.PrimExpr, bias: tirx.PrimExpr | None = None
    ) -> None:
        """Emit the store of an element or, if the index is a ramp, of a vector. The bias is
        :attr:`bias`, if it is known."""
        value = self._finished(value, index, bias)
        T.buffer_store(self.raw, narrowed(value, self.dtype, _lanes_of(index)), [index])

    def masked_load(self, ramp: Ramp, mask: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the lanes that a mask selects; the others are undefined."""
        self.was_read = True
        return widened(T.Bind(masked_load(self.raw, ramp, mask)), self.dtype)

    def masked_store(
        self,
        vector: tirx.PrimExpr,
        ramp: Ramp,
        mask: tirx.PrimExpr,
        bias: tirx.PrimExpr | None = None,
    ) -> None:
        """Emit the store of the lanes that a mask selects, with a bias as for :meth:`store`."""
        vector = self._finished(vector, ramp, bias)
        masked_store(self.raw, narrowed(vector, self.dtype, int(ramp.lanes)), ramp, mask)

    def _finished(
        self, value: tirx.PrimExpr, index: tirx.PrimExpr, bias: tirx.PrimExpr | None
    ) -> tirx.PrimExpr:
        """Return the elements to store at an index, or at a ramp."""
        lanes = _lanes_of(index)
        if bias is None and self.bias is not None:
            bias = self.bias(index.base if isinstance(index, Ramp) else index)
        if bias is not None:
            value = value + (bias if lanes == 1 else Broadcast(bias, lanes))
        return rectified(value, lanes) if self.rectifies else value


#: A tensor of a kernel as a flat buffer, which is read and written as float32.
Tensor: TypeAlias = "tirx.Buffer | Half"


def widens_slowly(tensor: Tensor) -> bool:
    """Tell whether single elements of a tensor take long to widen; vectors take less time."""
    return isinstance(tensor, Half) and tensor.dtype == "float16"


def rectified(value: tirx.PrimExpr, lanes: int) -> tirx.PrimExpr:
    """Return ReLU of a float32, or of a vector of them; NaN stays."""
    value, zero = T.Bind(value), _like(0.0, lanes, "float32")
    return tirx.Select(value <= zero, zero, value)


def widened(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Return stored elements of a dtype as float32."""
    lanes = _lanes_of(value)
    if dtype == "float16":
        return tirx.Cast(_of_lanes("float32", lanes), value)
    wide = tirx.Cast(_of_lanes("uint32", lanes), value)
    return tirx.reinterpret(_of_lanes("float32", lanes), wide << _like(16, lanes))


def narrowed(
    value: tirx.PrimExpr, dtype: str, lanes: int, bind: Callable = T.Bind
) -> tirx.PrimExpr:
    """Return float32 elements as they are stored in a dtype, rounded to the nearest, ties to
    even."""
    if dtype == "float16":
        return tirx.Cast(_of_lanes(dtype, lanes), value)
    bits = bind(tirx.reinterpret(_of_lanes("uint32", lanes), value))
    high = bind(bits >> _like(16, lanes))
    odd = high & _like(1, lanes)
    rounded = bind((bits + (odd + _like(0x7FFF, lanes))) >> _like(16, lanes))
    # Rounding up may turn the bits of NaN into a number. The bit that makes NaN quiet is
    # set last: LLVM 22 stores four bytes for the only element of a masked store of truncated
    # integers.
    is_nan = (bits & _like(0x7FFFFFFF, lanes)) > _like(0x7F800000, lanes)
    chosen = tirx.Cast(_of_lanes("uint16", lanes), tirx.Select(is_nan, high, rounded))
    quiet = tirx.Select(is_nan, _like(0x40, lanes, "uint16"), _like(0, lanes, "uint16"))
    return chosen | quiet


def _of_lanes(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _lanes_of(expr: tirx.PrimExpr) -> int:
    if isinstance(expr, Ramp):
        return int(expr.lanes)
    if isinstance(expr, int):
        return 1
    return int(str(expr.ty.dtype).partition("x")[2] or 1)


def _like(value: float, lanes: int, dtype: str = "uint32") -> tirx.PrimExpr:
    constant = tirx.const(value, dtype)
    return constant if lanes == 1 else Broadcast(constant, lanes)
