"""The multiply-adds of this machine's cores: their peak, and whether the threads of a measurement
share a core, or have cores that are far from each other.

A virtual machine shows processors that may be two hardware threads of one core, or cores of
different dies. Its host may move them for seconds or minutes at a time. On one core, functions that
use all of its units take twice as long as before, and others less. On different dies, functions
whose threads read what other threads wrote take longer, and others do not. So the ratios of times
differ too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

#: The rounds of multiply-adds of a probe: about half a millisecond.
_PROBE = 150_000

#: Probes that must fail in turn, such that a thread of another contestant that still spins, or a
#: short interrupt, is not taken for a shared core; and the seconds between them.
_PROBES, _BETWEEN = 6, 8e-3

#: The least share of the rate of one thread that each of several threads has on cores of their own.
#: On two hardware threads of one core it is a half.
_LEAST_SHARE = 0.75

#: The nanoseconds that a cache line takes there and back at most, between cores that are near. By
#: this program, it took 96 to 164 on one die of a Zen 5 and 258 to 346 on that of a Cascade Lake,
#: and 424 to 588 between two dies of a Zen 5.
_NEAR = 380.0

#: The processors of this process, as long as none of its threads is bound; none outside of Linux.
_PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

#: Seconds to wait for cores at most: in a measurement, and in all of a process.
_PATIENCE, _ALL_PATIENCE = 60.0, 600.0


def peak(flags: Sequence[str], threads: int) -> float:
    """Return the GFLOP/s of multiply-adds in registers, in so many threads."""
    run = _multiply_adds(tuple(flags))
    return max(_rate(run, threads, 10_000_000) for _ in range(15))


@contextlib.contextmanager
def bound(threads: int) -> Iterator[None]:
    """Bind the calling thread to one processor and the others of the process to another one, if a
    measurement has two threads.

    Some systems start the second thread of a library on the processor of the first one, as long as
    it has little to do, and leave both there while they wait for each other. The library then takes
    the time of one thread, in some processes for all samples.
    """
    if threads != 2 or len(_PROCESSORS) < 2:
        yield
        return
    _bind_all(_PROCESSORS[:1], _PROCESSORS[1:2])
    try:
        yield
    finally:
        _bind_all(_PROCESSORS, _PROCESSORS)


def _bind_all(own: Sequence[int], others: Sequence[int]) -> None:
    """Bind the calling thread, and the other threads of the process, to some processors."""
    caller = threading.get_native_id()
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # A thread that has just ended.
            os.sched_setaffinity(task, own if task == caller else others)


def _bind(rank: int) -> None:
    """Bind the calling thread of a probe to a processor of its own."""
    if rank < len(_PROCESSORS):
        os.sched_setaffinity(0, _PROCESSORS[rank : rank + 1])


def are_near(threads: int, trip: Callable[[], float] | None = None) -> bool:
    """Return whether two of so many threads pass a cache line to each other as fast as cores of one
    die do, as far as it can be measured.

    Parameters
    ----------
    threads : int
        The number of threads.
    trip : Callable, optional
        Returns the nanoseconds of a way there and back; the default measures them by a program of
        the compiler ``cc``. Without it, threads are near.
    """
    if threads < 2 or (trip is None and not shutil.which("cc")):
        return True
    trip = trip or _round_trip
    return any(trip() < _NEAR for _ in range(_PROBES))


def are_well_placed(threads: int) -> bool:
    """Return whether so many threads have cores of their own that are near."""
    return are_apart(threads) and are_near(threads)


def are_apart(threads: int, rate: Callable[[int], float] | None = None) -> bool:
    """Return whether so many threads run on cores of their own, as far as it can be measured.

    Parameters
    ----------
    threads : int
        The number of threads.
    rate : Callable, optional
        Returns the operations in a second of so many threads at once; the default measures
        multiply-adds by the compiler ``cc``. Without it, threads are apart.
    """
    if threads < 2:
        return True
    if rate is None:
        if not shutil.which("cc"):
            return True
        run = _multiply_adds(("-march=native",))
        rate = functools.partial(_rate, run, rounds=_PROBE)
    for probe in range(_PROBES):
        if probe:
            time.sleep(_BETWEEN)
        together, alone = rate(threads), rate(1)
        if together > _LEAST_SHARE * threads * alone:
            return True
    return False


class Apart:
    """Waits until the threads of a measurement have cores of their own that are near.

    Parameters
    ----------
    threads : int
        The number of threads.
    probe : Callable
        Returns whether so many threads have such cores.
    patience : float
        Seconds to wait at most in total. Then a warning is given, and all samples count.
    """

    #: Seconds that are left for all measurements of the process.
    left_of_all = _ALL_PATIENCE

    def __init__(
        self,
        threads: int,
        probe: Callable[[int], bool] = are_well_placed,
        patience: float = _PATIENCE,
    ):
        self.threads, self.probe, self.left = threads, probe, min(patience, Apart.left_of_all)

    def wait(self) -> None:
        """Return when threads are apart."""
        while not self.holds():
            start = time.perf_counter()
            time.sleep(_BETWEEN)
            self.lose(time.perf_counter() - start)

    def holds(self) -> bool:
        """Return whether threads are apart, or this is no longer waited for."""
        start = time.perf_counter()
        if self.left <= 0 or self.probe(self.threads):
            return True
        self.lose(time.perf_counter() - start)
        return self.left <= 0

    def lose(self, seconds: float) -> None:
        """Count the time of samples that do not count."""
        before, self.left = self.left, self.left - seconds
        Apart.left_of_all -= seconds
        if before > 0 >= self.left:
            warnings.warn(
                f"{self.threads} threads shared a core, or had cores of different dies, as long "
                "as a measurement waits for others: these samples were taken so",
                stacklevel=3,
            )


def _round_trip() -> float:
    """Return the nanoseconds of a way of a cache line there and back between two threads."""
    exchange, line, found = _library(("-march=native",)).exchange, ctypes.c_int(0), [0.0, 0.0]

    def work(rank: int) -> None:
        _bind(rank)
        found[rank] = exchange(ctypes.byref(line), rank)

    workers = [threading.Thread(target=work, args=[rank]) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return min(found)


def _rate(run: Callable[[int], float], threads: int, rounds: int) -> float:
    """Return the GFLOP/s of so many threads at once, each with so many rounds."""
    done, seconds = [0.0] * threads, [0.0] * threads
    ready = threading.Barrier(threads)

    def work(i: int) -> None:
        _bind(i)
        ready.wait()
        start = time.perf_counter()
        done[i] = run(rounds)
        seconds[i] = time.perf_counter() - start

    workers = [threading.Thread(target=work, args=[i]) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / max(seconds) / 1e9


def _multiply_adds(flags: tuple[str, ...]) -> Callable[[int], float]:
    """Return a function that does some rounds of multiply-adds, compiled with these flags."""
    library = _library(flags)
    return lambda rounds: library.multiply_adds(rounds, 0.999, 0.001, ctypes.c_float())


@functools.cache
def _library(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Return the functions of _peak.c, compiled with these flags."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "peak.so")
        command = ["cc", "-O2", "-ffp-contract=fast", "-shared", "-fPIC", *flags]
        source = Path(__file__).with_name("_peak.c")
        subprocess.run([*command, "-o", str(path), str(source)], check=True)
        library = ctypes.CDLL(str(path))
    real, pointer = ctypes.c_float, ctypes.POINTER(ctypes.c_float)
    library.multiply_adds.restype = library.exchange.restype = ctypes.c_double
    library.multiply_adds.argtypes = [ctypes.c_long, real, real, pointer]
    library.exchange.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    return library
