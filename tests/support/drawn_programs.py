"""Random programs as Hypothesis draws them.

A program is drawn by a seed, not choice by choice: one with 40 bindings takes hundreds of choices, which is more
than Hypothesis keeps for a batch of programs. It prints as its seed, length and features.
"""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import strategies as st

from relax_grad.testing.fuzz.programs import FEATURES, random_program
from relax_grad.testing.fuzz.script import Program


def programs(features: Collection[str] = FEATURES) -> st.SearchStrategy[Program]:
    """Programs of 5 to 40 statements that have some of the features."""
    return st.builds(
        random_program,
        st.integers(0, 2**32 - 1),
        st.one_of(st.integers(5, 15), st.integers(5, 40)),
        st.sets(st.sampled_from(sorted(features))) if features else st.just(frozenset()),
    )
