"""Conditions on symbolic extents."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from relax_grad.ir.extent_checks import (
    ExtentCheck,
    condition_of,
    extent_checks,
    with_extent_checks,
)

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        (N * M > 1, lambda n, m: n * m > 1),
        (tirx.NE((N + 3) // 2, M), lambda n, m: (n + 3) // 2 != m),
        (tirx.max(N - M, 1) <= N % 3, lambda n, m: max(n - m, 1) <= n % 3),
        (tirx.min(N, M) >= 2, lambda n, m: min(n, m) >= 2),
        (tirx.EQ(N, M), lambda n, m: n == m),
        (N < M, lambda n, m: n < m),
    ],
)
def test_conditions_have_the_value_of_the_expression(condition, wanted):
    check = ExtentCheck(condition_of(condition), "reason")
    for n in range(5):
        for m in range(5):
            if wanted(n, m):
                check.check({"n": n, "m": m})
            else:
                with pytest.raises(ValueError, match=r"reason, but the inputs have [nm] = "):
                    check.check({"n": n, "m": m})
    check.check({"n": 0})  # the other extent is not known


def test_a_function_keeps_its_conditions():
    x = relax.Var("x", relax.TensorType((N,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(x)
    module = bb.get()
    assert extent_checks(module, "main") == ()
    check = ExtentCheck(condition_of(N > 1), "it needs two rows")
    other = ExtentCheck(condition_of(tirx.NE(N, tirx.IntImm("int64", 7))), "it takes no seven rows")
    module["main"] = with_extent_checks(module["main"], [check, other, check])
    assert extent_checks(module, "main") == (check, other)
    with pytest.raises(ValueError, match="it needs two rows, but the inputs have n = 1"):
        extent_checks(module, "main")[0].check({"n": 1})


def test_other_expressions_are_no_conditions():
    assert condition_of(tirx.Select(N > 1, N, M) > 1) is None
