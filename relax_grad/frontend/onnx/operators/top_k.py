"""The largest or smallest elements of an axis."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax import op

from ....op import stop_gradient
from ...extremes import sort_key
from ..extents.values import is_symbolic
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Result,
    _constant,
    _converts,
    _dtype,
    _extents,
    _is_float,
    _rank,
)
from .symbolic import arithmetic, elements_of


@_converts("TopK")
def _top_k(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """NaN is larger than all numbers; ``k`` may be computed from extents."""
    data = inputs[0]
    axis, largest = attrs.get("axis", -1) % _rank(data), bool(attrs.get("largest", 1))
    k = attrs.get("k", 1) if opset < 10 else _count(inputs, attrs)
    if attrs.get("sorted", 1) != 1:
        return None
    key = _sort_key(bb, data)
    if is_symbolic(k):
        places = _first_places(bb, key, attrs, axis, k, largest=largest)
    else:
        places = bb.emit(op.topk(key, k, axis, "indices", largest, "int64"))
    return relax.Tuple([bb.emit(op.gather_elements(data, places, axis)), places])


def _count(inputs: Inputs, attrs: Attrs) -> tirx.Expr | int:
    """Return the number of elements that an operator returns, which may be computed from
    extents."""
    known = elements_of(inputs, attrs, 1)
    return int(_constant(inputs[1], "K").item()) if known is None else known.elements.item()


def _sort_key(bb: Builder, data: relax.Expr) -> relax.Expr:
    """Return data in an order that TVM's sort takes."""
    if _is_float(data):
        return sort_key(bb.emit, bb.emit(stop_gradient(data)))
    if _dtype(data) != "uint64":
        return data
    # The order of uint64 is the order of int64 with the highest bit inverted.
    signed = bb.emit(op.astype(data, "int64"))
    return bb.emit(op.bitwise_xor(signed, relax.const(-(2**63), "int64")))


def _first_places(
    bb: Builder, key: relax.Expr, attrs: Attrs, axis: int, k: tirx.Expr | int, largest: bool
) -> relax.Var:
    """Return the places of a symbolic number of the first elements in an order."""
    extent, extents = _extents(key)[axis], arithmetic(attrs)
    if not extents.proves(k <= extent):
        attrs["tvm_custom"]["require"](k <= extent, f"top-k takes {k} of {extent} elements")
        k = extents.least(k, extent)
    places = bb.emit(op.argsort(key, axis, largest, "int64"))
    return bb.emit(op.strided_slice(places, [axis], [0], [k], [1], assume_inbound=True))
