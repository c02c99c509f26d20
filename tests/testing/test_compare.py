"""The comparison of arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relax_grad.testing._compare import difference


def test_the_largest_difference_and_where_it_is():
    result, wanted = np.array([[1.0, 2.0], [3.0, -7.0]]), np.array([[1.0, 2.5], [3.0, -8.0]])
    worst = difference(result, wanted)
    assert (worst.error, worst.at, worst.actual, worst.wanted) == (1 / 8, "1, 1", -7.0, -8.0)


def test_small_numbers_are_compared_as_they_are():
    assert difference(np.array(0.25), np.array(0.5)).error == 0.25


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinities_and_nan_equal_only_themselves(value):
    array = np.array([1.0, value, 3.0])
    assert difference(array, array).error == 0.0
    for result, wanted in ((np.ones(3), array), (array, np.ones(3)), (array, np.full(3, np.inf))):
        if not np.array_equal(result, wanted, equal_nan=True):
            worst = difference(result, wanted)
            assert not worst.error <= 1e300
    assert math.isnan(difference(np.array([np.nan, 5.0]), np.array([1.0, 2.0])).error)


def test_arrays_of_nothing_and_of_half_precision():
    assert difference(np.zeros((0, 3)), np.zeros((0, 3))).error == 0.0
    assert difference(np.float16([60000]), np.float16([-60000])).error == 2.0
