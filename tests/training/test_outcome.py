"""The outcomes of a step: one table, which the trainers in Python and in C++ follow."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest

import relax_grad.runtime
from relax_grad.training._outcome import OUTCOMES, Outcome, is_update

_COUNTS = [
    (steps, skipped, accumulate)
    for steps in range(7)
    for skipped in range(steps + 1)
    for accumulate in (1, 2, 3)
]

_PROGRAM = """
#include "outcome.h"
#include <cstdio>
#include <initializer_list>
int main() {
  for (bool is_finite : {false, true})
    for (bool is_applied : {false, true})
      for (bool is_scaled : {false, true}) {
        relax_grad::Outcome o = relax_grad::OutcomeOf(is_finite, is_applied, is_scaled);
        std::printf("%d%d%d%d\\n", o.raises, o.takes_results, o.is_skipped, o.is_applied);
      }
  for (int steps = 0; steps < 7; ++steps)
    for (int skipped = 0; skipped <= steps; ++skipped)
      for (int accumulate : {1, 2, 3})
        std::printf("%d\\n", relax_grad::IsUpdate(steps, skipped, accumulate));
}
"""


def test_each_combination_has_an_outcome():
    assert set(OUTCOMES) == set(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize("facts", OUTCOMES)
def test_an_outcome_follows_from_the_facts(facts):
    is_finite, is_applied, is_scaled = facts
    outcome = OUTCOMES[facts]
    assert outcome.is_applied == (is_finite and is_applied)
    assert outcome.is_skipped != outcome.is_applied
    # A scale that was too large becomes smaller, and the next batch is tried.
    assert outcome.raises == (not is_finite or not (is_applied or is_scaled))
    # Of a step that is not finite, only a new scale is of use.
    assert outcome.takes_results == (outcome.is_applied or is_scaled)


def test_skipped_batches_are_no_part_of_an_accumulated_gradient():
    assert [is_update(steps, 0, 3) for steps in range(6)] == [False, False, True] * 2
    assert [is_update(steps, 1, 3) for steps in range(1, 5)] == [False, False, True, False]


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_the_library_in_cpp_has_the_same_table(tmp_path):
    source, program = tmp_path / "outcomes.cc", tmp_path / "outcomes"
    source.write_text(_PROGRAM)
    include = f"-I{relax_grad.runtime.folder()}"
    subprocess.run(["c++", "-std=c++17", include, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    lines = done.stdout.split()
    outcomes = [Outcome(*(digit == "1" for digit in line)) for line in lines[:8]]
    assert outcomes == [OUTCOMES[facts] for facts in sorted(OUTCOMES)]
    assert lines[8:] == [str(int(is_update(*counts))) for counts in _COUNTS]
