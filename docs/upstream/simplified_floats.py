"""The simplifier takes floating-point numbers for real ones.

``x == x`` becomes true, ``not x < y`` becomes ``y <= x``, ``x < y or x >= y`` becomes true,
``(x + c) - c`` becomes ``x``, ``x - (x + y)`` becomes ``-y``, and ``0 * x`` becomes 0.

Seen: AssertionError
"""

import tvm
from tvm import tirx

try:
    from tvm.sym import Analyzer
except ImportError:
    from tvm.arith import Analyzer

x, y = (tirx.Var(name, "float32") for name in "xy")
for expr in (tirx.EQ(x, x), tirx.Sub(tirx.Add(x, y), x), tirx.Not(tirx.LT(x, y))):
    tvm.ir.assert_structural_equal(Analyzer().simplify(expr), expr, map_free_vars=True)
