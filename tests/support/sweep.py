"""What the long sweeps over random cases share.

Compiling takes most of the time of a case, and a module of many functions compiles in a fraction of the
time that they take one after the other. So a sweep draws lists of cases, and checks the cases of a list
together, by :func:`relax_grad.testing.check_many_against_torch` for example.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: The cases that are compiled together.
BATCH = 25

#: What to compile for: LLVM's optimizations take a third of the time, and are not what is tested here.
TARGET = {"kind": "llvm", "opt-level": 0}


def at_length(cases: int) -> settings:
    """The settings of a test that takes ``batches``, and checks this many cases in all."""
    return settings(
        max_examples=-(-cases // BATCH),
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


def batches(case: st.SearchStrategy) -> st.SearchStrategy:
    """Lists of cases to check together."""
    return st.lists(case, min_size=BATCH, max_size=BATCH)
