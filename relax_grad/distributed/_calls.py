"""The calls of a session: what all workers run, within a timeout, and the failures of workers."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ._causes import likely_cause
from ._nodes import Node
from ._processes import Channel
from ._watchdog import Watchdog, parts, without_room
from .errors import WorkerError

if TYPE_CHECKING:
    from tvm.runtime.disco import DRef
    from tvm.runtime.disco import Session as DiscoSession

#: The seconds in which other workers may tell more about a failure.
_GRACE = 1.5


class Calls:
    """The calls of a session, which is a subclass."""

    _watchdog: Watchdog
    _channels: dict[int, Channel]
    _run: object
    _more: object
    _ended: bool
    hosts: list[str]

    def __init__(self, num_workers: int, timeout: float):
        self.num_workers, self.timeout = num_workers, timeout
        self.disco: DiscoSession | None = None
        self._events: queue.Queue = queue.Queue()
        self._calls = 0
        self._failure: WorkerError | None = None
        self._is_late, self._process = False, os.getpid()
        self._nodes: list[Node] = []

    @property
    def failure(self) -> WorkerError | None:
        """The failure that has ended the session, if there is one."""
        return self._failure

    def _release(self) -> None:
        """Let the other machines end with this session: no other one follows."""
        for node in self._nodes:
            node.again = False

    def _abort(self) -> None:
        """End the workers at once."""
        raise NotImplementedError

    def _connected(self) -> DiscoSession:
        """Return Disco's session; raise RuntimeError before the start and after the end."""
        if self.disco is None:
            raise RuntimeError("the session is not connected to its workers")
        return self.disco

    def run(self, task: str, *, timeout: float | None = None, **arguments: object) -> list:
        """Run a task of the package on all workers, and return their results in the order of the
        workers.

        Raises
        ------
        WorkerError
            If a worker fails, ends, or does not answer within the timeout. The session has then
            ended.
        """
        self._check_open()
        text, seconds = json.dumps(arguments), timeout or self.timeout
        self._watchdog.timeout = max(self._watchdog.timeout, limit(seconds))
        try:
            return self._call(self._run, (task,), task, text, seconds)
        finally:
            self._watchdog.timeout = limit(self.timeout)

    def _call(self, function: object, more: tuple, name: str, text: str, seconds: float) -> list:
        """Call a function of all workers with a text; return their results."""
        self._calls += 1
        begin, connected = time.monotonic(), self._connected()
        *first, last = parts(text)
        try:
            for part in first:
                self._make_room(name, begin, seconds)
                connected.call_packed(self._more, part)
            self._make_room(name, begin, seconds)
            # The destructor of the result writes to the workers too, and an error there would end
            # this process. While the answers are awaited, the channel of a worker that has ended is
            # silenced.
            result = connected.call_packed(function, self._calls, *more, last)
            answers = self._answers(self._calls, name, begin, seconds)
            del result
            return answers
        except WorkerError:
            raise
        except Exception as error:  # a pipe of a worker that has ended
            return self._fail({}, self._wait_for_end(), f"commands cannot be sent: {error}")
        except BaseException:
            # The workers are within the call, and their state may differ afterwards.
            self._release()
            self._failure = WorkerError(
                None, "", f"{name}: the call was interrupted, which has ended the session"
            )
            self._abort()
            raise

    def _make_room(self, name: str, begin: float, seconds: float) -> None:
        """Wait until each worker takes a command, or end the session."""
        rank = without_room(self._channels, begin + limit(seconds) - time.monotonic())
        if rank is not None:
            self._fail({}, {rank: f"{name}: no answer within {seconds:g} s"}, "")

    def _bounded(self, name: str, method: Callable, *arguments: object, **more: object) -> object:
        """Call a method of Disco's session, which must return within the timeout."""
        self._make_room(name, time.monotonic(), self.timeout)
        self._watchdog.end = time.monotonic() + limit(self.timeout)
        try:
            return method(*arguments, **more)
        except Exception as error:  # of any class, if the watchdog has ended a worker
            if self._is_late:
                self._fail({}, self._wait_for_end(), f"{name}: {error}")
            raise
        finally:
            self._watchdog.end = float("inf")

    def _late(self, rank: int) -> None:
        """End a worker that takes no commands. Called by the watchdog."""
        self._is_late = True
        cause = f"no answer within {self.timeout:g} s: it takes no commands"
        self._events.put({"rank": rank, "end": cause})
        for node in self._nodes:
            if rank in node.channels():
                node.end_worker(rank)

    def synchronize(self) -> None:
        """Wait until all workers have executed all earlier calls.

        Raises
        ------
        WorkerError
            If a worker has failed.
        """
        self.run("wait")

    def debug(self, value: DRef, rank: int) -> object:
        """Return the value of a reference of Disco on a worker, as ``DRef.debug_get_from_remote``
        does."""
        self.synchronize()
        return self._bounded("debug", value.debug_get_from_remote, rank)

    def _answers(self, call: int, task: str, begin: float, timeout: float) -> list:
        """Return the results of all workers, or end the session."""
        end = begin + limit(timeout)
        answers: dict[int, dict] = {}
        ends: dict[int, str] = {}
        while len(answers) < self.num_workers:
            try:
                event = self._events.get(timeout=max(0.0, min(0.5, end - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= end:
                    return self._fail(answers, ends, f"{task}: no answer within {timeout:g} s")
                continue
            if event.get("call") == call:
                answers[event["rank"]] = event
            elif "end" in event:
                ends.setdefault(event["rank"], event["end"])
            if ends or "error" in event:
                # The first error to arrive may be a consequence of another one.
                end = min(end, time.monotonic() + _GRACE)
                if ends or any(
                    "error" in answer and not answer["collective"] for answer in answers.values()
                ):
                    break
        failed = {rank for rank, answer in answers.items() if "error" in answer}
        if ends or failed:
            ends = ends or self._wait_for_end()
            return self._fail(answers, ends, f"{task}: no answer")
        return [answers[rank].get("value") for rank in range(self.num_workers)]

    def _wait_for_end(self) -> dict[int, str]:
        """Return the ends of workers that are known, or become known soon."""
        ends: dict[int, str] = {}
        end = time.monotonic() + 0.3
        while (left := end - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if "end" in event:
                ends.setdefault(event["rank"], event["end"])
        return ends

    def _fail(self, answers: dict, ends: dict[int, str], silent: str) -> NoReturn:
        """End the session with the error that is the likely cause."""
        rank, cause = likely_cause(self.num_workers, answers, ends, silent)
        self._failure = WorkerError(rank, self.hosts[rank], cause)
        self._abort()
        raise self._failure from None

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the session belongs to the process {self._process}, of which this one is a "
                "child; begin another one"
            )
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise RuntimeError(
                "the session has ended; use its trainers within with session(2) as workers: ..., "
                "or begin another session"
            )


def limit(timeout: float) -> float:
    """Return the seconds after which a call has failed: workers have noticed the timeout then, and
    have told which one is the cause."""
    return timeout + min(5.0, 0.2 * timeout + 0.5)
