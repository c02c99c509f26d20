"""Run programs with the buffers of every kernel flush against inaccessible pages.

The programs are those of :class:`Case` and :class:`SampleCase`. A subprocess (``guard/worker.py``)
differentiates, legalizes and compiles them. For each kernel and each set of its shapes, it runs the
first call:

- First with the inputs of the program and then, if ``adversarial``, with extreme integers and
  floats: for any contents of the tensors, a kernel must not read or write outside of its buffers.
- Twice for each input: with all buffers ending at an inaccessible page, and with all buffers
  beginning after one. The accessible rest of the page and the initial contents of the outputs
  differ between these runs. The results must be equal bit by bit, and equal to those of a run
  without guards.
"""

from __future__ import annotations

import json
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from processes import run_guard

from relax_grad.testing.samples import samples

#: TVM's kernels that access memory out of bounds and that relax_grad leaves unchanged: patterns of
#: findings, with the reasons. docs/limits.md lists them too.
FAULTS_OF_TVM = {
    r"cum(sum|prod)\d*\(.*\[(\d+, )*0(, \d+)*\].*\) of relax.backend.DispatchSortScan: "
    "as called, ": (
        "cumsum and cumprod over an empty axis write one element per row outside the tensor"
    ),
    r"(divide|mod)\d*\w*\(int.*: (integers|numbers) .*: SIGFPE$": "integers are divided by zero",
    r"get_sample_index\w*\(.*: (integers|numbers) .*: SIGSEGV$": (
        "multinomial_from_uniform reads the row that sample_indices names, wherever it is"
    ),
    r"non_max_suppression\w*\(.*: (integers|numbers) .*: SIGSEGV$": (
        "non_max_suppression reads as many boxes as valid_count says, where indices say"
    ),
}


#: Kernels that take long by definition, and stay in bounds while they run.
ENDLESS = {
    r" roi_align\d*\(.*: (floats|numbers) .*: SIGALRM$": (
        "with sample_ratio=-1, a region of size 3e9 has as many samples"
    ),
}


def random(*shape: int) -> np.ndarray:
    """Return normal numbers, the same ones in each call."""
    return np.random.default_rng(0).normal(size=shape)


@dataclass(frozen=True)
class Case:
    """A call of an operator or function, differentiated up to an order; order 0 is the call
    alone."""

    name: str
    op: str | Callable
    inputs: Sequence
    attrs: Mapping = field(default_factory=dict)
    order: int = 1
    symbolic: Mapping[int, Mapping[int, str]] | None = None


@dataclass(frozen=True)
class SampleCase:
    """A sample of an operator, up to its own order or a lower one.

    The subprocess receives its number.
    """

    op: str
    number: int
    symbolic: bool = False
    order: int | None = None

    @property
    def name(self) -> str:
        return f"sample {self.number} of {self.op}{', symbolic' if self.symbolic else ''}"


@dataclass(frozen=True)
class Finding:
    """An error of one kernel."""

    case: str
    kernel: str
    ops: Sequence[str]
    ours: bool
    what: str

    def __str__(self) -> str:
        ops = ", ".join(self.ops) or "no operator"
        return f"{self.case}: {self.kernel} of {ops}: {self.what}"


@dataclass(frozen=True)
class Report:
    """The findings, and the numbers of kernels and runs."""

    findings: Sequence[Finding]
    kernels: int
    ours: int
    replays: int


def sample_cases(
    ops: Sequence[str], numbers: int | None = None, order: int | None = None
) -> list[SampleCase]:
    """Return the first ``numbers`` samples of each operator, or all of them, also with symbolic
    shapes."""
    cases = []
    for op in ops:
        drawn = samples(op)[:numbers]
        cases += [SampleCase(op, number, order=order) for number in range(len(drawn))]
        if numbers is None:
            symbolic = [number for number, sample in enumerate(drawn) if sample.symbolic]
            cases += [SampleCase(op, number, True, order) for number in symbolic]
    return cases


def run_guarded(
    cases: Sequence[Case | SampleCase],
    *,
    adversarial: bool = True,
    ours: bool = False,
    time_limit: int = 30,
    machine: str | None = None,
) -> Report:
    """Run the kernels of cases between guard pages in a subprocess.

    Parameters
    ----------
    cases : Sequence[Case or SampleCase]
        The programs.
    adversarial : bool
        Whether to also replace the values of each kernel's inputs.
    ours : bool
        Whether to run only the kernels of operators that relax_grad legalizes.
    time_limit : int
        Seconds after which a kernel counts as endless.
    machine : str, optional
        One of ``machines.TARGETS``: run the fused, merged and scheduled kernels of relax_grad's
        pipeline for it. Otherwise, run the kernels of TVM's pipeline before fusion.
    """
    job = pickle.dumps((list(cases), adversarial, ours, time_limit, machine))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.pickle")
        path.write_bytes(job)
        code, output, errors = run_guard("guard.worker", str(path))
    lines = output.splitlines()
    assert code == 0, (
        f"the process that compiles ended with {code} at "
        f"{lines[-1] if lines else 'nothing'}: {errors[-2000:]}"
    )
    *findings, counts = map(json.loads, (line for line in lines if line.startswith("{")))
    return Report([Finding(**finding) for finding in findings], **counts)


def check_out_of_bounds(cases: Sequence[Case | SampleCase], **settings) -> Report:
    """Run cases between guard pages, and fail with all findings except the known faults of TVM."""
    report = run_guarded(cases, **settings)
    assert report.kernels
    unknown = [
        str(finding)
        for finding in report.findings
        if not _fits(finding, ENDLESS) and (finding.ours or not _fits(finding, FAULTS_OF_TVM))
    ]
    assert not unknown, f"{len(unknown)} findings:\n" + "\n".join(unknown)
    return report


def _fits(finding: Finding, patterns: Mapping[str, str]) -> bool:
    return any(re.search(pattern, str(finding)) for pattern in patterns)
