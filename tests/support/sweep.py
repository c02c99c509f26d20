"""Common settings of the long sweeps over random cases.

Compilation takes most of the time of a case, and a module of many functions compiles much faster
than the functions one by one. So a sweep draws lists of cases and checks the cases of a list
together, for example with :func:`relax_grad.testing.check_many_against_torch` or
``kernels.check_kernels``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import tvm
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from slices import PART, PARTS

from relax_grad.testing._program import UNOPTIMIZED, without_assertions

__all__ = [
    *("BATCH", "SHARE", "TARGET"),
    *("at_length", "batches", "one_by_one", "share", "share_of_each"),
]

#: The target of tests of numbers: LLVM's optimizations take a third of the time and are not under
#: test.
TARGET = tvm.target.Target(UNOPTIMIZED)

#: The number of cases that are compiled together.
BATCH = 25

#: The share of its cases that a sweep checks, for slow machines; every run checks the same cases.
SHARE = float(os.environ.get("SWEEP_SHARE", "1"))


def _size(batch: int) -> int:
    """Return the number of cases of a batch: a share of a sweep is fewer cases, not only fewer
    batches."""
    return batch if SHARE == 1 else min(batch, 8)


def at_length(cases: int, batch: int = BATCH, **more) -> Callable:
    """Return the settings of a test that takes ``batches`` and checks this many cases in all, or
    their ``SHARE``.

    ``more`` are further settings. The first batch is only the simplest case, so at least two
    batches run. Kernels are compiled without argument assertions. A failing batch is not shrunk,
    which would take longer than the sweep: the error names the case. A part of the sweeps
    (:mod:`slices`) has a part of the batches, drawn from a seed of its own, or the whole test if
    the batches are too few.
    """
    number = math.ceil(cases * SHARE / _size(batch))
    is_divided = number >= 4 * PARTS > 4
    if is_divided:
        number = math.ceil(number / PARTS)

    def decorate(test):
        test.hypothesis.inner_test = without_assertions()(test.hypothesis.inner_test)
        if is_divided:
            test = seed(PART)(test)
        test = settings(
            max_examples=max(2, number if SHARE == 1 else number + 1),
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.large_base_example,
            ],
            **more,
        )(test)
        test.divides_itself = is_divided
        return test

    return decorate


def one_by_one(cases: int, **more) -> settings:
    """Return the settings of a long test that compiles each of its drawn cases alone: so many, or
    their ``SHARE``.

    ``more`` are further settings. At least three cases are drawn, of which the first is the
    simplest.
    """
    return settings(max_examples=max(3, math.ceil(cases * SHARE)), deadline=None, **more)


def share(cases: Sequence) -> Sequence:
    """Return an evenly spaced ``SHARE`` of a complete list of cases."""
    return cases[:: round(1 / SHARE)]


def share_of_each(cases: Sequence, kind: Callable) -> list:
    """Return the first case of each kind, and an evenly spaced ``SHARE`` of the others."""
    first = {kind(case): case for case in reversed(cases)}.values()
    taken = {*map(id, first), *(id(case) for case in share(cases))}
    return [case for case in cases if id(case) in taken]


def batches(case: st.SearchStrategy, batch: int = BATCH) -> st.SearchStrategy:
    """Return lists of cases to check together, in which equal cases stand once."""
    size = _size(batch)
    cases = st.lists(case, min_size=size, max_size=size)
    return cases.map(lambda drawn: list({repr(value): value for value in drawn}.values()))
