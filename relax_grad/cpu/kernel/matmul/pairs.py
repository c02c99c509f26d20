"""Matrix products of bfloat16 with the processor's instruction for pairs of elements.

``vdpbf16ps`` of AVX-512 adds the products of two pairs of bfloat16 to a float32 in each lane. Both
factors are packed as pairs of consecutive k; a pair is held as the 32 bits of a float32. An odd k
is padded by zero. The instruction rounds to the nearest, ties to even, and takes denormal numbers
as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.tirx import Broadcast, Ramp

from ....ir.compat import masked_load
from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Half, Tensor
from ._factor import Copies, Factor, Strips
from .panels import Packing
from .product import Matmul
from .tile import Ahead

#: The lanes of the instruction.
_LANES = 16

#: TVM has no vectors of bfloat16 that its passes leave alone: the bits are cast in LLVM.
_LLVM = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr hidden <16 x float> @relax_grad_add_pairs(
    <16 x float> %sum, <16 x float> %a, <16 x float> %b) alwaysinline nounwind {
  %first = bitcast <16 x float> %a to <32 x bfloat>
  %second = bitcast <16 x float> %b to <32 x bfloat>
  %result = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %sum, <32 x bfloat> %first, <32 x bfloat> %second)
  ret <16 x float> %result
}
define linkonce_odr hidden <16 x float> @relax_grad_round_in_order(
    <16 x float> %low, <16 x float> %high) alwaysinline nounwind {
  %rounded = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(
      <16 x float> %high, <16 x float> %low)
  %result = bitcast <32 x bfloat> %rounded to <16 x float>
  ret <16 x float> %result
}
define linkonce_odr hidden <16 x float> @relax_grad_round_to_pairs(
    <16 x float> %low, <16 x float> %high) alwaysinline nounwind {
  %rounded = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(
      <16 x float> %high, <16 x float> %low)
  %pairs = shufflevector <32 x bfloat> %rounded, <32 x bfloat> poison, <32 x i32> <LANES>
  %result = bitcast <32 x bfloat> %pairs to <16 x float>
  ret <16 x float> %result
}
""".replace("LANES", ", ".join(f"i32 {i // 2 + i % 2 * _LANES}" for i in range(2 * _LANES)))


#: The same functions for processors without AVX512-BF16, which do not flush denormal numbers.
_ROUNDED = """
define linkonce_odr hidden <16 x i32> @relax_grad_rounded(<16 x float> %x) alwaysinline nounwind {
  %bits = bitcast <16 x float> %x to <16 x i32>
  %high = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %high, splat (i32 1)
  %half = add <16 x i32> %odd, splat (i32 32767)
  %sum = add <16 x i32> %bits, %half
  %rounded = lshr <16 x i32> %sum, splat (i32 16)
  %is_nan = fcmp uno <16 x float> %x, zeroinitializer
  %quiet = or <16 x i32> %high, splat (i32 64)
  %result = select <16 x i1> %is_nan, <16 x i32> %quiet, <16 x i32> %rounded
  ret <16 x i32> %result
}
define linkonce_odr hidden <16 x float> @relax_grad_round_in_order(
    <16 x float> %low, <16 x float> %high) alwaysinline nounwind {
  %first = call <16 x i32> @relax_grad_rounded(<16 x float> %low)
  %second = call <16 x i32> @relax_grad_rounded(<16 x float> %high)
  %short = trunc <16 x i32> %first to <16 x i16>
  %others = trunc <16 x i32> %second to <16 x i16>
  %both = shufflevector <16 x i16> %short, <16 x i16> %others, <32 x i32> <IN ORDER>
  %result = bitcast <32 x i16> %both to <16 x float>
  ret <16 x float> %result
}
define linkonce_odr hidden <16 x float> @relax_grad_round_to_pairs(
    <16 x float> %low, <16 x float> %high) alwaysinline nounwind {
  %first = call <16 x i32> @relax_grad_rounded(<16 x float> %low)
  %second = call <16 x i32> @relax_grad_rounded(<16 x float> %high)
  %shifted = shl <16 x i32> %second, splat (i32 16)
  %both = or <16 x i32> %first, %shifted
  %result = bitcast <16 x i32> %both to <16 x float>
  ret <16 x float> %result
}
""".replace("IN ORDER", ", ".join(f"i32 {i}" for i in range(2 * _LANES)))


