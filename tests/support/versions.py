"""What the oldest TVM that is supported cannot do, as marks of the tests that need it; docs/limits.md says more."""

from __future__ import annotations

import pytest
import tvm

IS_OLDEST = tvm.__version__.startswith("0.26.")

#: Operators that do not compile with it.
WITHOUT = {"relax.vision.roi_align", "relax.vision.roi_pool"} if IS_OLDEST else set()

REGIONS = pytest.mark.xfail(
    IS_OLDEST,
    reason="TVM 0.26 does not compile reductions whose extents are read from a tensor",
    strict=True,
)
UNEVEN_WINDOWS = pytest.mark.xfail(
    IS_OLDEST,
    reason="TVM 0.26 lowers sums wrongly over windows of several sizes",
    strict=True,
)
CONDITIONAL_EXTENTS = pytest.mark.xfail(
    IS_OLDEST,
    reason="TVM 0.26 copies no function with such extents, and its functions cannot be copied otherwise",
    strict=True,
)
NESTED_SYMBOLIC_CONDITIONALS = pytest.mark.xfail(
    IS_OLDEST,
    reason="zeros_like of a copied branch stays as it is on TVM 0.26, and does not compile",
    strict=True,
)
