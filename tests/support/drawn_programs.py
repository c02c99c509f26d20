"""Random programs for Hypothesis.

A seed determines a program, instead of one draw for each choice: a program with 40 bindings takes
hundreds of choices, which exceeds the limit of Hypothesis for a batch of programs. A program prints
as its seed, length and features.
"""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import strategies as st

from relax_grad.testing.fuzz.programs import FEATURES, random_program
from relax_grad.testing.fuzz.script import Program


def programs(features: Collection[str] = FEATURES) -> st.SearchStrategy[Program]:
    """Return programs of 5 to 40 statements that have some of the features."""
    return st.builds(
        random_program,
        st.integers(0, 2**32 - 1),
        st.one_of(st.integers(5, 15), st.integers(5, 40)),
        st.sets(st.sampled_from(sorted(features))) if features else st.just(frozenset()),
    )
