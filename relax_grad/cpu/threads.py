"""The number of threads of TVM's runtime, and PyTorch's threads beside them.

On x86 TVM's default is half of the processors that the operating system shows, because the other
half are mostly second threads of the same cores. On machines that show one thread of each core, as
many virtual machines do, half of the cores then stay idle.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path

import tvm

from .._validation import check_integer

#: The mode in which the threads share all processors. Otherwise each thread is bound to one
#: processor.
_SHARE_PROCESSORS = -3

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

#: The numbers of the processors (hardware threads) that the process may run on, at the time of the
#: import. TVM may later bind the calling thread to some of them.
_PROCESSORS = (
    sorted(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else list(range(os.cpu_count() or 1))
)


#: The variables by which users choose how long the threads of OpenMP wait.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PLACES", "OMP_PROC_BIND")

#: The elements that PyTorch gives to one thread at least.
_GRAIN = 32768


def get_num_threads() -> int:
    """Return the number of threads that TVM's runtime uses for programs of the calling thread.

    Returns
    -------
    number : int
        The number of threads, including the calling thread.

    Examples
    --------
    >>> import relax_grad
    >>> _ = relax_grad.set_num_threads(1)
    >>> relax_grad.get_num_threads()
    1
    """
    if not hasattr(os, "sched_getaffinity"):
        return tvm.runtime.num_threads()
    # If TVM has not run anything yet, this query starts its threads and binds the calling thread to
    # some processors.
    allowed = os.sched_getaffinity(0)
    number = tvm.runtime.num_threads()
    os.sched_setaffinity(0, allowed)
    return number


def set_num_threads(number: int | None = None) -> int:
    """Set the number of threads of TVM's runtime.

    The number applies to the calling thread, and to threads that have not run anything yet.
    Processes that are started later inherit it as ``TVM_NUM_THREADS``.

    Parameters
    ----------
    number : int, optional
        The number of threads, including the calling thread. The default is ``TVM_NUM_THREADS`` or
        ``OMP_NUM_THREADS``, and without these the number of cores of the process. The default is
        less if TVM has started with fewer threads.

    Returns
    -------
    number : int
        The number of threads from now on.

    Raises
    ------
    TypeError
        If the number is not an integer.
    ValueError
        If the number is less than 1, or larger than the number of processors of the process.
    RuntimeError
        If TVM has already run in the calling thread with fewer threads, because it does not add
        any.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.set_num_threads(1)
    1
    """
    wanted = number
    number = min(default_threads(), len(_PROCESSORS)) if wanted is None else wanted
    number = check_integer("number", number, 1, len(_PROCESSORS))
    configure = tvm.get_global_func("runtime.config_threadpool")
    configure(_SHARE_PROCESSORS, number, [str(processor) for processor in _PROCESSORS])
    used = get_num_threads()
    if wanted is not None and used != wanted:
        raise RuntimeError(
            f"TVM has already run a function in this thread with {used} threads, and cannot add "
            f"more; set the number before that, or start Python with TVM_NUM_THREADS={wanted}"
        )
    os.environ["TVM_NUM_THREADS"] = str(used)
    return used


def default_threads() -> int:
    """Return the number of threads from the environment, or else the number of cores."""
    wanted = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if wanted and wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return cores()


def processors() -> list[int]:
    """Return the numbers of the processors that the process may run on. The calling thread may be
    bound to fewer."""
    return list(_PROCESSORS)


def cores() -> int:
    """Return the number of cores that the process may run on; all threads of a core count as
    one."""
    return len({_siblings(processor) for processor in _PROCESSORS})


def _siblings(processor: int) -> str:
    """Return a text that identifies the core of a processor."""
    try:
        return Path(_SIBLINGS.format(processor)).read_text()
    except OSError:  # not Linux, or a system without this file
        return str(processor)


@functools.cache
def let_torch_threads_sleep() -> None:
    """Let PyTorch's threads sleep soon after each of their parallel loops, for the rest of the
    process.

    The threads of GNU's OpenMP, which PyTorch uses on Linux, wait for the next loop for some
    milliseconds without leaving their processors, which TVM's threads then lack. They wait for
    microseconds only if OpenMP has more threads than there are processors. Threads that sleep count
    too: each thread of Python that runs a loop has its own team.

    Nothing changes where the environment says how long threads wait.
    """
    import torch

    number = torch.get_num_threads()
    if (
        sys.platform != "linux"
        or number < 2
        or any(variable in os.environ for variable in _WAITING)
    ):
        return
    if not list(Path(torch.__file__).parent.glob("lib/libgomp*")):
        return
    for _ in range(len(_PROCESSORS) // number):
        has_team = threading.Event()
        threading.Thread(target=_sleep, args=(number, has_team), daemon=True).start()
        has_team.wait()


def _sleep(number: int, has_team: threading.Event) -> None:
    import torch

    try:
        torch.ones(number * _GRAIN, device="cpu").add_(1)
    finally:
        has_team.set()
    threading.Event().wait()
