"""The checks of arguments that all parts share."""

from __future__ import annotations

import numpy as np
import pytest

from relax_grad._validation import (
    alternatives,
    check_integer,
    is_integer,
    matches,
    matching,
    near_names,
)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_become_integers_of_python(value):
    assert is_integer(value)
    number = check_integer("n", value, 3, 3)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, np.float32(3), "3", None, [3]])
def test_other_values_are_no_integers(value):
    assert not is_integer(value)
    with pytest.raises(TypeError, match="n must be an integer, but it is"):
        check_integer("n", value, 1)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((0,), "an integer from 0"),
        ((1,), "a positive integer"),
        ((7,), "an integer from 7"),
        ((0, 5), "an integer from 0 to 5"),
    ],
)
def test_an_error_says_the_bounds(bounds, expected):
    value = bounds[0] - 1
    with pytest.raises(ValueError, match=f"^n must be {expected}, but it is {value}$"):
        check_integer("n", value, *bounds)


def test_an_error_says_the_unit_and_other_values():
    with pytest.raises(TypeError, match=r"^n must be a number of bytes or None, but it is 'x'"):
        check_integer("n", "x", 1, of="bytes", also="None")
    with pytest.raises(TypeError, match=r"^n must be an integer, but it is 0\.5"):
        check_integer("n", 0.5)
    with pytest.raises(ValueError, match=r"^n must be an integer from 0 to 5, but it is 6"):
        check_integer("n", 6, 0, 5)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.*", True),
        ("a.b", "A.*", False),
        ("a[0]", "a[0]", True),  # a name that is no pattern
        ("a0", "a[0]", True),
        ("a.b", "a", False),
    ],
)
def test_names_match_patterns(name, pattern, expected):
    assert matches(name, pattern) == expected


def test_a_pattern_chooses_names_in_their_order():
    assert matching("wrt", "*.w", ["b.w", "a.b", "a.w"], "parameter") == ["b.w", "a.w"]


def test_a_pattern_without_a_match_suggests_near_names():
    names = ["layer.weight", "layer.bias", *(f"other{i}" for i in range(9))]
    with pytest.raises(
        ValueError,
        match=r"^wrt: no parameter matches 'layer.wieght', or none is left; did you mean "
        r"layer.weight",
    ):
        matching("wrt", "layer.wieght", names, "parameter", "or none is left")
    with pytest.raises(
        ValueError, match=r"no weight matches 'z'; there are 11, such as layer.weight, .*other5$"
    ):
        matching("wrt", "z", names, "weight")
    assert alternatives("z", []) == "there are none"
    assert near_names("other", ["x", "other1"]) == ["other1"]
