"""What the long sweeps over random cases share.

Compiling takes most of the time of a case, and a module of many functions compiles in a fraction of the
time that they take one after the other. So a sweep draws lists of cases, and checks the cases of a list
together, by :func:`relax_grad.testing.check_many_against_torch` or ``kernels.check_kernels`` for example.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from relax_grad.testing._program import without_assertions
from relax_grad.testing.fuzz.differential import TARGET

__all__ = ["BATCH", "SHARE", "TARGET", "at_length", "batches", "share"]

#: The cases that are compiled together.
BATCH = 25

#: How many of its cases a sweep checks: a machine that has no hour for them takes a share, the same at every run.
SHARE = float(os.environ.get("SWEEP_SHARE", "1"))


def at_length(cases: int, batch: int = BATCH, **more) -> Callable:
    """The settings of a test that takes ``batches``, and checks this many cases in all, or their ``SHARE``.

    ``more`` are further settings. The first batch that is drawn holds the simplest case only, so the least are two.
    Kernels assert nothing of their arguments. A batch that fails is not made smaller, which would take longer than
    the sweep: the error names the case.
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
    """Return the ``SHARE`` of cases that are all there are, spread evenly among them."""
    return cases[:: round(1 / SHARE)]


def batches(case: st.SearchStrategy, batch: int = BATCH) -> st.SearchStrategy:
    """Lists of cases to check together."""
    return st.lists(case, min_size=batch, max_size=batch)
