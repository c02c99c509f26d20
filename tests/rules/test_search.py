"""Gradients of where over random broadcasts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_grad.testing import check_against_torch


@st.composite
def broadcasts(draw):
    """Draw three shapes that broadcast to one."""
    full = draw(st.lists(st.integers(0, 3), max_size=3))

    def part():
        shape = full[draw(st.integers(0, len(full))) :]
        return tuple(1 if draw(st.booleans()) else extent for extent in shape)

    return part(), part(), part()


def check(torch, shapes):
    rng = np.random.default_rng(0)
    cond, x1, x2 = (rng.normal(size=shape) for shape in shapes)
    check_against_torch(
        "relax.where",
        [np.asarray(cond > 0), x1, x2],
        lambda torch, cond, x1, x2: torch.where(cond, x1, x2),
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(shapes=broadcasts())
def test_where(torch, shapes):
    check(torch, shapes)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(shapes=broadcasts())
def test_where_many(torch, shapes):
    check(torch, shapes)
