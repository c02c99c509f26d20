"""Matrix products that share the panels of their second factor.

Products of few rows take a large part of their time to pack it. If several of them have the same
second factor, as the steps of a recurrent cell, the first one also returns the panels, and the
others read them. A constant factor is packed by the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, const
from ..language.halves import Tensor
from ._generator import Generator
from ._plans import PackedPlan
from ._ways import is_in_one_thread, nanoseconds
from .panels import Early, Packed
from .plan import packed_plan, plan
from .product import Matmul

#: The rows up to which packing takes a part of a product's time that is worth sharing.
_MOST_ROWS = 128

#: The rows from which a tile of panels is faster than sums over the lanes of vectors along k.
_FEWEST_ROWS = 10

#: The minimum number of columns: the width of a panel.
_FEWEST_COLUMNS = 32

#: The fewest products that share panels: if they would pack it themselves, and if they would read
#: the factor in place. The first one waits until all panels are packed.
_FEWEST, _FEWEST_IN_PLACE = 4, 8


def fewest_sharing(product: Matmul, cpu: CPU) -> int | None:
    """Return the number of products from which sharing their panels takes less time; None if it
    never does.

    The products have the second factor in common, and the same number of rows.
    """
    if not product.is_static or product.batch != 1 or product.transpose_a:
        return None
    if product.rows > _MOST_ROWS or product.columns < _FEWEST_COLUMNS:
        return None
    if plan(product, cpu).way == "packed":
        return _FEWEST
    # Fewer registers keep vectors along k as busy as tiles.
    is_slow = product.transpose_b and cpu.registers >= 32
    return _FEWEST_IN_PLACE if is_slow and product.rows >= _FEWEST_ROWS else None


def panels_shape(product: Matmul, cpu: CPU) -> list[Extent]:
    """Return the shape of the panels of a product's second factor."""
    return Generator(packed_plan(product, cpu)).packing.shape


def packed(matrix: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the panels of a matrix ``[k, n]``, in the shape that :func:`panels_shape` returns."""
    number, depth, width = shape
    columns = np.zeros((depth, number * width), matrix.dtype)
    columns[:, : matrix.shape[1]] = matrix
    return np.ascontiguousarray(columns.reshape(depth, number, width).transpose(1, 0, 2))


def matmul_with_panels(
    product: Matmul, cpu: CPU, shapes: Sequence[Sequence[Extent]]
) -> tirx.PrimFunc:
    """Return the kernel of the first product: a function of A, B, C and panels (float32) that sets
    C to the product of A and B, and panels to the panels of B.

    Parameters
    ----------
    product : Matmul
        The product.
    cpu : CPU
        The target CPU.
    shapes : Sequence
        The shapes of A, B and C, which may have more axes than the product.
    """
    params = b.floats("ABCP", [*shapes, panels_shape(product, cpu)])

    def emit(a: Tensor, bb: Tensor, c: Tensor, panels: tirx.Buffer) -> None:
        generator = Generator(_plan(product, cpu))
        with b.one_thread(generator.plan.cores == 1):
            early = Early(generator.packing, bb, const(0), b.parallel, panels)
            generator.emit_single(a, early, c)

    return b.prim_func("matmul_with_panels", params, emit)


def matmul_of_panels(
    product: Matmul, cpu: CPU, shapes: Sequence[Sequence[Extent]]
) -> tirx.PrimFunc:
    """Return the kernel of a later product: a function of A, the panels of B, and C (float32) that
    sets C to the product of A and B.

    Parameters
    ----------
    product : Matmul
        The product.
    cpu : CPU
        The target CPU.
    shapes : Sequence
        The shapes of A, the panels and C. Those of A and C may have more axes than the product's.
    """
    params = b.floats("APC", shapes)

    def emit(a: Tensor, panels: tirx.Buffer, c: Tensor) -> None:
        own = _plan(product, cpu)
        generator = Generator(own)
        with b.one_thread(own.cores == 1):
            packed = Packed(generator.packing, panels, prefetch=not own.is_near)
            generator.emit_single(a, packed, c)

    return b.prim_func("matmul_of_panels", params, emit)


def _plan(product: Matmul, cpu: CPU) -> PackedPlan:
    tuning = cpu.tuning
    is_small = nanoseconds(product, tuning) <= tuning.tasks.one_thread_ns
    own = replace(cpu, cores=1) if is_small else cpu
    return packed_plan(product, own, divides_depth=not is_in_one_thread(product, tuning))
