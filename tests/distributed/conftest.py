"""Sessions that the tests of a module share."""

from __future__ import annotations

import pytest
from sessions import assert_ended, new_session


@pytest.fixture(scope="package")
def pair():
    """Return a session of two workers."""
    with new_session(2) as session:
        yield session
        pids = list(session.pids.values())
    assert_ended(pids)


@pytest.fixture(scope="package")
def gloo_pair():
    """Return a session of two workers whose bytes gloo moves, as between machines."""
    with new_session(2, shared_memory=False) as session:
        yield session
        pids = list(session.pids.values())
    assert_ended(pids)
