"""Random differentiated programs: relax_grad's pipeline for each vector width against TVM's
pipeline."""

from __future__ import annotations

import pytest
from drawn_programs import programs
from hypothesis import given
from machines import TARGETS, runs_here
from sweep import at_length, batches

from relax_grad.cpu.schedule import _elements, _reduce
from relax_grad.testing.fuzz.pipelines import check_pipelines
from relax_grad.testing.fuzz.programs import FEATURES, random_program
from relax_grad.testing.fuzz.script import BATCH

#: Programs that do not compile after TVM's passes without the pipeline's corrections.
FAILED = [
    # A fused function contains only an element of a nested tuple, and the outer tuple is a
    # parameter.
    (129, 9, ("blocks", "tuple_parameters", "intermediates")),
    # A dataflow block returns a tuple, and a later block joins its elements.
    (460, 15, ("symbolic", "branches", "locals")),
]

#: A program that crashed: TVM gave the storage of branches, inlined again, to later bindings.
CRASHED = (525, 15, FEATURES)


@pytest.fixture
def large(monkeypatch):
    """Apply the optimizations for large tensors to small ones too."""
    monkeypatch.setattr(_elements, "SMALL", 2)
    monkeypatch.setattr(_reduce, "_PIECE", 2)
    monkeypatch.setattr(_elements, "LINE", 4)


def check(programs, batches, name):
    """Check programs for one target, if this machine supports it."""
    targets = {name: TARGETS[name]} if runs_here(name) else {}
    check_pipelines(programs, batches, targets)


def test_programs_that_failed():
    check([random_program(*case) for case in FAILED], (BATCH,), "sse")


@pytest.mark.usefixtures("large")
def test_program_that_crashed():
    check([random_program(*CRASHED)], (BATCH, 1, 64), "avx2")


@pytest.mark.usefixtures("large")
def test_programs_in_half_precision():
    programs = [random_program(seed, 6, ("halves", "symbolic")) for seed in range(4)]
    assert "bfloat16" in {program.narrowest for program in programs}
    check(programs, (BATCH, 64), "avx2")


@pytest.mark.usefixtures("large")
@at_length(4, 4, derandomize=True)
@given(batches(programs(), 4))
def test_some_programs(batch):
    check(batch, (BATCH, 1, 64), "avx2")


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("target", ["sse", "avx2", "avx512"])
@at_length(50, 10)
@given(batches(programs(), 10))
def test_programs_at_length(target, batch):
    check(batch, (BATCH, 1, 64), target)
