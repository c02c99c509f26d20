"""Batches of matrix products: ``C[m, n] = sum over k of A[m, k] B[k, n]``, with either factor
possibly transposed.

B is packed into panels as wide as a tile, so that a tile reads it sequentially. A is read in place,
or each task copies its part of A, if A is transposed or its rows would share few sets of a cache. A
tile of C is held in registers over a stretch of k whose panel stays in the first-level cache. This
is the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx

from ..target import CPU
from . import _tasks
from . import builder as b
from ._few_rows import FewRows
from ._generator import Generator, GeneratorOfPairs
from ._pairs import Pairs, imported, takes_pairs
from ._product import WAYS, Bias, Matmul, is_one
from ._turned import emit_turned, is_turned
from .builder import Extent

__all__ = ["WAYS", "Matmul", "matmul"]

#: The rows up to which packing B costs more than it saves, if their number is symbolic.
_FEW_SYMBOLIC = 8


def matmul(
    product: Matmul,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    *,
    way: str | None = None,
    adds_bias: bool = False,
) -> tirx.PrimFunc:
    """Return the kernel: a function of A, B and C (float32) that sets C to the product of A and B.

    With ``adds_bias``, it is a function of A, B, a bias and C, and adds the bias to each row of the
    product before it is rounded, if C is in half precision.

    The order of each sum depends on the shapes alone, not on the number of threads.

    Parameters
    ----------
    product : Matmul
        The products.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters, if they differ from :meth:`Matmul.shapes`, with a bias of as
        many numbers as C has columns.
    way : str, optional
        One of :data:`WAYS` that the product allows. By default, it is chosen by the sizes, the
        layouts and the CPU.
    adds_bias : bool
        Whether a bias is added; not if the way is ``"turned"``.
    """
    if way is not None and (not product.allows(way) or (way == "turned" and adds_bias)):
        with_bias = " with a bias" if adds_bias else ""
        raise ValueError(f"{product}{with_bias} does not allow {way!r}")
    names, own = list("ABC"), product.shapes()
    if adds_bias:
        names.insert(2, "bias")
        own.insert(2, [product.columns])
    is_column = is_one(product.columns) and not is_one(product.rows)
    turns = is_turned(product, cpu) and not adds_bias if way is None else way == "turned"

    def body(a, bb, *others) -> None:
        *biases, c = others
        bias = Bias(biases[0], is_single=is_column) if adds_bias else None
        if is_column:
            _emit(product.turned(), cpu, way, (bb, a, c), bias)
        elif turns:
            emit_turned(
                product, cpu, (a, bb, c), lambda own, way, both: _emit(own, cpu, way, both, None)
            )
        else:
            _emit(product, cpu, way, (a, bb, c), bias)

    return b.prim_func("matmul", b.floats(names, shapes or own), body)


def _emit(p: Matmul, cpu: CPU, way: str | None, tensors: tuple, bias: Bias | None) -> None:
    most = p.most_few_rows(cpu)
    is_packed = way == "packed" if way else isinstance(p.rows, int) and p.rows > most
    # B that is read in place is divided by its columns.
    is_undivided = is_one(p.batch) and isinstance(p.rows, int) and not is_packed
    is_undivided &= isinstance(p.columns, int) and p.columns <= cpu.lanes
    is_small = _tasks.is_in_one_thread(p, cpu, is_packed) or is_undivided
    if is_small:
        cpu = replace(cpu, cores=1)

    def few() -> None:
        own = cpu if is_one(p.batch) else replace(cpu, cores=1)
        rows = FewRows(p.rows, p.columns, p.depth, p.transpose_a, p.transpose_b, own, bias)
        a, bb, c = tensors
        rows.emit(a, bb, c, p.batch, p.starts)

    def many() -> None:
        divides = not is_small and bias is None
        if takes_pairs(cpu, *tensors[:2]):
            with imported():
                GeneratorOfPairs(Pairs.of(p), cpu, bias, divides_depth=divides).emit(*tensors)
        else:
            Generator(p, cpu, bias, divides_depth=divides).emit(*tensors)

    with b.one_thread(is_small):
        if way is not None:
            (few if way == "few rows" else many)()
        elif isinstance(p.rows, int):
            (few if p.rows <= most else many)()
        elif p.transpose_a or not isinstance(p.columns, int):
            many()
        else:
            b.either(p.rows <= min(most, _FEW_SYMBOLIC), few, many)
