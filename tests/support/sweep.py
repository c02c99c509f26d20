"""Common settings of the long sweeps over random cases.

Compilation takes most of the time of a case, and a module of many functions compiles much faster than the functions
one by one. So a sweep draws lists of cases and checks the cases of a list together, for example with
:func:`relax_grad.testing.check_many_against_torch` or ``kernels.check_kernels``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from relax_grad.testing._program import without_assertions
from relax_grad.testing.fuzz.differential import TARGET

__all__ = ["BATCH", "SHARE", "TARGET", "at_length", "batches", "share", "share_of_each"]

#: The number of cases that are compiled together.
BATCH = 25

#: The share of its cases that a sweep checks, for slow machines; every run checks the same cases.
SHARE = float(os.environ.get("SWEEP_SHARE", "1"))


def at_length(cases: int, batch: int = BATCH, **more) -> Callable:
    """Return the settings of a test that takes ``batches`` and checks this many cases in all, or their ``SHARE``.

    ``more`` are further settings. The first batch holds only the simplest case, so at least two batches run. Kernels
    are compiled without argument assertions. A failing batch is not shrunk, which would take longer than the sweep:
    the error names the case.
    """

    number = math.ceil(cases / batch)

    def decorate(test):
        test.hypothesis.inner_test = without_assertions()(test.hypothesis.inner_test)
        return settings(
            max_examples=min(number, max(2, math.ceil(number * SHARE))),
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.large_base_example,
            ],
            **more,
        )(test)

    return decorate


def share(cases: Sequence) -> Sequence:
    """Return an evenly spaced ``SHARE`` of a complete list of cases."""
    return cases[:: round(1 / SHARE)]


def share_of_each(cases: Sequence, kind: Callable) -> list:
    """Return the first case of each kind, and an evenly spaced ``SHARE`` of the others."""
    first = {kind(case): case for case in reversed(cases)}.values()
    taken = {*map(id, first), *(id(case) for case in share(cases))}
    return [case for case in cases if id(case) in taken]


def batches(case: st.SearchStrategy, batch: int = BATCH) -> st.SearchStrategy:
    """Return lists of cases to check together."""
    return st.lists(case, min_size=batch, max_size=batch)
