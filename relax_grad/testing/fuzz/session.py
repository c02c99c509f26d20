"""A session of fuzzing: programs drawn, checked in processes of their own, and made smaller where they fail.

Every batch of programs is checked in a process that is forked for it, so that a crash, or a program without an
end, is a finding of that program and not the end of the session.
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
from typing import Protocol

from .outcomes import Failure, Outcome

#: The time that a process may take: for a batch, and for one program.
_SECONDS, _SECONDS_OF_ONE = 600.0, 120.0

#: The time that a program is made smaller for.
_SHRINKING = 300.0


@dataclass(frozen=True)
class Finding:
    """A program that failed.

    Attributes
    ----------
    number : int
        The number of the program in the session.
    original, program : object
        As it was drawn, and made smaller.
    failure : Failure
        What is wrong with the smaller one.
    """

    number: int
    original: object
    program: object
    failure: Failure


class Subject(Protocol):
    """A kind of programs: how they are drawn, checked, made smaller and reported.

    Attributes
    ----------
    batch : int
        How many programs are checked together.
    title : str
        The kind, for the first line of a report.
    against : str
        The references, for the second line.
    references : dict[str, str]
        For each name in :attr:`.outcomes.Outcome.compared` how a report calls it.
    part : tuple[str, str]
        A preposition and a noun for the parts that are counted.
    """

    batch: int
    title: str
    against: str
    references: dict[str, str]
    part: tuple[str, str]

    def draw(self, seed: int, number: int):
        """Return a program: the same one for the same numbers."""

    def check(self, programs: Sequence) -> list[Outcome]:
        """Check programs together; raise if that is not possible."""

    def check_one(self, program) -> Outcome:
        """Check a program; any error is its failure."""

    def check_stock(self, program) -> None:
        """Run what TVM makes of a program without relax_grad, if it makes something of it."""

    def failure_of(self, program) -> Failure | None:
        """Return the failure of a program that became smaller, as fast as possible."""

    def shrink(self, program, fails: Callable):
        """Return a smaller program for which ``fails`` returns true."""

    def size(self, program) -> int:
        """Return the number of the program's statements."""

    def parts(self, program) -> set[str]:
        """Return what the program is made of, to be counted."""

    def source(self, finding: Finding) -> str:
        """Return the smaller program in TVMScript."""

    def script(self, finding: Finding, seed: int) -> str:
        """Return a script that shows a finding."""


@dataclass
class Counts:
    """What a session has done.

    Attributes
    ----------
    programs, statements, findings : int
        How many there were.
    compared : Counter[str]
        How many programs were compared with what.
    parts : set[str]
        What the programs were made of.
    """

    programs: int = 0
    statements: int = 0
    findings: int = 0
    compared: collections.Counter = field(default_factory=collections.Counter)
    parts: set[str] = field(default_factory=set)


class Session:
    """Draws programs and checks them.

    Parameters
    ----------
    seed : int
        The programs of a seed are the same at every run.
    subject : Subject
        Which programs, and how they are checked.
    started : Callable[[str], None]
        Told what is done next.
    """

    def __init__(
        self,
        seed: int,
        subject: Subject,
        started: Callable[[str], None] = lambda text: None,
    ):
        self.seed, self.subject, self.started = seed, subject, started
        self.counts = Counts()
        self.is_interrupted = False

    def run(self, ends: float, limit: int | None) -> Iterator[Finding]:
        """Check programs until a time, by ``time.monotonic``, or a number of them; yield what fails."""
        number = 0
        while time.monotonic() < ends and (limit is None or number < limit):
            batch = self.subject.batch
            count = batch if limit is None else min(batch, limit - number)
            self.started(f"programs {number} to {number + count - 1}")
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

    def count(self, program, outcome: Outcome) -> None:
        self.counts.programs += 1
        self.counts.statements += self.subject.size(program)
        self.counts.parts |= self.subject.parts(program)
        self.counts.compared.update(outcome.compared or {"nothing"})

    def check(self, programs: Sequence) -> list[Outcome]:
        """Check programs together, or half of them at a time if that does not end well."""
        if len(programs) == 1:
            return [self.check_one(programs[0])]
        found = _in_a_process(lambda: self.subject.check(programs), _SECONDS)
        if isinstance(found, Failure):
            half = len(programs) // 2
            return [*self.check(programs[:half]), *self.check(programs[half:])]
        return found

    def check_one(self, program) -> Outcome:
        found = _in_a_process(lambda: self.subject.check_one(program), _SECONDS_OF_ONE)
        if not isinstance(found, Failure):
            return found
        return Outcome(None, {"TVM"}) if self.is_of_stock(program) else Outcome(found)

    def is_of_stock(self, program) -> bool:
        """Tell whether what TVM compiles without relax_grad ends the process too."""
        found = _in_a_process(lambda: (self.subject.check_stock(program),), _SECONDS_OF_ONE)
        return isinstance(found, Failure)

    def failure_of(self, program) -> Failure | None:
        found = _in_a_process(lambda: (self.subject.failure_of(program),), _SECONDS_OF_ONE)
        if not isinstance(found, Failure):
            return found[0]
        return None if self.is_of_stock(program) else found

    def shrunk(self, number: int, program, failure: Failure) -> Finding:
        """Return the finding of a program that failed."""
        ends = time.monotonic() + _SHRINKING
        smallest = [failure]

        def fails(candidate) -> bool:
            if time.monotonic() > ends:
                raise TimeoutError
            try:
                found = self.failure_of(candidate)
            except KeyboardInterrupt:  # what was found so far is reported first
                self.is_interrupted = True
                raise TimeoutError from None
            if found is None or found.kind != failure.kind:
                return False
            smallest[0] = found
            return True

        return Finding(number, program, self.subject.shrink(program, fails), smallest[0])


def can_fork() -> bool:
    """Tell whether this system has processes that begin as copies of this one."""
    return "fork" in multiprocessing.get_all_start_methods()


def _in_a_process(function: Callable, seconds: float):
    """Return what a function returns in a process of its own, or a :class:`Failure` if it does not."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _work(function, sender)
    sender.close()
    has_died = False
    try:
        if receiver.poll(seconds):
            return receiver.recv()
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


def _work(function: Callable, sender) -> None:
    """Send what a function returns, and end this process."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session is interrupted, and ends this
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        faulthandler.disable()  # it has an output of its own, and the session reports the crash
        try:
            found = function()
        except Exception as error:  # any: the process that waits must hear of it
            found = Failure("batch", f"{type(error).__name__}: {error}")
        sender.send(found)
        code = 0
    finally:
        os._exit(code)
