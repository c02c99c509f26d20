"""The options of a session, checked."""

from __future__ import annotations

import os
from typing import NamedTuple

import tvm_ffi

from .._packages import load
from .._validation import check_integer
from . import _handshake, _memory, _mpi_job, _processes


class Options(NamedTuple):
    """The options of :func:`relax_grad.distributed.session`.

    Attributes
    ----------
    address : tuple[str, int]
        The host and the port of ``listen``.
    """

    num_workers: int
    backend: str
    nodes: int
    num_groups: int
    threads: int | None
    timeout: float
    start_timeout: float
    address: tuple[str, int]
    secret: str | None
    shared_memory: bool


def checked(
    num_workers: int,
    backend: str,
    nodes: int,
    num_groups: int,
    threads: int | None,
    timeout: float,
    start_timeout: float,
    listen: str,
    secret: str | None,
    shared_memory: bool,
) -> Options:
    """Return the options of a session, or raise an error. With MPI, processes other than the first
    one become workers here."""
    num_workers = check_integer("num_workers", num_workers, 1)
    nodes = check_integer("nodes", nodes, 1)
    num_groups = check_integer("num_groups", num_groups, 1)
    if backend not in ("gloo", "mpi", "nccl"):
        raise ValueError(f'backend must be "gloo", "mpi" or "nccl", but it is {backend!r}')
    if num_workers % num_groups:
        raise ValueError(
            f"num_groups must divide num_workers, but they are {num_groups} and {num_workers}"
        )
    if nodes > num_workers:
        raise ValueError(
            f"each node needs a worker, but there are {nodes} nodes and {num_workers} workers"
        )
    if threads is not None:
        threads = check_integer("threads", threads, 1)
    check_seconds("timeout", timeout)
    check_seconds("start_timeout", start_timeout)
    address = _processes.address_of(listen)
    if backend == "mpi":
        if nodes > 1:
            raise ValueError(f"nodes is for gloo, but it is {nodes}: mpiexec places the processes")
        if not _mpi_job.is_first(num_workers):
            _mpi_job.serve_sessions()
        address = _processes.address_of(_mpi_job.own_address(listen))
    if nodes > 1:
        secret = _handshake.check_secret(
            os.environ.get("RELAX_GRAD_SECRET", "") if secret is None else secret
        )
    if backend == "nccl" and tvm_ffi.get_global_func("runtime.disco.nccl.init_ccl", True) is None:
        raise ValueError(
            'backend: this TVM was built without NCCL; for CPUs, the backend is "gloo"'
        )
    if not isinstance(shared_memory, bool):
        raise TypeError(f"shared_memory must be True or False, but it is {shared_memory!r}")
    shared_memory = shared_memory and _memory.is_available()
    needs_gloo = backend != "mpi" and (nodes > 1 or not shared_memory)
    if needs_gloo:
        load("torch", "the transport gloo, which moves the bytes of collectives,")
    return Options(
        num_workers,
        backend,
        nodes,
        num_groups=num_groups,
        threads=threads,
        timeout=float(timeout),
        start_timeout=float(start_timeout),
        address=address,
        secret=secret,
        shared_memory=shared_memory,
    )


def check_seconds(name: str, value: object) -> None:
    """Check a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, but it is {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number of seconds, but it is {value}")
