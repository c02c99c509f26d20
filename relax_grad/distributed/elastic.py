"""Programs that start again after a failure, with the machines that are there."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TypeVar

from .._validation import check_integer
from ._handshake import check_secret
from ._nodes import listening_socket
from ._options import Options, check_seconds, checked
from ._reception import LOG, Came, Reception, announce
from .errors import WorkerError
from .session import Session, open_session, session

T = TypeVar("T")


def run(
    program: Callable[[Session], T],
    workers_per_node: int,
    *,
    nodes: int | tuple[int, int] = 1,
    max_restarts: int = 3,
    last_call_timeout: float = 30.0,
    log: str | os.PathLike | None = None,
    **options: object,
) -> T:
    """Run a program with a session, and start both again after the failure of a worker.

    The program loads its last checkpoint, if there is one, and saves others. After a failure the
    session ends, and another one starts with as many machines as there are, between the least and
    the greatest number of ``nodes``. With the same number of workers, training continues with the
    same bits as without the failure. Other machines run ``python -m relax_grad worker
    --controller HOST:PORT``, which takes part in all sessions of the program. One that is not
    needed tries again, and takes the place of a machine that is lost.

    Worker 0 is in this process, whose end is not a restart: begin the program again, which goes
    on from the last checkpoint too.

    Parameters
    ----------
    program : Callable[[Session], T]
        Takes a session, and trains. It is called once for each session.
    workers_per_node : int
        The number of workers on each machine.
    nodes : int or tuple[int, int]
        The number of machines, this one included, or the least and the greatest number.
    max_restarts : int
        The number of restarts after which a failure is raised.
    last_call_timeout : float
        The seconds in which further machines may come when the least number is there.
    log : path, optional
        The file to which each start, each failure and the end add a line of JSON: the time, the
        number of restarts, the workers and their hosts, the worker that has failed and the cause,
        and the seconds since the previous line. The logger ``relax_grad.distributed`` has the same
        lines.
    **options
        Further arguments of :func:`relax_grad.distributed.session`.

    Returns
    -------
    result : T
        The result of the program.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    WorkerError
        If too few machines come to the first start, or after the last restart. An infinite or NaN
        loss is raised at once.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.distributed import run
    >>> def program(workers):
    ...     x = workers.broadcast(np.ones(3, "float32"))
    ...     return workers.debug(x, 1).numpy().sum()
    >>> print(run(program, 2))
    3.0
    """
    if not callable(program):
        raise TypeError(f"program must be a function of a session, but it is {program!r}")
    workers_per_node = check_integer("workers_per_node", workers_per_node, 1)
    least, most = _range(nodes)
    max_restarts = check_integer("max_restarts", max_restarts, 0)
    check_seconds("last_call_timeout", last_call_timeout)
    checked_options = _options(workers_per_node, most, options)
    note = _Log(log)
    for restarts in range(max_restarts + 1):
        is_last = restarts == max_restarts
        workers = None
        try:
            workers, checked_options = _open(
                checked_options, workers_per_node, least, most, last_call_timeout, again=not is_last
            )
            note("start", restarts=restarts, workers=workers.num_workers, hosts=workers.hosts)
            result = program(workers)
            workers.close()
            note("end", restarts=restarts)
            return result
        except Exception as error:  # a program may wrap the failure of a worker
            failure = _failure(workers, error)
            if failure is None or (workers is None and restarts == 0):
                raise
            note(
                "failure",
                restarts=restarts,
                rank=failure.rank,
                host=failure.host,
                cause=failure.cause,
            )
            if is_last:
                raise
            if workers is not None:
                workers._abort()  # the other machines come again
        finally:
            if workers is not None:
                workers.close()
        workers = None
        gc.collect()  # the trainer of the session that has failed
    raise AssertionError("the last restart returns or raises")


def _failure(workers: Session | None, error: Exception) -> WorkerError | None:
    """Return the failure of a worker that is the cause of an error, or None."""
    if isinstance(error, FloatingPointError):  # another start would have the same numbers
        return None
    if isinstance(error, WorkerError):
        return error
    return None if workers is None else workers.failure


def _range(nodes: object) -> tuple[int, int]:
    """Return the least and the greatest number of machines."""
    if not isinstance(nodes, tuple):
        count = check_integer("nodes", nodes, 1, also="a pair of such numbers")
        return count, count
    if len(nodes) != 2:
        raise ValueError(
            f"nodes must be a number of machines, or the least and the greatest, but it is {nodes}"
        )
    least, most = (check_integer("nodes", count, 1, of="machines") for count in nodes)
    if least > most:
        raise ValueError(
            f"nodes must be the least and the greatest number of machines, but it is {nodes}"
        )
    return least, most


def _options(workers_per_node: int, most: int, options: dict) -> Options:
    """Return the options of a session with as many machines as possible."""
    names = [name for name in inspect.signature(session).parameters if name not in _OWN]
    for name in options:
        if name not in names:
            raise TypeError(f"run has no option {name!r}; it takes the options of session: {names}")
    if options.get("backend") == "mpi":
        raise ValueError(
            'backend must be "gloo" or "nccl" for run: mpiexec ends all processes after a failure'
        )
    bound = inspect.signature(session).bind(workers_per_node * most, nodes=most, **options)
    bound.apply_defaults()
    result = checked(**bound.arguments)
    if most > 1:
        check_secret(result.secret)
    return result


#: The arguments of a session that each start shares.
_OWN = ("num_workers", "nodes")


def _open(
    options: Options,
    workers_per_node: int,
    least: int,
    most: int,
    last_call: float,
    again: bool,
) -> tuple[Session, Options]:
    """Return a session with the machines that come, and the options of the next one, whose port is
    the same."""
    if most == 1:
        return open_session(options), options
    with listening_socket(*options.address) as listening:
        announce(listening)
        options = options._replace(address=listening.getsockname()[:2])
        reception = Reception(listening, options.secret or "", again)
        try:
            machines = reception.gather(least - 1, most - 1, options.start_timeout, last_call)
            count = 1 + len(machines)
            own = options._replace(num_workers=count * workers_per_node, nodes=count)
            return open_session(own, Came(reception, machines), again), options
        finally:
            reception.close()


class _Log:
    """The log of starts, failures and the end."""

    def __init__(self, path: str | os.PathLike | None):
        self._path, self._since = path, time.monotonic()
        if path is not None:
            with open(path, "a", encoding="utf-8"):  # an error before training
                pass

    def __call__(self, event: str, **more: object) -> None:
        now = time.monotonic()
        moment = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        seconds = round(now - self._since, 3)
        line = json.dumps({"time": moment, "event": event, "seconds": seconds, **more})
        self._since = now
        LOG.log(logging.WARNING if event == "failure" else logging.INFO, "%s", line)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")


__all__ = ["run"]
