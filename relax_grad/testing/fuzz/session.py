"""A fuzzing session: it draws programs, checks them in separate processes, and shrinks those that
fail.

Every batch of programs is checked in a separate forked process. A crash or a program that does
not terminate is therefore a finding, and does not end the session.
"""

from __future__ import annotations

import collections
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from .outcomes import Failure, Outcome
from .search import ProgramType

T = TypeVar("T")

#: The time limits of a process, in seconds: for a batch, and for one program.
_SECONDS, _SECONDS_OF_ONE = 600.0, 120.0

#: The time limit for shrinking a program, in seconds.
_SHRINKING = 300.0

#: The seconds between two calls of a session's ``waiting``.
_WAIT = 0.5


@dataclass(frozen=True)
class Finding(Generic[ProgramType]):
    """A program that failed.

    Attributes
    ----------
    number : int
        The number of the program in the session.
    original, program : ProgramType
        The program as drawn, and the shrunk program.
    failure : Failure
        The failure of the shrunk program.
    """

    number: int
    original: ProgramType
    program: ProgramType
    failure: Failure


class Subject(Protocol[ProgramType]):
    """A kind of programs: it draws, checks, shrinks and reports them.

    Attributes
    ----------
    batch : int
        The number of programs that are checked together.
    title : str
        The kind, for the first line of a report.
    against : str
        The references, for the second line.
    references : dict[str, str]
        The names of the references in a report, by their keys in
        :attr:`.outcomes.Outcome.compared`.
    part : tuple[str, str]
        A preposition and a noun for the counted parts.
    """

    batch: int
    title: str
    against: str
    references: dict[str, str]
    part: tuple[str, str]

    def draw(self, seed: int, number: int) -> ProgramType:
        """Return a program, which the two numbers determine."""

    def check(self, programs: Sequence[ProgramType]) -> list[Outcome]:
        """Check programs together; raise if that is not possible."""

    def check_one(self, program: ProgramType) -> Outcome:
        """Check a program; any error is its failure."""

    def check_stock(self, program: ProgramType) -> None:
        """Run a program as TVM compiles it without relax_grad, if it compiles."""

    def failure_of(self, program: ProgramType) -> Failure | None:
        """Return the failure of a shrunk program, as fast as possible."""

    def shrink(self, program: ProgramType, fails: Callable[[ProgramType], bool]) -> ProgramType:
        """Return a smaller program for which ``fails`` returns true."""

    def size(self, program: ProgramType) -> int:
        """Return the number of the program's statements."""

    def parts(self, program: ProgramType) -> set[str]:
        """Return the parts of the program that a session counts, for example its operators."""

    def source(self, finding: Finding[ProgramType]) -> str:
        """Return the shrunk program in TVMScript."""

    def script(self, finding: Finding[ProgramType], seed: int) -> str:
        """Return a script that reproduces a finding."""


@dataclass
class Counts:
    """The statistics of a session.

    Attributes
    ----------
    programs, statements, findings : int
        Their numbers.
    compared : Counter[str]
        The number of programs that were compared with each reference.
    parts : set[str]
        The parts of the programs; see :meth:`Subject.parts`.
    """

    programs: int = 0
    statements: int = 0
    findings: int = 0
    compared: collections.Counter = field(default_factory=collections.Counter)
    parts: set[str] = field(default_factory=set)


