"""Transport between processes by gloo, the library of ``torch.distributed`` for CPUs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import tvm

#: The dtypes that gloo cannot reduce, or not exactly enough, with those that are reduced instead.
_REDUCED_IN = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "bool": "uint8"}


class Reduction:
    """A reduction that has started.

    Parameters
    ----------
    work : torch.distributed.Work or None
        The work of gloo; None if there is nothing to wait for.
    finish : Callable
        Writes the result, after the work.

    Attributes
    ----------
    ended : float or None
        The time of ``time.perf_counter`` at which the work ended, as far as it is known.
    """

    def __init__(self, work, finish: Callable[[], None]):
        self._work, self._finish = work, finish
        self.ended: float | None = None
        if work is None:
            self.ended = time.perf_counter()
        else:
            work.get_future().add_done_callback(self._note)

    def _note(self, _future) -> None:
        self.ended = time.perf_counter()

    def wait(self) -> None:
        """Wait for the result."""
        if self._work is not None:
            self._work.wait()
        self._finish()


class Gloo:
    """The connections among some workers.

    Parameters
    ----------
    store : torch.distributed.Store
        The store by which the workers find each other.
    rank, size : int
        The worker's number among them, and how many they are.
    host : str
        The address of this machine by which the others reach it.
    timeout, start_timeout : float
        The seconds after which a collective fails, and those in which the workers must connect.
    """

    def __init__(
        self, store, rank: int, size: int, host: str, timeout: float, start_timeout: float
    ):
        from torch.distributed import ProcessGroupGloo

        self.rank, self.size = rank, size
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=start_timeout)
        self._group = ProcessGroupGloo(store, rank, size, options) if size > 1 else None
        if self._group is not None:
            self._group.set_timeout(timedelta(seconds=timeout))

    def close(self) -> None:
        """End the connections."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.abort()

    def allreduce(self, send, kind: str, recv) -> None:
        """Write the reduced tensor to ``recv``."""
        self.start_allreduce(send, kind, recv).wait()

    def start_allreduce(self, send, kind: str, recv) -> Reduction:
        """Start to write the reduced tensor to ``recv``, and return the reduction. ``send`` is not
        needed any more."""
        import torch
        from torch.distributed import AllreduceOptions, ReduceOp

        given, result = _shared(send), _shared(recv)
        dtype = _REDUCED_IN.get(str(given.dtype).removeprefix("torch."))
        own = given.to(getattr(torch, dtype)) if dtype else result.copy_(given)
        work = None
        if self._group is not None:
            options = AllreduceOptions()
            reductions = {
                "prod": ReduceOp.PRODUCT,
                "min": ReduceOp.MIN,
                "max": ReduceOp.MAX,
            }
            options.reduceOp = reductions.get(kind, ReduceOp.SUM)
            work = self._group.allreduce([own.reshape(-1)], options)

        def finish() -> None:
            if work is not None and kind == "avg":
                rounding = None if own.is_floating_point() else "trunc"
                torch.div(own, self.size, rounding_mode=rounding, out=own)
            if dtype:
                result.copy_(own)

        return Reduction(work, finish)

    def allgather(self, send, recv) -> None:
        """Write the tensors of all workers to ``recv``, in the order of their numbers."""
        parts = _shared(recv).reshape(self.size, -1)
        given = _shared(send).reshape(-1)
        if self._group is None:
            parts[0].copy_(given)
        else:
            self._group.allgather([list(parts.unbind(0))], [given]).wait()

    def broadcast(self, send, recv) -> None:
        """Write the tensor of worker 0 to ``recv``; ``send`` is None on the others."""
        from torch.distributed import BroadcastOptions

        result = _shared(recv)
        if send is not None:
            result.reshape(-1).copy_(_shared(send).reshape(-1))
        if self._group is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([result], options).wait()

    def scatter(self, send, recv) -> None:
        """Write the worker's part of the tensor of worker 0 to ``recv``; ``send`` is None on the
        others."""
        from torch.distributed import ScatterOptions

        result = _shared(recv).reshape(-1)
        parts = [] if send is None else list(_shared(send).reshape(self.size, -1).unbind(0))
        if self._group is None:
            result.copy_(parts[0])
            return
        options = ScatterOptions()
        options.rootRank = 0
        self._group.scatter([result], [parts] if parts else [], options).wait()

    def gather(self, send, recv) -> None:
        """Write the tensors of all workers to ``recv`` of worker 0, which is None on the others."""
        from torch.distributed import GatherOptions

        given = _shared(send).reshape(-1)
        parts = [] if recv is None else list(_shared(recv).reshape(self.size, -1).unbind(0))
        if self._group is None:
            parts[0].copy_(given)
            return
        options = GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [given], options).wait()

    def send(self, buffer, receiver: int) -> None:
        """Send a tensor to another worker."""
        self._group.send([_shared(buffer).reshape(-1)], receiver, 0).wait()

    def recv(self, buffer, sender: int) -> None:
        """Receive a tensor of another worker."""
        self._group.recv([_shared(buffer).reshape(-1)], sender, 0).wait()


def _shared(tensor: tvm.runtime.Tensor):
    """Return a tensor of PyTorch with the same memory."""
    import torch

    try:
        return torch.from_dlpack(tensor)
    except Exception as error:
        raise TypeError(f"gloo cannot move tensors of the dtype {tensor.dtype}") from error


def connect(settings: dict, rank: int) -> tuple[Gloo, Gloo, Gloo]:
    """Return the connections of a worker: to all workers, within its group, and to those of its
    place in other groups.

    Parameters
    ----------
    settings : dict
        ``store`` (host, port and prefix), ``host``, ``timeout``, ``start_timeout``, ``num_workers``
        and ``num_groups``.
    rank : int
        The worker's number.
    """
    import torch
    from torch.distributed import PrefixStore, TCPStore

    torch.set_num_threads(1)
    times = settings["timeout"], settings["start_timeout"]
    where = settings["store"]
    store = TCPStore(
        where["host"],
        where["port"],
        is_master=False,
        timeout=timedelta(seconds=times[1]),
        wait_for_workers=False,
    )
    store = PrefixStore(where["prefix"], store)
    size, groups = settings["num_workers"], settings["num_groups"]
    world = Gloo(PrefixStore("world", store), rank, size, settings["host"], *times)
    each = size // groups
    group, place = divmod(rank, each)

    def among(name: str, own: int, count: int) -> Gloo:
        if count == size:
            return world
        return Gloo(PrefixStore(name, store), own, count, settings["host"], *times)

    return world, among(f"group{group}", place, each), among(f"place{place}", group, groups)


def serve(listening) -> tuple[object, int]:
    """Return the store of a session on a listening socket, which it takes over, and its port."""
    from torch.distributed import TCPStore

    host, port = listening.getsockname()[:2]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=True,
    )
    return store, port
