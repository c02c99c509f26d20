"""TVM's Disco, and the names by which it looks collectives up. ``tests/distributed/test_disco.py``
pins them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import tvm_ffi

#: Disco looks for ``runtime.disco.<library>.<collective>``. The name of the library is empty until
#: ``Session.init_ccl`` sets it, which accepts only libraries for GPUs.
PREFIX = "runtime.disco.."

#: The functions that Disco looks up by this prefix.
COLLECTIVES = (
    "allreduce",
    "allgather",
    "broadcast_from_worker0",
    "scatter_from_worker0",
    "gather_to_worker0",
    "recv_from_worker0",
    "send_to_next_group",
    "recv_from_prev_group",
    "send_to_worker",
    "recv_from_worker",
)

#: The kinds of reduction, by the numbers that Disco passes.
KINDS = ("sum", "prod", "min", "max", "avg")


def disco() -> ModuleType:
    """Return the module ``tvm.runtime.disco``.

    A wheel of TVM imports it before the library with its functions is loaded, and then has None in
    its place.
    """
    name = "tvm.runtime.disco"
    if sys.modules.get(name) is None:
        tvm_ffi.init_ffi_api("runtime.disco", f"{name}._ffi_api")
        sys.modules.pop(name, None)
    return importlib.import_module(name)


def process_session(num_workers: int, num_groups: int, pool: str) -> Any:
    """Return Disco's session of processes.

    Parameters
    ----------
    num_workers, num_groups : int
        The workers. The first one is a thread of this process.
    pool : str
        The name of the global function that returns, for the number of a worker, the file
        descriptors to read from and to write to. It is called with the number 0 when the session
        ends.
    """
    create = importlib.import_module(f"{disco().__name__}._ffi_api").SessionProcess
    return create(num_workers, num_groups, pool, "")
