"""The choice of variables by name, by position, or as variables."""

from __future__ import annotations

import numpy as np
import pytest
from programs import tensor

from relax_grad.ir.choices import Choices

X, W, B = (tensor(name, (2,)) for name in ("x", "weight", "bias"))


def choices(*variables, **options):
    return Choices("main", "parameter", [(var.name, var) for var in variables], **options)


def test_variables_names_and_positions_choose():
    params = choices(X, W, B, by_position=True)
    selected = params.select("wrt", [B, "x", np.int64(1)])
    assert [var.name for var in selected] == ["bias", "x", "weight"]
    assert all(var.same_as(other) for var, other in zip(selected, (B, X, W), strict=True))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["weigth"], "wrt: main has no parameter 'weigth'; did you mean weight?"),
        (["q"], "wrt: main has no parameter 'q'; there are x, weight, bias"),
        ([3], "wrt: main has no parameter 3; there are x, weight, bias"),
        ([-1], "wrt: main has no parameter -1; there are"),
        ([True], "wrt: main has no parameter True; there are"),
        ([1.0], "wrt: main has no parameter 1.0; there are"),
        ([tensor("x", (2,))], "it is a different variable with the name x, so give the name or a"),
        (["x", 0], "wrt: x appears more than once"),
    ],
)
def test_items_that_choose_nothing_or_twice(items, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        choices(X, W, B, by_position=True).select("wrt", items)


def test_a_name_of_two_is_ambiguous():
    namesakes = X, tensor("x", (3,))
    with pytest.raises(ValueError, match=r"'x' is ambiguous, as 2 parameters of main .* position"):
        choices(*namesakes, by_position=True).find("wrt", "x")
    with pytest.raises(ValueError, match="give the variable itself"):
        choices(*namesakes).find("wrt", "x")
    assert choices(*namesakes).find("wrt", namesakes[1]).same_as(namesakes[1])


def test_positions_choose_only_where_they_may():
    with pytest.raises(ValueError, match="main has no parameter 0"):
        choices(X).find("wrt", 0)
