"""Conditions of Select that contain a Select take a multiple of the time at each level.

The simplifier visits a condition on its own, and again for each branch.

Seen: AssertionError
"""

import time

from tvm import tirx
from tvm.sym import Analyzer

x = tirx.Var("x", "float32")


def seconds(levels: int) -> float:
    condition = x < tirx.const(1.0, "float32")
    for level in range(levels):
        chosen = tirx.Select(condition, x, x + tirx.const(float(level), "float32"))
        condition = chosen < tirx.const(1.0, "float32")
    start = time.process_time()
    Analyzer().simplify(condition)
    return time.process_time() - start


times = [seconds(levels) for levels in (2, 4, 6)]
# Twice and three times the levels should take some two and three times the time.
assert times[2] < 8 * times[0], times
