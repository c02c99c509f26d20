"""Gradients of where over random broadcasts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches

from relax_grad.testing import TorchCase, check_many_against_torch


@st.composite
def broadcasts(draw):
    """Draw three shapes that broadcast to one."""
    full = draw(st.lists(st.integers(0, 3), max_size=3))

    def part():
        shape = full[draw(st.integers(0, len(full))) :]
        return tuple(1 if draw(st.booleans()) else extent for extent in shape)

    return part(), part(), part()


def where_case(shapes):
    rng = np.random.default_rng(0)
    cond, x1, x2 = (rng.normal(size=shape) for shape in shapes)
    return TorchCase(
        "relax.where",
        [np.asarray(cond > 0), x1, x2],
        lambda torch, cond, x1, x2: torch.where(cond, x1, x2),
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(shapes=broadcasts())
def test_where(torch, shapes):
    check_many_against_torch([where_case(shapes)])


@pytest.mark.slow
@at_length(200)
@given(batches(broadcasts()))
def test_where_at_length(torch, batch):
    check_many_against_torch(list(map(where_case, batch)), target=TARGET)
