"""The tensor function of the generator Philox 4x32-10.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder

from ..ir.compat import dtype_of
from ..ir.module import DRAWN, NO_ALIASES

#: The multipliers of a round, and the increments of the two words of the key.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

#: The number of consecutive blocks whose words are stored side by side, so that stores are whole
#: vectors.
LANES = 16

#: The divisor of float64 numbers. LLVM multiplies by its inverse, which TVM's code for CUDA would
#: write with 15 decimals, as 0.
_PARTS = tirx.const(2.0**53, "float64")


class Words(Protocol):
    """Memory of the four words of a block."""

    def __getitem__(self, number: int) -> tirx.PrimExpr: ...

    def __setitem__(self, number: int, value: tirx.PrimExpr) -> None: ...


class Form(NamedTuple):
    """The numbers that the four words of a block become.

    Attributes
    ----------
    kind : str
        The name of a function in :data:`_FORMS`.
    parameter : int
        Its parameter: a number of bits or a threshold.
    """

    kind: str
    parameter: int = 0

    @staticmethod
    def kept(rate: float) -> Form:
        """Return the form of booleans that are false with a probability, for dropout."""
        return Form("below", round((1.0 - rate) * 2.0**32))

    @property
    def scale(self) -> float:
        """The factor of kept elements, for :meth:`kept`: one over the probability, or 0 for 0."""
        return 2.0**32 / self.parameter if self.parameter else 0.0

    @property
    def dtype(self) -> str:
        return _FORMS[self.kind][0]

    @property
    def per_block(self) -> int:
        """The count of numbers of a block."""
        return _FORMS[self.kind][1]

    @property
    def per_row(self) -> int:
        """The count of numbers of a row, which consists of :data:`LANES` blocks."""
        return self.per_block * LANES


def _u64(value: int) -> tirx.PrimExpr:
    return tirx.const(value, "uint64")


def _low(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the low halves of numbers of uint64.

    They are casts: TVM 0.26 makes a remainder by 2**32 of a mask, whose constant is too large for
    its dtype.
    """
    wide = dtype_of(value.ty)
    return tirx.Cast(wide, tirx.Cast(wide.replace("64", "32"), value))


def _long(words: Sequence) -> list:
    """Return two numbers of 64 bits."""
    return [
        tirx.bitwise_or(tirx.shift_left(high, _u64(32)), low)
        for low, high in (words[:2], words[2:])
    ]


def _bits(words: Sequence, _parameter: int) -> list:
    return [tirx.Cast("uint32", word) for word in words]


def _long_bits(words: Sequence, _parameter: int) -> list:
    return _long(words)


def _uniform(words: Sequence, digits: int) -> list:
    """Return float32 numbers in [0, 1) of this many binary digits."""
    unit = tirx.const(2.0**-digits, "float32")
    shift = _u64(32 - digits)
    # Conversions of signed numbers are single instructions.
    whole = [tirx.Cast("int32", tirx.shift_right(word, shift)) for word in words]
    return [tirx.Cast("float32", number) * unit for number in whole]


def _long_uniform(words: Sequence, _parameter: int) -> list:
    """Return float64 numbers in [0, 1) of 53 binary digits."""
    return [number / _PARTS for number in _long_whole(words)]


def _long_whole(words: Sequence) -> list:
    """Return float64 numbers that are integers below 2**53."""
    whole = [tirx.Cast("int64", tirx.shift_right(word, _u64(11))) for word in _long(words)]
    return [tirx.Cast("float64", number) for number in whole]


def _positive(words: Sequence, _parameter: int) -> list:
    """Return float32 numbers in (0, 1], whose least is 2**-33."""
    unit, half = (tirx.const(2.0**exponent, "float32") for exponent in (-32, -33))
    return [tirx.Cast("float32", tirx.Cast("int64", word)) * unit + half for word in words]


def _long_positive(words: Sequence, _parameter: int) -> list:
    """Return float64 numbers in (0, 1), whose least is 2**-54."""
    half = tirx.const(0.5, "float64")
    return [(number + half) / _PARTS for number in _long_whole(words)]


def _below(words: Sequence, threshold: int) -> list:
    """Tell which words are below a threshold."""
    return [word < _u64(threshold) for word in words]


#: The dtype of the numbers, their count per block, and the function that computes them from the
#: words.
_FORMS: dict[str, tuple[str, int, Callable[[Sequence, int], list]]] = {
    "bits": ("uint32", 4, _bits),
    "long_bits": ("uint64", 2, _long_bits),
    "uniform": ("float32", 4, _uniform),
    "long_uniform": ("float64", 2, _long_uniform),
    "positive": ("float32", 4, _positive),
    "long_positive": ("float64", 2, _long_positive),
    "below": ("bool", 4, _below),
}