def takes_pairs(cpu: CPU, *factors: Tensor) -> bool:
    """Tell whether the factors of a product are bfloat16, and the CPU multiplies them."""
    return cpu.bfloat16 and all(isinstance(x, Half) and x.dtype == "bfloat16" for x in factors)


def imported() -> AbstractContextManager[object]:
    """Return the frame of statements that may call :func:`add_products`."""
    return T.attr(0, "pragma_import_llvm", _LLVM)


def imported_rounding(cpu: CPU) -> AbstractContextManager[object]:
    """Return the frame of statements that may call :func:`rounded_in_order` and
    :func:`rounded_to_pairs`."""
    return imported() if cpu.rounds else T.attr(0, "pragma_import_llvm", _ROUNDED)


def add_products(
    total: tirx.PrimExpr, pairs: tirx.PrimExpr, others: tirx.PrimExpr
) -> tirx.PrimExpr:
    """Return a sum with the products of pairs added, lane by lane."""
    return tirx.call_pure_extern("float32x16", "relax_grad_add_pairs", total, pairs, others)


def rounded_in_order(low: tirx.PrimExpr, high: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return two consecutive vectors of float32, rounded to bfloat16, as pairs of neighbours."""
    return tirx.call_pure_extern("float32x16", "relax_grad_round_in_order", low, high)


def rounded_to_pairs(low: tirx.PrimExpr, high: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the pairs of the elements of two vectors of float32, rounded to bfloat16."""
    return tirx.call_pure_extern("float32x16", "relax_grad_round_to_pairs", low, high)


@dataclass(frozen=True)
class Pairs(Matmul):
    """A product whose depth is a number of pairs.

    Attributes
    ----------
    elements : int or tirx.PrimExpr
        The extent of k, in elements.
    """

    elements: Extent = 0

    @staticmethod
    def of(p: Matmul) -> Pairs:
        """Return the product of pairs for one of elements."""
        sizes = (p.rows, p.columns, ceil_div(p.depth, 2), p.transpose_a, p.transpose_b)
        return Pairs(*sizes, p.batch, p.shared_a, p.shared_b, p.depth)

    @property
    def elements_of_k(self) -> Extent:
        return self.elements

    def factor(self, vectors: Vectors, size: tuple[int, int], depth: int) -> Factor:
        """Return the reader of A; ``depth`` are the most steps of a stretch."""
        reader = _StripsOfPairs if self.transpose_a else _CopiesOfPairs
        return reader(self, vectors, size, depth=depth)

    @property
    def is_even(self) -> bool:
        """Whether the extent of k is known to be even."""
        return _is_even(self.elements)

    def across(
        self,
        source: Half,
        start: tirx.PrimExpr,
        stride: Extent,
        k: tirx.PrimExpr,
        number: Extent | None,
    ) -> tirx.PrimExpr:
        """Return the pairs of two rows of a matrix, ``[k, ...]``: those of the ``k``-th pair.

        ``start`` is the offset of a vector in the first row of the matrix, and ``number`` the
        elements of it that exist.
        """
        return pairs_across((source, start, stride), k, self.elements, number)

    def along(
        self, source: Half, start: tirx.PrimExpr, k: tirx.PrimExpr, number: Extent | None
    ) -> tirx.PrimExpr:
        """Return the pairs from the ``k``-th one on of a row, ``[..., k]``.

        Parameters
        ----------
        source : Half
            The matrix.
        start : tirx.PrimExpr
            The offset of the row.
        k : tirx.PrimExpr
            The number of the first pair.
        number : int or tirx.PrimExpr or None
            The number of pairs to read, the others are 0; None for a vector, none of which is
            half beyond the row.
        """
        return pairs_along((source, start), k, self.elements, number)


def pairs_across(
    rows: tuple, k: tirx.PrimExpr, elements: Extent, number: Extent | None
) -> tirx.PrimExpr:
    """Return the ``k``-th pair of rows; an odd number of them, ``elements``, is padded by zero.

    ``rows`` are a buffer, the offset of a vector in the first row, and the stride of the rows, and
    ``number`` the elements of the vector that exist.
    """
    rest = number
    if not _is_even(elements):
        whole = as_expr(_LANES if number is None else number)
        rest = bind(tirx.Select(2 * k + 1 < as_expr(elements), whole, const(0)))
    return pairs_of_rows(rows, k, (number, rest))


def pairs_of_rows(
    rows: tuple, k: tirx.PrimExpr, numbers: tuple[Extent | None, Extent | None]
) -> tirx.PrimExpr:
    """Return the ``k``-th pair of rows, of which ``numbers`` elements exist in the first and in the
    second row."""
    source, start, stride = rows
    first = bits_of(source, bind(start + 2 * k * stride), _LANES, numbers[0])
    second = bits_of(source, bind(start + (2 * k + 1) * stride), _LANES, numbers[1])
    return joined(first, second)


def pairs_along(
    row: tuple,
    k: tirx.PrimExpr,
    elements: Extent,
    number: Extent | None,
    exists: tirx.PrimExpr | None = None,
) -> tirx.PrimExpr:
    """Return the pairs from the ``k``-th one on of a row of elements.

    ``row`` is a buffer and the offset of the row, ``number`` is as in :meth:`Pairs.along`, and
    ``exists`` tells whether the row exists; otherwise the pairs are 0.
    """
    source, start = row
    left = None
    if number is not None or exists is not None or not _is_even(elements):
        pairs = as_expr(_LANES if number is None else number)
        left = tirx.min(2 * pairs, as_expr(elements) - 2 * k)
        left = bind(left if exists is None else tirx.Select(exists, left, const(0)))
    bits = bits_of(source, bind(start + 2 * k), 2 * _LANES, left)
    return bind(tirx.reinterpret(f"float32x{_LANES}", bits))


def _is_even(extent: Extent) -> bool:
    return isinstance(extent, int) and extent % 2 == 0


def joined(low: tirx.PrimExpr, high: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the pairs of the bits of two vectors of bfloat16."""
    low, high = (tirx.Cast(f"uint32x{_LANES}", bits) for bits in (low, high))
    return bind(tirx.reinterpret(f"float32x{_LANES}", low | (high << _all(16))))


def joined_widened(low: tirx.PrimExpr, high: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the pairs of two vectors of float32 that hold numbers of bfloat16."""
    low, high = (tirx.reinterpret(f"uint32x{_LANES}", numbers) for numbers in (low, high))
    return bind(tirx.reinterpret(f"float32x{_LANES}", (low >> _all(16)) | high))


def only_first(pairs: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return pairs with 0 as their second elements."""
    bits = tirx.reinterpret(f"uint32x{_LANES}", pairs)
    return bind(tirx.reinterpret(f"float32x{_LANES}", bits & _all(0xFFFF)))


def pair_at(source: Half, index: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the pair of an element and the next one as a float32."""
    return tirx.reinterpret("float32", source.raw[Ramp(index, const(1), 2)])


def single_at(source: Half, index: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the pair of an element and 0 as a float32."""
    return tirx.reinterpret("float32", tirx.Cast("uint32", source.raw[index]))


def _all(value: int) -> tirx.PrimExpr:
    return Broadcast(tirx.const(value, "uint32"), _LANES)


def bits_of(source: Half, index: tirx.PrimExpr, lanes: int, number: Extent | None) -> tirx.PrimExpr:
    """Return the bits of consecutive elements, with 0 in the lanes from ``number`` on."""
    ramp = Ramp(index, const(1), lanes)
    if number is None or (isinstance(number, int) and number >= lanes):
        return bind(source.raw[ramp])
    mask = tirx.LT(Ramp(const(0), const(1), lanes), Broadcast(as_expr(number), lanes))
    loaded = bind(masked_load(source.raw, ramp, mask))
    row = b.scratch(lanes, "uint16")  # for the reason that Vectors.load has
    own = Ramp(const(0), const(1), lanes)
    zero = Broadcast(tirx.const(0, "uint16"), lanes)
    T.buffer_store(row, tirx.Select(mask, loaded, zero), [own])
    return row[own]


class _CopiesOfPairs(Copies):
    """A copy of A, ``[row][pair]``."""

    p: Pairs

    def copy_row(
        self, source: tuple, place: tirx.Buffer, target: tirx.PrimExpr, depth: tuple
    ) -> None:
        (a, a0, row), (k0, size) = source, depth
        start = bind(a0 + row * self.p.elements)

        def copy(k: tirx.PrimExpr, number: Extent | None) -> None:
            # What a vector writes beyond a row is not read.
            self.vectors.store(place, target + k, self.p.along(a, start, k0 + k, number))

        self.vectors.each(size, copy)


class _StripsOfPairs(Strips):
    """A copy of a transposed A, ``[strip][pair][row]``."""

    p: Pairs

    @property
    def copied(self) -> Vectors:
        return self.vectors

    def part(
        self,
        a: Half,
        a0: tirx.PrimExpr,
        k: tirx.PrimExpr,
        row: tirx.PrimExpr,
        number: Extent | None,
    ) -> tirx.PrimExpr:
        return self.p.across(a, a0 + row, self.p.rows, k, number)


@dataclass(frozen=True)
class PairPacking(Packing):
    """Panels of pairs of B, ``[pair][width]``."""

    p: Pairs

    def prefetch(self, source: tuple, start: tirx.PrimExpr, part: tuple) -> Ahead:
        """Return no prefetches."""
        return Ahead(0, lambda i, j: None)

    def pack(self, source: tuple, target: tuple, depth: tuple, group: int = 1) -> None:
        (bb, b0, j), (panels, base, step), (k0, size) = source, target, depth
        p, lanes, width, vectors = self.p, self.vectors.lanes, self.width, self.vectors
        if not p.transpose_b:
            places = [(i, v * lanes) for i in range(group) for v in range(self.tile_vectors)]
            columns = [bind(self.existing((j + i) * width + at)) for i, at in places]
            existing = [self.left(column) for column in columns]
            with b.serial(0, size) as k:
                to = bind(base + k * width)
                for (i, at), column, number in zip(places, columns, existing, strict=True):
                    pairs = p.across(bb, b0 + column, p.columns, k0 + k, number)
                    vectors.store(panels, to + i * step + at, pairs)
            return
        with b.serial(0, group) as i, b.serial(0, self.vectors_in(j + i)) as v:
            to = bind(base + i * step + v * lanes)
            column = bind((j + i) * width + v * lanes)
            left = self.left(column)

            def row(at: int, k: tirx.PrimExpr, number: Extent | None) -> tirx.PrimExpr:
                # Columns that do not exist repeat the last one.
                own = const(at) if left is None else tirx.min(const(at), left - 1)
                return p.along(bb, bind(b0 + (column + own) * p.elements), k, number)

            squares(
                vectors,
                size,
                lambda at, k, number: row(at, k0 + k, number),
                target=panels,
                to=to,
                width=width,
            )


def squares(
    vectors: Vectors,
    size: Extent,
    row: Callable,
    target: tirx.Buffer,
    to: tirx.PrimExpr,
    width: int,
) -> None:
    """Emit the copy of rows transposed, a square at a time."""

    def square(k: tirx.PrimExpr, number: Extent | None) -> None:
        rows = [row(i, k, number) for i in range(vectors.lanes)]
        for i, column in enumerate(vectors.transpose(rows)):
            if number is None or (isinstance(number, int) and i < number):
                vectors.store(target, to + (k + i) * width, column)
            elif not isinstance(number, int):
                with b.when(number > i):
                    vectors.store(target, to + (k + i) * width, column)

    vectors.each(int(size) if isinstance(size, tirx.IntImm) else size, square)
