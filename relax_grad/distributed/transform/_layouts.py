"""Layouts of tensors of which each worker has a part, and products of extents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm import relax, tirx
from tvm_ffi import structural_equal

from ...ir.compat import Analyzer


@dataclass(frozen=True)
class Divided:
    """The layout of a tensor that is divided along one axis among W workers.

    The axis consists of equal parts, each of which is divided: an index along it is
    ``(part * W + worker) * size + offset``.

    Attributes
    ----------
    axis : int
        The axis.
    parts, size : int or tirx.PrimExpr
        The number of parts, and the extent of a worker's share of each.
    """

    axis: int
    parts: tirx.PrimExpr | int
    size: tirx.PrimExpr | int

    @property
    def local(self) -> tirx.PrimExpr | int:
        """The extent of a worker's axis."""
        return self.parts * self.size

    def moved(self, axis: int) -> Divided:
        """Return this layout at another axis."""
        return Divided(axis, self.parts, self.size)

    def repeated(self, times: int) -> Divided:
        """Return this layout of an axis with as many consecutive copies of each index."""
        return self if times == 1 else Divided(self.axis, self.parts, self.size * times)

    def is_like(self, other: Divided) -> bool:
        """Tell whether two layouts divide their axes in the same way."""
        return is_equal(self.parts, other.parts) and is_equal(self.size, other.size)


def is_equal(a: tirx.PrimExpr | int, b: tirx.PrimExpr | int) -> bool:
    """Tell whether two extents are known to be equal."""
    a, b = (tirx.const(extent, "int64") if isinstance(extent, int) else extent for extent in (a, b))
    return bool(Analyzer().can_prove_equal(a, b))


def as_int(extent: tirx.PrimExpr | int) -> int | None:
    """Return a constant extent as an integer, or None."""
    if isinstance(extent, int):
        return extent
    return int(extent) if isinstance(extent, tirx.IntImm) else None


def text(extent: tirx.PrimExpr | int) -> str:
    """Return an extent as errors show it."""
    known = as_int(extent)
    return str(extent if known is None else known)


def quotient(numerator: Iterable, denominator: Iterable) -> tirx.PrimExpr | int | None:
    """Return the quotient of two products of extents; None if it is not known to be an
    integer."""
    above, below = _factors(numerator), _factors(denominator)
    count, symbols = above
    divisor, others = below
    symbols = list(symbols)
    for other in others:
        at = next((i for i, s in enumerate(symbols) if structural_equal(s, other)), None)
        if at is None:
            return None
        symbols.pop(at)
    if divisor == 0 or count % divisor:
        return None
    result = count // divisor
    for symbol in symbols:
        result = symbol * result
    return result


def _factors(extents: Iterable) -> tuple[int, list]:
    """Return the constant factor and the other factors of a product."""
    count, symbols, pending = 1, [], list(extents)
    while pending:
        factor = pending.pop()
        known = as_int(factor)
        if known is not None:
            count *= known
        elif isinstance(factor, tirx.Mul):
            pending += [factor.a, factor.b]
        else:
            symbols.append(factor)
    return count, symbols


def local_type(kind: relax.TensorType, layout: Divided | None) -> relax.TensorType:
    """Return the type of a worker's part of a tensor."""
    if layout is None:
        return kind
    extents = list(kind.shape.values)
    extents[layout.axis] = layout.local
    return relax.TensorType(extents, kind.dtype, kind.vdevice)
