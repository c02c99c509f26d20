"""The process of a worker: ``python -m relax_grad.distributed._worker``, which a controller or a
node starts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback

import tvm

from . import _replica  # noqa: F401  (registers its tasks)
from ._links import wait_for_end
from ._processes import Machine
from ._tasks import serve


def main(arguments: list[str]) -> None:
    """Serve the commands of Disco until they end.

    Parameters
    ----------
    arguments : list[str]
        The worker's number, the numbers of workers and groups, the process that has started this
        one, five file descriptors (of commands, of replies, of reports, one that ends when the
        parent ends, and of shared memory), the addresses of this machine and of the controller's,
        and the workers of this machine.
    """
    numbers, (host, store, *ranks) = [*map(int, arguments[:9])], arguments[9:]
    rank, num_workers, num_groups, process_of_parent, *descriptors = numbers
    commands, replies, reports, parent, memory = descriptors
    threading.Thread(target=_end_with, args=(parent, process_of_parent), daemon=True).start()
    os.register_at_fork(after_in_child=lambda: _close(commands, replies, reports, parent))

    def report(event: dict) -> None:
        with contextlib.suppress(OSError):  # the controller has ended, and this process ends too
            os.write(reports, json.dumps(event).encode() + b"\n")

    serve(rank, num_workers, report, host, store, machine=Machine([*map(int, ranks)], memory))
    process = tvm.get_global_func("runtime.disco.WorkerProcess")
    process(rank, num_workers, num_groups, commands, replies)


def _end_with(parent: int, process: int) -> None:
    """End this process when its parent has ended, whatever other threads wait for."""
    wait_for_end(parent, process)
    os._exit(1)


def _close(*descriptors: int) -> None:
    for descriptor in {*descriptors}:
        with contextlib.suppress(OSError):
            os.close(descriptor)


if __name__ == "__main__":
    from ._disco import disco

    disco()
    code = 1
    try:
        main(sys.argv[1:])
        code = 0
    except (OSError, KeyboardInterrupt):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's connections would wait for other workers
