"""The element of an axis that an index selects, for any value of the index.

An index is out of bounds if it selects no element. Such an index never becomes an address: all
reads and writes by index use :func:`position`.
"""

from __future__ import annotations

from tvm import tirx

from .util import constant


def position(
    index: tirx.PrimExpr, extent: tirx.PrimExpr, mode: str
) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return the element of an axis that an index selects, and whether it exists.

    Parameters
    ----------
    index : PrimExpr
        An integer of any width, signed or not, with any value.
    extent : PrimExpr
        The extent of the axis, which may be 0.
    mode : str
        ``"fast"``: negative indices count from the end, as in NumPy and PyTorch; ``"clip"``: moved
        to the nearest element; ``"wrap"``: modulo the extent; ``"nan"``: used without change.

    Returns
    -------
    element : PrimExpr
        An int64, which is an element of the axis if ``inside`` holds.
    inside : PrimExpr
        The condition that the element exists.
    """
    extent = as_int64(extent)
    divisor = tirx.max(extent, 1)  # the axis may be empty
    signed = not str(index.ty.dtype).startswith("uint")
    if not signed:
        # Both branches select the same element as before, and fit into int64.
        index = index.astype("uint64")
        if mode == "wrap":
            index = tirx.truncmod(index, divisor.astype("uint64"))
        else:
            index = tirx.min(index, tirx.const(2**63 - 1, "uint64"))
    element = index.astype("int64")
    if mode == "clip":
        return tirx.max(tirx.min(element, extent - 1), 0), extent > 0
    if mode == "wrap":
        return tirx.floormod(element, divisor), extent > 0
    if mode == "fast" and signed:
        element = tirx.Select(element < 0, element + extent, element)
    elif mode not in ("fast", "nan"):
        raise ValueError(f"mode must be fast, clip, wrap or nan, but it is {mode!r}")
    return element, tirx.all(element >= 0, element < extent)


def filling(dtype: str, fill: str) -> tirx.PrimExpr:
    """Return the value for an out-of-bounds index: ``fill`` is ``"nan"`` (0 for integers) or
    ``"zero"``."""
    is_float = str(dtype).startswith(("float", "bfloat"))
    return constant(float("nan") if fill == "nan" and is_float else 0, dtype)


def as_int64(value: int | tirx.PrimExpr) -> tirx.PrimExpr:
    """Convert an index or an extent to an expression of dtype int64."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")
