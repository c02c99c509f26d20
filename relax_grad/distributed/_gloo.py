"""Transport between processes by gloo, the library of ``torch.distributed`` for CPUs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import tvm

from ._reduction import Reduction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

#: The dtypes that gloo cannot reduce, or not exactly enough, with those that are reduced instead.
_REDUCED_IN = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "bool": "uint8"}


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
        self, store: Any, rank: int, size: int, host: str, timeout: float, start_timeout: float
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

    def allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> None:
        """Write the reduced tensors to ``recvs``."""
        self.start_allreduce(sends, kind, recvs).wait()

    def start_allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> Reduction:
        """Start to write the reduced tensors to ``recvs``, and return the reduction. ``sends`` are
        not needed any more."""
        import torch
        from torch.distributed import AllreduceOptions, ReduceOp

        operands = [_shared(tensor).reshape(-1) for tensor in sends]
        results = [_shared(tensor).reshape(-1) for tensor in recvs]
        dtype = _REDUCED_IN.get(str(operands[0].dtype).removeprefix("torch."))
        if len(operands) == 1 and not dtype:
            own = results[0].copy_(operands[0])
        else:
            own = torch.empty(
                sum(operand.numel() for operand in operands),
                dtype=getattr(torch, dtype) if dtype else operands[0].dtype,
            )
            for part, operand in zip(_divided(own, operands), operands, strict=True):
                part.copy_(operand)
        work = None
        if self._group is not None:
            options = AllreduceOptions()
            reductions = {
                "prod": ReduceOp.PRODUCT,
                "min": ReduceOp.MIN,
                "max": ReduceOp.MAX,
            }
            options.reduceOp = reductions.get(kind, ReduceOp.SUM)
            work = self._group.allreduce([own], options)

        def finish() -> None:
            if work is not None and kind == "avg":
                rounding = None if own.is_floating_point() else "trunc"
                torch.div(own, self.size, rounding_mode=rounding, out=own)
            if own is not results[0]:
                for result, part in zip(results, _divided(own, results), strict=True):
                    result.copy_(part)

        return Reduction(work, finish)

    def allgather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor) -> None:
        """Write the tensors of all workers to ``recv``, in the order of their numbers."""
        parts = _shared(recv).reshape(self.size, -1)
        flat = _shared(send).reshape(-1)
        if self._group is None:
            parts[0].copy_(flat)
        else:
            self._group.allgather([list(parts.unbind(0))], [flat]).wait()

    def broadcast(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Write the tensor of worker 0 to ``recv``; ``send`` is None on the others."""
        from torch.distributed import BroadcastOptions

        result = _shared(recv)
        if send is not None:
            result.reshape(-1).copy_(_shared(send).reshape(-1))
        if self._group is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([result], options).wait()

    def scatter(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
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

    def gather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor | None) -> None:
        """Write the tensors of all workers to ``recv`` of worker 0, which is None on the others."""
        from torch.distributed import GatherOptions

        flat = _shared(send).reshape(-1)
        parts = [] if recv is None else list(_shared(recv).reshape(self.size, -1).unbind(0))
        if self._group is None:
            parts[0].copy_(flat)
            return
        options = GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [flat], options).wait()

    def _others(self) -> ProcessGroupGloo:
        """Return the connections to other workers; raise RuntimeError if there is none."""
        if self._group is None:
            raise RuntimeError("there is no other worker")
        return self._group

    def send(self, buffer: tvm.runtime.Tensor, receiver: int) -> None:
        """Send a tensor to another worker."""
        self._others().send([_shared(buffer).reshape(-1)], receiver, 0).wait()

    def recv(self, buffer: tvm.runtime.Tensor, sender: int) -> None:
        """Receive a tensor of another worker."""
        self._others().recv([_shared(buffer).reshape(-1)], sender, 0).wait()


def _shared(tensor: tvm.runtime.Tensor) -> Any:
    """Return a tensor of PyTorch with the same memory."""
    import torch

    try:
        return torch.from_dlpack(tensor)
    except Exception as error:
        raise TypeError(f"gloo cannot move tensors of the dtype {tensor.dtype}") from error


def _divided(whole: Any, parts: Sequence) -> list:
    """Return the parts of a vector that have the sizes of others."""
    return list(whole.split([part.numel() for part in parts]))


def connect(settings: dict, rank: int) -> tuple[Gloo, Gloo, Gloo]:
    """Return the connections of a worker: to all workers, within its group, and to the
    workers of its place in other groups.

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
    group_size = size // groups
    group, place = divmod(rank, group_size)

    def among(name: str, own: int, count: int) -> Gloo:
        if count == size:
            return world
        return Gloo(PrefixStore(name, store), own, count, settings["host"], *times)

    return world, among(f"group{group}", place, group_size), among(f"place{place}", group, groups)


def serve(listening: socket.socket) -> tuple[object, int]:
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
