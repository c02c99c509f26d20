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
from ._processes import Machine
from ._tasks import serve


def main(arguments: list[str]) -> None:
    """Serve the commands of Disco until they end.

    Parameters
    ----------
    arguments : list[str]
        The worker's number, the numbers of workers and groups, five file descriptors (of commands,
        of replies, of reports, one that ends when the parent ends, and of shared memory), the
        addresses of this machine and of the controller's, and the workers of this machine.
    """
    rank, num_workers, num_groups, commands, replies, reports, parent, memory = map(
        int, arguments[:8]
    )
    host, store, *ranks = arguments[8:]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def report(event: dict) -> None:
        with contextlib.suppress(OSError):  # the controller has ended, and this process ends too
            os.write(reports, json.dumps(event).encode() + b"\n")

    serve(rank, num_workers, report, host, store, Machine([*map(int, ranks)], memory))
    process = tvm.get_global_func("runtime.disco.WorkerProcess")
    process(rank, num_workers, num_groups, commands, replies)


def _end_with(parent: int) -> None:
    """End this process when the parent's end of a pipe is closed, whatever other threads wait
    for."""
    with contextlib.suppress(OSError):
        os.read(parent, 1)
    os._exit(1)


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
        os._exit(code)  # the connections of gloo would wait for those of other workers
