"""The worker that is named as the cause of a failure."""

from __future__ import annotations

import pytest

from relax_grad.distributed._causes import likely_cause

DONE = {"value": None}
OWN = {"error": "its own", "collective": False}
WAITED = {"error": "allreduce", "collective": True}


@pytest.mark.parametrize(
    ("answers", "ends", "cause"),
    [
        ({0: WAITED, 1: OWN}, {2: "killed", 1: "signal 9"}, (1, "signal 9")),
        ({0: WAITED, 1: DONE, 2: OWN}, {}, (2, "its own")),
        ({0: DONE, 2: WAITED}, {}, (1, "silent, while worker 2 waited in allreduce")),
        ({0: DONE, 1: WAITED, 2: WAITED}, {}, (1, "allreduce")),
        ({}, {}, (1, "silent")),
        ({1: DONE, 2: DONE}, {}, (0, "silent")),
        ({0: DONE, 1: DONE}, {}, (2, "silent")),
    ],
)
def test_likely_cause(answers, ends, cause):
    assert likely_cause(3, answers, ends, "silent") == cause