class Session(Generic[ProgramType]):
    """Draws programs and checks them.

    Parameters
    ----------
    seed : int
        The seed, which determines the programs.
    subject : Subject
        The kind of programs.
    started : Callable[[str], None]
        Called with a description of each step before it starts.
    waiting : Callable[[], None]
        Called twice a second while a step runs.
    """

    def __init__(
        self,
        seed: int,
        subject: Subject[ProgramType],
        started: Callable[[str], None] = lambda text: None,
        waiting: Callable[[], None] = lambda: None,
    ):
        self.seed, self.subject, self.started, self.waiting = seed, subject, started, waiting
        self.counts = Counts()
        self.is_interrupted = False

    def run(self, ends: float, limit: int | None) -> Iterator[Finding[ProgramType]]:
        """Check up to ``limit`` programs until ``ends`` (by ``time.monotonic``); yield the
        findings."""
        number, batch = 0, 1  # small batches first, so that results appear soon
        while time.monotonic() < ends and (limit is None or number < limit):
            count = batch if limit is None else min(batch, limit - number)
            batch = min(2 * batch, self.subject.batch)
            last = number + count - 1
            self.started(f"program {last}" if count == 1 else f"programs {number} to {last}")
            numbers = range(number, number + count)
            programs = [self.subject.draw(self.seed, i) for i in numbers]
            for i, program, outcome in zip(numbers, programs, self.check(programs), strict=True):
                self.count(program, outcome)
                if outcome.failure is not None:
                    self.counts.findings += 1
                    self.started(f"making program {i} smaller")
                    yield self.shrunk(i, program, outcome.failure)
                    if self.is_interrupted:
                        raise KeyboardInterrupt
            number += count

    def in_a_process(self, function: Callable[[], T], seconds: float) -> T | Failure:
        return _in_a_process(function, seconds, self.waiting)

    def count(self, program: ProgramType, outcome: Outcome) -> None:
        self.counts.programs += 1
        self.counts.statements += self.subject.size(program)
        self.counts.parts |= self.subject.parts(program)
        self.counts.compared.update(outcome.compared or {"nothing"})

    def check(self, programs: Sequence[ProgramType]) -> list[Outcome]:
        """Check programs together; if their process fails, check each half separately."""
        if len(programs) == 1:
            return [self.check_one(programs[0])]
        outcome = self.in_a_process(lambda: self.subject.check(programs), _SECONDS)
        if isinstance(outcome, Failure):
            half = len(programs) // 2
            return [*self.check(programs[:half]), *self.check(programs[half:])]
        return outcome

    def check_one(self, program: ProgramType) -> Outcome:
        outcome = self.in_a_process(lambda: self.subject.check_one(program), _SECONDS_OF_ONE)
        if not isinstance(outcome, Failure):
            return outcome
        return Outcome(None, {"TVM"}) if self.is_of_stock(program) else Outcome(outcome)

    def is_of_stock(self, program: ProgramType) -> bool:
        """Tell whether the program as TVM compiles it without relax_grad also crashes or times
        out."""
        outcome = self.in_a_process(lambda: self.subject.check_stock(program), _SECONDS_OF_ONE)
        return isinstance(outcome, Failure)

    def failure_of(self, program: ProgramType) -> Failure | None:
        outcome = self.in_a_process(lambda: (self.subject.failure_of(program),), _SECONDS_OF_ONE)
        if not isinstance(outcome, Failure):
            return outcome[0]
        return None if self.is_of_stock(program) else outcome

    def shrunk(self, number: int, program: ProgramType, failure: Failure) -> Finding[ProgramType]:
        """Shrink a program that failed and return its finding."""
        ends = time.monotonic() + _SHRINKING
        smallest = [failure]

        def fails(candidate: Any) -> bool:
            if time.monotonic() > ends:
                raise TimeoutError
            try:
                smaller = self.failure_of(candidate)
            except KeyboardInterrupt:  # the current finding is reported first
                self.is_interrupted = True
                raise TimeoutError from None
            if smaller is None or smaller.kind != failure.kind:
                return False
            smallest[0] = smaller
            return True

        return Finding(number, program, self.subject.shrink(program, fails), smallest[0])


def can_fork() -> bool:
    """Tell whether this system can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def _in_a_process(
    function: Callable[[], T], seconds: float, waiting: Callable[[], None] = lambda: None
) -> T | Failure:
    """Run a function in a separate process; return its result, or a :class:`Failure` without
    one."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _work(function, sender)
    sender.close()
    has_died = False
    try:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            if receiver.poll(min(left, _WAIT)):
                return receiver.recv()
            waiting()
        return Failure("time limit", f"it took longer than {seconds:.0f} s")
    except EOFError:
        has_died = True
    finally:
        receiver.close()
        if not has_died:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Failure(f"crash: {name}", f"the process ended by {name}")


def _work(function: Callable, sender: Any) -> None:
    """Send the result of a function and end this process."""
    code = 1
    try:
        # The session handles an interrupt and ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        faulthandler.disable()  # it writes to its own output; the session reports the crash
        try:
            outcome = function()
        except Exception as error:  # any error is reported to the waiting process
            outcome = Failure("batch", f"{type(error).__name__}: {error}")
        sender.send(outcome)
        code = 0
    finally:
        os._exit(code)
