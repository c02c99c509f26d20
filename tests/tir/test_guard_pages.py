"""The adjoints of tensor functions stay in bounds, by kind of access, for any data."""

from __future__ import annotations

import pytest
from guard import Case, check_out_of_bounds
from tensor_accesses import ACCESSES, Access

from relax_grad.testing.fuzz.session import can_fork

pytestmark = pytest.mark.skipif(
    not can_fork(), reason="guard pages need a system with fork and mprotect"
)

#: Accesses by data, for the default suite.
BY_DATA = ["gather by data", "gather by data of data", "take"]


def _cases(names):
    return [Case(name, Access(name), Access(name).inputs(), order=2) for name in names]


@pytest.mark.slow
def test_adjoints():
    report = check_out_of_bounds(_cases(ACCESSES))
    assert report.kernels > 2 * len(ACCESSES)


def test_adjoints_of_gathers_by_data():
    assert check_out_of_bounds(_cases(BY_DATA)).kernels >= 6
