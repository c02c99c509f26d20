"""Batches of matrix products: ``C[m, n] = sum over k of A[m, k] B[k, n]``, with either factor
possibly transposed.

B is packed into panels as wide as a tile, so that a tile reads it sequentially. A is read in place,
or each task copies its part of A, if A is transposed or its rows would share few sets of a cache. A
tile of C is held in registers over a stretch of k whose panel stays in the first-level cache. This
is the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent
from ..language.halves import Half, Tensor
from ._amx_products import TileGenerator
from ._few_rows import FewRows
from ._generator import Generator, GeneratorOfPairs
from ._plans import MatmulPlan
from ._turned import emit_turned
from .pairs import imported
from .plan import check_way, plan
from .product import WAYS, Bias, Matmul

__all__ = ["WAYS", "Matmul", "matmul"]


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
    check_way(product, way, adds_bias)
    names, own = list("ABC"), product.shapes()
    if adds_bias:
        names.insert(2, "bias")
        own.insert(2, [product.columns])

    def body(a: Tensor, bb: Tensor, *others: tirx.Buffer) -> None:
        *biases, c = others
        dtypes = tuple(_dtype_of(factor) for factor in (a, bb))
        own = plan(product, cpu, way=way, adds_bias=adds_bias, dtypes=dtypes)
        bias = Bias(biases[0], is_single=own.swaps) if adds_bias else None
        _emit(own, (bb, a, c) if own.swaps else (a, bb, c), bias)

    return b.prim_func("matmul", b.floats(names, shapes or own), body)


def _dtype_of(factor: Tensor) -> str:
    """Return the dtype in which a factor is stored."""
    return factor.dtype if isinstance(factor, Half) else "float32"


def _emit(own: MatmulPlan, tensors: tuple, bias: Bias | None = None) -> None:
    """Emit a plan."""
    if own.transposed is not None:
        emit_turned(own, own.transposed, tensors, _emit)
        return
    with b.one_thread(own.in_one_thread):
        if own.packed is None:
            _in_place(own, tensors, bias)
        elif own.in_place is None:
            _packed(own, tensors, bias)
        else:
            b.either(
                own.product.rows <= own.most_rows,
                lambda: _in_place(own, tensors, bias),
                lambda: _packed(own, tensors, bias),
            )


def _in_place(own: MatmulPlan, tensors: tuple, bias: Bias | None) -> None:
    assert own.in_place is not None
    a, bb, c = tensors
    FewRows(own.in_place, bias).emit(a, bb, c, own.product.batch, own.product.starts)


def _packed(own: MatmulPlan, tensors: tuple, bias: Bias | None) -> None:
    assert own.packed is not None
    if own.tiles:
        with amx.imported():
            TileGenerator(own.packed, bias).emit(*tensors)
    elif own.pairs:
        with imported():
            GeneratorOfPairs(own.packed, bias).emit(*tensors)
    else:
        Generator(own.packed, bias).emit(*tensors)
