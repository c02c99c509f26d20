"""A session of fuzzing: programs drawn, checked in processes of their own, and made smaller where they fail.

Every batch of programs is checked in a process that is forked for it, so that a crash, or a program without an
end, is a finding of that program and not the end of the session.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .checks import Failure, Outcome, Settings, check, check_one
from .programs import FEATURES, random_program
from .script import Program
from .shrink import shrink

#: Programs that are compiled together.
BATCH = 20

#: What TVM's pass takes.
OF_STOCK = ("checkpoints", "intermediates", "stop_gradient", "tuple_parameters")

#: Which share of the programs has a feature, where it is not a quarter of them: central differences say nothing
#: of these, and TVM does not compile local functions.
_SHARES = {"stop_gradient": 0.1, "intermediates": 0.1, "locals": 0.1}

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
    original, program : Program
        As it was drawn, and made smaller.
    failure : Failure
        What is wrong with the smaller one.
    """

    number: int
    original: Program
    program: Program
    failure: Failure


@dataclass
class Counts:
    """What a session has done.

    Attributes
    ----------
    programs, statements, findings : int
        How many there were.
    compared : Counter[str]
        How many programs were compared with what.
    operators : set[str]
        The operators whose samples were in the programs.
    """

    programs: int = 0
    statements: int = 0
    findings: int = 0
    compared: collections.Counter = field(default_factory=collections.Counter)
    operators: set[str] = field(default_factory=set)

    def add(self, program: Program, outcome: Outcome) -> None:
        self.programs += 1
        self.statements += sum(1 for _ in program.lets())
        self.operators.update(op for let in program.lets() for op in let.operators)
        self.compared.update(outcome.compared or {"nothing"})


def draw(seed: int, number: int, through: str = "relax_grad") -> Program:
    """Return a program of a session.

    Parameters
    ----------
    seed : int
        That of the session.
    number : int
        That of the program, from 0.
    through : str
        The pass that differentiates it: TVM's does not take every feature.
    """
    rng = random.Random(f"{seed}/{number}")
    length = rng.randint(5, 15) if rng.random() < 0.6 else rng.randint(5, 50)
    known = OF_STOCK if through == "tvm" else FEATURES
    features = {name for name in known if rng.random() < _SHARES.get(name, 0.25)}
    features |= {"float32"} if rng.random() < 0.3 else set()
    features |= {rng.choice(["samples", "samples_of_torch"])} if rng.random() < 0.85 else set()
    return random_program(rng.randrange(2**32), length, features)


class Session:
    """Draws programs and checks them.

    Parameters
    ----------
    seed : int
        The programs of a seed are the same at every run.
    settings : Settings
        How they are checked.
    started : Callable[[str], None]
        Told what is done next.
    """

    def __init__(
        self,
        seed: int,
        settings: Settings,
        started: Callable[[str], None] = lambda text: None,
    ):
        self.seed, self.settings, self.started = seed, settings, started
        self.counts = Counts()
        self.is_interrupted = False

    def run(self, ends: float, limit: int | None, batch: int = BATCH) -> Iterator[Finding]:
        """Check programs until a time, by ``time.monotonic``, or a number of them; yield what fails."""
        number = 0
        while time.monotonic() < ends and (limit is None or number < limit):
            count = batch if limit is None else min(batch, limit - number)
            self.started(f"programs {number} to {number + count - 1}")
            numbers = range(number, number + count)
            programs = [draw(self.seed, i, self.settings.through) for i in numbers]
            for i, program, outcome in zip(numbers, programs, self.check(programs), strict=True):
                self.counts.add(program, outcome)
                if outcome.failure is not None:
                    self.counts.findings += 1
                    self.started(f"making program {i} smaller")
                    yield self.shrunk(i, program, outcome.failure)
                    if self.is_interrupted:
                        raise KeyboardInterrupt
            number += count

    def check(self, programs: Sequence[Program]) -> list[Outcome]:
        """Check programs together, or one by one if that does not end well."""
        found = _in_a_process(lambda: check(programs, self.settings), _SECONDS)
        if isinstance(found, Failure):
            return [self.check_one(program) for program in programs]
        return found

    def check_one(self, program: Program) -> Outcome:
        found = _in_a_process(lambda: check_one(program, self.settings), _SECONDS_OF_ONE)
        return Outcome(found) if isinstance(found, Failure) else found

    def shrunk(self, number: int, program: Program, failure: Failure) -> Finding:
        """Return the finding of a program that failed."""
        ends = time.monotonic() + _SHRINKING
        smallest = [failure]

        def fails(candidate: Program) -> bool:
            if time.monotonic() > ends:
                raise TimeoutError
            try:
                found = self.check_one(candidate).failure
            except KeyboardInterrupt:  # what was found so far is reported first
                self.is_interrupted = True
                raise TimeoutError from None
            if found is None or found.kind != failure.kind:
                return False
            smallest[0] = found
            return True

        return Finding(number, program, shrink(program, fails), smallest[0])


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
        try:
            found = function()
        except Exception as error:  # any: the process that waits must hear of it
            found = Failure("batch", f"{type(error).__name__}: {error}")
        sender.send(found)
        code = 0
    finally:
        os._exit(code)
