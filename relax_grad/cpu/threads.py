"""How many threads TVM's runtime uses.

By default it takes half of what the operating system shows on x86, for the other half are mostly second threads
of the same cores. On machines that show one thread of each core, as many virtual ones do, half of the cores
stay idle.
"""

from __future__ import annotations

import os
from pathlib import Path

import tvm

#: The threads share all processors, instead of being bound to one each.
_SHARE_PROCESSORS = -3

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

#: The numbers of the processors (the threads of cores) that the process might run on when this was imported:
#: TVM may later bind the thread that calls it to some of them.
_PROCESSORS = (
    sorted(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else list(range(os.cpu_count() or 1))
)


def get_num_threads() -> int:
    """Return how many threads TVM's runtime uses for what the calling thread runs."""
    if not hasattr(os, "sched_getaffinity"):
        return tvm.runtime.num_threads()
    # Where TVM has not run anything, asking starts its threads, and binds the calling one to as many processors.
    allowed = os.sched_getaffinity(0)
    number = tvm.runtime.num_threads()
    os.sched_setaffinity(0, allowed)
    return number


def set_num_threads(number: int | None = None) -> int:
    """Let TVM's runtime use a number of threads.

    It holds for what the calling thread runs, and for threads that have not run anything yet. Processes that are
    started later inherit it: it becomes their ``TVM_NUM_THREADS``.

    Parameters
    ----------
    number : int, optional
        How many, the calling thread being one of them. By default ``TVM_NUM_THREADS`` or
        ``OMP_NUM_THREADS``, and without these as many as there are cores for the process; less where TVM has
        started with less.

    Returns
    -------
    number : int
        How many it uses from now on.

    Raises
    ------
    TypeError
        If the number is no integer.
    ValueError
        If the number is less than 1, or more than there are processors for the process.
    RuntimeError
        If TVM has already run something in the calling thread, and started fewer: it does not add any.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.set_num_threads(1)
    1
    """
    wanted = number
    number = min(default_threads(), len(_PROCESSORS)) if wanted is None else wanted
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number must be an int, but it is {number!r}")
    if not 1 <= number <= len(_PROCESSORS):
        raise ValueError(
            f"number must be from 1 to {len(_PROCESSORS)}, the processors that this process may run "
            f"on, but it is {number}"
        )
    configure = tvm.get_global_func("runtime.config_threadpool")
    configure(_SHARE_PROCESSORS, number, [str(each) for each in _PROCESSORS])
    found = get_num_threads()
    if wanted is not None and found != wanted:
        raise RuntimeError(
            f"TVM has already run something in this thread with {found} threads, and adds none; set the "
            f"number first, or start Python with TVM_NUM_THREADS={wanted}"
        )
    os.environ["TVM_NUM_THREADS"] = str(found)
    return found


def default_threads() -> int:
    """Return how many threads the environment asks for; as many as there are cores where it does not."""
    wanted = os.environ.get("TVM_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if wanted and wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return cores()


def cores() -> int:
    """Return the number of cores that the process may run on; the threads of one count as one."""
    return len({_siblings(processor) for processor in _PROCESSORS})


def _siblings(processor: int) -> str:
    """Return what tells the core of a processor from others."""
    try:
        return Path(_SIBLINGS.format(processor)).read_text()
    except OSError:  # another system than Linux, or one that does not show it
        return str(processor)
