"""Run programs with the buffers of every kernel flush against pages that must not be touched.

The programs are those of :class:`Case` and :class:`SampleCase`. A process of its own
(``guard_worker.py``) differentiates, legalizes and compiles them, and runs each kernel that they call,
once for each set of shapes:

- as the program calls it, and then, if ``adversarial``, with its integers and floats replaced by extreme
  ones: whatever a tensor holds, nothing outside of the kernel's buffers may be read or written;
- twice each, with all buffers ending at an inaccessible page, and with all beginning behind one. What
  else can be reached, within a page, differs between the two, and so does what the outputs hold before:
  the results must be the same, bit by bit, and those of a run without guards.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relax_grad.testing.samples import samples

#: Kernels of TVM that relax_grad leaves as they are and that do access memory out of bounds, as patterns
#: of what is found, with the reason. docs/limits.md lists them too.
FAULTS_OF_TVM = {
    r"cum(sum|prod)\d*\(.*\[(\d+, )*0(, \d+)*\].*\) of relax.backend.DispatchSortScan: as called, ": (
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


#: What takes long by its definition, and touches nothing out of bounds while it runs.
ENDLESS = {
    r" roi_align\d*\(.*: (floats|numbers) .*: SIGALRM$": (
        "with sample_ratio=-1, a region of size 3e9 has as many samples"
    ),
}


@dataclass(frozen=True)
class Case:
    """One call of an operator or function, differentiated up to an order; order 0 is the call alone."""

    name: str
    op: str | Callable
    inputs: Sequence
    attrs: Mapping = field(default_factory=dict)
    order: int = 1
    symbolic: Mapping[int, Mapping[int, str]] | None = None


@dataclass(frozen=True)
class SampleCase:
    """One of the samples of an operator, to its own order or a lower one.

    It crosses to the other process by its number.
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
    """What is wrong with one kernel."""

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
    """The findings, and how much was run."""

    findings: Sequence[Finding]
    kernels: int
    ours: int
    replays: int


def sample_cases(
    ops: Sequence[str], numbers: int | None = None, order: int | None = None
) -> list[SampleCase]:
    """Return samples of operators: the first ``numbers`` of each, or all, with symbolic shapes too."""
    cases = []
    for op in ops:
        found = samples(op)[:numbers]
        cases += [SampleCase(op, number, order=order) for number in range(len(found))]
        if numbers is None:
            symbolic = [number for number, sample in enumerate(found) if sample.symbolic]
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
    """Run the kernels of cases between guard pages, in a process of its own.

    Parameters
    ----------
    cases : Sequence[Case or SampleCase]
        The programs.
    adversarial : bool
        Whether to replace the values of each kernel's inputs too.
    ours : bool
        Whether to run only the kernels of operators that relax_grad legalizes.
    time_limit : int
        Seconds after which a kernel counts as one that does not end.
    machine : str, optional
        One of ``machines.TARGETS``: the kernels are those that relax_grad's pipeline makes for it, which are fused,
        merged and scheduled. Without it, they are those of TVM's pipeline before fusion.
    """
    worker = Path(__file__).with_name("guard_worker.py")
    job = pickle.dumps((list(cases), adversarial, ours, time_limit, machine))
    result = subprocess.run([sys.executable, worker], input=job, capture_output=True, check=False)
    lines = result.stdout.decode().splitlines()
    assert result.returncode == 0, (
        f"the process that compiles ended with {result.returncode} at "
        f"{lines[-1] if lines else 'nothing'}: {result.stderr.decode()[-2000:]}"
    )
    *findings, counts = map(json.loads, (line for line in lines if line.startswith("{")))
    return Report([Finding(**finding) for finding in findings], **counts)


def check_out_of_bounds(cases: Sequence[Case | SampleCase], **settings) -> Report:
    """Run cases between guard pages, and fail with all that is found but the known faults of TVM."""
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
