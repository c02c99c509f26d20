"""Limits of the oldest supported TVM, as marks of the affected tests; docs/limits.md has the
details."""

from __future__ import annotations

import pytest
import tvm

IS_OLDEST = tvm.__version__.startswith("0.26.")

#: Operators that it cannot compile.
WITHOUT = {"relax.vision.roi_align", "relax.vision.roi_pool"} if IS_OLDEST else set()


def _fails(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(IS_OLDEST, reason=f"TVM 0.26 {reason}", strict=True)


REGIONS = _fails("does not compile reductions whose extents are read from a tensor")
UNEVEN_WINDOWS = _fails("lowers sums wrongly over windows of several sizes")
SCALAR_PARAMETERS = _fails("does not parse back a tensor function that takes extents of int64")
CONDITIONAL_EXTENTS = _fails(
    "copies no function with such extents, and its functions cannot be copied otherwise"
)
NESTED_SYMBOLIC_CONDITIONALS = _fails(
    "does not compile zeros_like of a copied branch, which stays as it is"
)
SYMBOLIC_FUSION = _fails(
    "loses a symbolic extent where it fuses calls, or fails to copy a tensor function that "
    "takes one"
)