@lru_cache(maxsize=256)
def philox(rows: int | None, form: Form) -> tirx.PrimFunc:
    """Return the tensor function that draws numbers.

    Element ``(r, w, l)`` of the result is number w of block ``LANES * r + l``. The key is the seed.
    The counter consists of the number of the block in its low half and the stream in its high half.

    Parameters
    ----------
    rows : int or None
        The number of rows, each of which has :data:`LANES` blocks; None for a symbolic one.
    form : Form
        The form of the numbers.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the seed and the stream, int64 tensors of shape (), and the result of shape
        ``(rows, form.per_block, LANES)``.
    """
    extent = tirx.Var("rows", "int64") if rows is None else rows
    with IRBuilder() as builder, T.prim_func():
        T.func_name("philox")
        T.func_attr({NO_ALIASES: True, DRAWN: f"{form.kind} {form.parameter}"})
        seed, stream = (T.arg(name, _tensor(name, [], "int64")) for name in ("seed", "stream"))
        shape = [extent, form.per_block, LANES]
        result = T.arg("result", _tensor("result", shape, form.dtype))
        with T.sblock("root"):
            T.reads([])
            T.writes([])
            with T.grid(extent, LANES) as (i, j), T.sblock("philox"):
                row, lane = T.axis.remap("SS", [i, j])
                T.reads([seed[()], stream[()]])
                T.writes([result[row, number, lane] for number in range(form.per_block)])
                for number, value in enumerate(_drawn(form, seed[()], stream[()], row, lane)):
                    T.buffer_store(result, value, [row, number, lane])
    return builder.get().without_attr("global_symbol")  # the module gives each function its name


@lru_cache(maxsize=64)
def philox_of_parts(form: Form) -> tirx.PrimFunc:
    """Return the tensor function that draws the numbers of several parts of a tensor.

    Element ``(p, r, w, l)`` of the result is element ``(first[p] + r, w, l)`` of that of
    :func:`philox`.

    Parameters
    ----------
    form : Form
        The form of the numbers.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the seed, an int64 tensor of shape (), the stream, the first element of one of shape
        (3,), the first row of each part, an int64 tensor, and the result of shape ``(parts, rows,
        form.per_block, LANES)``, all rows of which are drawn.
    """
    parts, rows = (tirx.Var(name, "int64") for name in ("parts", "rows"))
    with IRBuilder() as builder, T.prim_func():
        T.func_name("philox_of_parts")
        T.func_attr({NO_ALIASES: True})
        seed, stream, first = (
            T.arg(name, _tensor(name, shape, "int64"))
            for name, shape in (("seed", []), ("stream", [3]), ("first", [parts]))
        )
        shape = [parts, rows, form.per_block, LANES]
        result = T.arg("result", _tensor("result", shape, form.dtype))
        with T.sblock("root"):
            T.reads([])
            T.writes([])
            with T.grid(parts, rows, LANES) as (i, j, k), T.sblock("philox"):
                part, row, lane = T.axis.remap("SSS", [i, j, k])
                T.reads([seed[()], stream[0], first[part]])
                T.writes([result[part, row, number, lane] for number in range(form.per_block)])
                drawn = _drawn(form, seed[()], stream[0], first[part] + row, lane)
                for number, value in enumerate(drawn):
                    T.buffer_store(result, value, [part, row, number, lane])
    return builder.get().without_attr("global_symbol")


def _drawn(
    form: Form, seed: tirx.PrimExpr, stream: tirx.PrimExpr, row: tirx.PrimExpr, lane: tirx.PrimExpr
) -> list:
    """Emit the numbers of a block of a row, and return them."""
    words = _Words(T.alloc_buffer([4], "uint64", scope="local"))
    block = tirx.Cast("uint64", row) * _u64(LANES) + tirx.Cast("uint64", lane)
    key, high = (tirx.Cast("uint64", scalar) for scalar in (seed, stream))
    encrypt(words, *map(T.Bind, (key, block, high)))
    return _FORMS[form.kind][2]([words[i] for i in range(4)], form.parameter)


class _Words:
    """The words of a block in a buffer."""

    def __init__(self, buffer: tirx.Buffer):
        self._buffer = buffer

    def __getitem__(self, index: int) -> tirx.PrimExpr:
        return self._buffer[index]

    def __setitem__(self, index: int, value: tirx.PrimExpr) -> None:
        T.buffer_store(self._buffer, value, [index])


def encrypt(
    words: Words,
    key: tirx.PrimExpr,
    low: tirx.PrimExpr,
    high: tirx.PrimExpr,
    number: Callable[[int], tirx.PrimExpr] = _u64,
) -> None:
    """Emit the rounds, which leave the words of a block as numbers below 2**32.

    All numbers are of 64 bits: TVM declares the overflow of unsigned products undefined, also of 32
    bits. The words are in memory, which LLVM keeps in registers: TVM's simplifier would expand a
    chain of variables at every use.

    Parameters
    ----------
    words : Words
        Reads and writes four words by their numbers.
    key, low, high : tirx.PrimExpr
        The key, and the halves of the counter, of uint64: variables, or vectors for several blocks.
    number : Callable
        Returns an integer as such an expression.
    """
    half = number(32)

    def upper(value: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.shift_right(value, half)

    keys = [T.Bind(_low(key)), T.Bind(upper(key))]
    for i, word in enumerate((_low(low), upper(low), _low(high), upper(high))):
        words[i] = word
    for i in range(_ROUNDS):
        first, second = (
            _low(key + number(i * by % 2**32)) for key, by in zip(keys, _INCREMENTS, strict=True)
        )
        even, odd = (
            T.Bind(words[at] * number(by)) for at, by in zip((0, 2), _MULTIPLIERS, strict=True)
        )
        words[0] = tirx.bitwise_xor(tirx.bitwise_xor(upper(odd), words[1]), first)
        words[2] = tirx.bitwise_xor(tirx.bitwise_xor(upper(even), words[3]), second)
        words[1] = _low(odd)
        words[3] = _low(even)


def _tensor(name: str, shape: Sequence, dtype: str) -> tirx.Buffer:
    # TVM assumes tensors aligned to 64 bytes; tensors of other libraries may begin at any element.
    align = tvm_ffi.dtype(dtype).itemsize
    return T.buffer(list(shape), dtype, buffer_name=name, align=align)
