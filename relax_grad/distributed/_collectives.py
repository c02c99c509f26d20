"""The collectives that Disco looks up, on tensors in the memory of the CPU."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import tvm
import tvm_ffi

from ..ir.asynchronous import GATHER, PART, PEERS, START, WAIT, WORLD
from ._arrays import viewed
from ._disco import COLLECTIVES, KINDS, PREFIX
from ._reduction import Reduction

#: The place in gloo's sources, with which its errors begin.
_PLACE = re.compile(r"^\[[^\]]*\] *")

#: The communicators of the workers in this process, by the thread. Python keeps no
#: ``threading.local`` of a thread that TVM started.
_OF_THREAD: dict[int, Communicator] = {}


class CollectiveError(RuntimeError):
    """The failure of a collective, of which another worker may be the cause."""


class _Started(NamedTuple):
    """A reduction under way: its memory, its beginning, and the end that a slower network has at
    least."""

    reduction: Reduction
    recvs: list[tvm.runtime.Tensor]
    begin: float
    least: float


class Transport(Protocol):
    """The messages among some workers: of Gloo or of MPI.

    Attributes
    ----------
    rank, size : int
        The number of this worker among them, and their number.
    """

    rank: int
    size: int

    def close(self) -> None:
        """Release the connections."""

    def allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> None:
        """Reduce tensors of all workers."""

    def start_allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> Reduction:
        """Begin to reduce tensors of all workers."""

    def allgather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor) -> None:
        """Gather the tensors of all workers on each."""

    def broadcast(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Copy a tensor of worker 0 to all."""

    def scatter(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Give each worker its part of a tensor of worker 0."""

    def gather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor | None) -> None:
        """Gather the tensors of all workers on worker 0."""

    def send(self, buffer: tvm.runtime.Tensor, receiver: int) -> None:
        """Send a tensor to a worker."""

    def recv(self, buffer: tvm.runtime.Tensor, sender: int) -> None:
        """Receive a tensor of a worker."""


class Communicator:
    """The collectives of one worker.

    Parameters
    ----------
    world, group, peers : Transport
        All workers, the worker's group, and the workers of the same place in each group.
    rank, num_workers, num_groups : int
        The worker's number and the numbers of workers and groups. The workers of a group have
        consecutive numbers.

    Attributes
    ----------
    failure : str
        The first failure of a collective outside of :meth:`guarded`, or "".
    raised : str
        The first failure within it. An error loses its class on its way through TVM.
    sent : int
        The bytes that the worker gave to collectives.
    seconds : float
        The time in which a collective was under way, including the wait for other workers.
    waited : float
        The time in which the worker computed nothing because of a collective. The difference is
        hidden.
    slowed : Callable or None
        The seconds that a collective takes at least, from its name and its bytes: a slower network
        for measurements. It carries one collective at a time.
    """

    def __init__(
        self,
        world: Transport,
        group: Transport,
        peers: Transport,
        rank: int,
        num_workers: int,
        num_groups: int,
    ):
        self.world, self.group, self.peers, self.rank = world, group, peers, rank
        self.num_workers, self.num_groups = num_workers, num_groups
        self.failure = self.raised = ""
        self.sent, self.seconds, self.waited, self.slowed = 0, 0.0, 0.0, None
        self._is_guarded = False
        self._started: dict[tuple[int, ...], _Started] = {}
        self._times: list[tuple[float, float]] = []
        self._network_is_free = 0.0

    def install(self) -> None:
        """Serve the collectives of the calling thread."""
        _OF_THREAD[threading.get_ident()] = self

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let collectives raise errors. Elsewhere an error in a thread of TVM would end the
        process."""
        self._is_guarded = True
        try:
            yield
        finally:
            self._is_guarded = False

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """Note the failure of a collective, and raise it where that is allowed."""
        try:
            yield
        except Exception as error:
            text = f"{name}: {_PLACE.sub('', str(error))}"
            if self._is_guarded:
                self.raised = self.raised or text
                raise CollectiveError(text) from error
            self.failure = self.failure or text

    def call(self, name: str, arguments: tuple) -> None:
        """Run a collective."""
        with self._noted(name):
            begin, before = time.perf_counter(), self.sent
            getattr(self, name)(*arguments)
            self._wait_for_network(self._least_end(name, self.sent - before, begin))
            self._count(begin, begin, time.perf_counter())

    def start_allreduce(
        self, sends: Sequence, kind: str, among: str = WORLD
    ) -> list[tvm.runtime.Tensor]:
        """Start a reduction of copies of tensors of one dtype, and return the memory of its results
        for :meth:`wait`.

        The communicator keeps the memory until then, because threads of the transport write to it.
        """
        recvs = [tvm.runtime.empty(tuple(map(int, tensor.shape)), tensor.dtype) for tensor in sends]
        filled = [i for i, tensor in enumerate(sends) if _elements(tensor)]
        if not filled:
            return recvs
        operands, results = [sends[i] for i in filled], [recvs[i] for i in filled]
        with self._noted("allreduce"):
            begin = time.perf_counter()
            size = sum(map(_bytes, operands))
            self.sent += size
            transport = self.peers if among == PEERS else self.world
            reduction = transport.start_allreduce(operands, kind, results)
            least = self._least_end("allreduce", size, begin)
            self._started[_key(recvs)] = _Started(reduction, recvs, begin, least)
        return recvs

    def wait(self, recvs: Sequence) -> Sequence:
        """Wait for the results of :meth:`start_allreduce`, and return them."""
        if not any(map(_elements, recvs)):
            return recvs
        with self._noted("allreduce"):
            begin = time.perf_counter()
            started = self._started.pop(_key(recvs))
            reduction = started.reduction
            reduction.wait()
            self._wait_for_network(started.least)
            now = time.perf_counter()
            ended = now if reduction.ended is None else reduction.ended
            first = started.begin if reduction.is_beside or started.least else begin
            self._count(first, begin, now, max(ended, started.least))
        return recvs

    def _least_end(self, name: str, size: int, begin: float) -> float:
        """Return the time at which a slower network has carried a collective."""
        if self.slowed is None:
            return 0.0
        self._network_is_free = max(begin, self._network_is_free) + self.slowed(name, size)
        return self._network_is_free

    def _wait_for_network(self, end: float) -> None:
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def _count(self, begin: float, blocked: float, now: float, ended: float | None = None) -> None:
        """Count the time of a collective from its beginning to its end, in which the worker waited
        since ``blocked``."""
        if ended is None or ended > blocked:
            ended = now
            self.waited += now - blocked
        self._times.append((begin, ended))
        if not self._started:  # collectives at the same time count once
            covered = 0.0
            for first, last in sorted(self._times):
                self.seconds += max(0.0, last - max(first, covered))
                covered = max(covered, last)
            self._times.clear()

    def close(self) -> None:
        """End the connections, which also ends waiting collectives."""
        for transport in {id(e): e for e in (self.world, self.group, self.peers)}.values():
            transport.close()

    def _among(self, in_group: bool) -> Transport:
        return self.group if in_group else self.world

    def allreduce(
        self, send: tvm.runtime.Tensor, kind: int, in_group: bool, recv: tvm.runtime.Tensor
    ) -> None:
        self.sent += _bytes(send)
        if _elements(send):
            self._among(in_group).allreduce([send], KINDS[kind], [recv])

    def allgather(self, send: tvm.runtime.Tensor, in_group: bool, recv: tvm.runtime.Tensor) -> None:
        among = self._among(in_group)
        _check_sizes("allgather", recv, send, among.size)
        self.sent += _bytes(send)
        among.allgather(send, recv)

    def gather_of_peers(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor) -> None:
        """Gather the tensors of the workers of the same place in each group; Disco has no such
        collective."""
        self.sent += _bytes(send)
        self.peers.allgather(send, recv)

    def broadcast_from_worker0(
        self, send: tvm.runtime.Tensor, in_group: bool, recv: tvm.runtime.Tensor
    ) -> None:
        among = self._among(in_group)
        self.sent += _bytes(recv) if among.rank == 0 else 0
        among.broadcast(send if among.rank == 0 else None, recv)

    def scatter_from_worker0(
        self, send: tvm.runtime.Tensor, in_group: bool, recv: tvm.runtime.Tensor
    ) -> None:
        among = self._among(in_group)
        if among.rank == 0:
            _check_sizes("scatter_from_worker0", send, recv, among.size)
            self.sent += _bytes(send)
        among.scatter(send if among.rank == 0 else None, recv)

    def gather_to_worker0(
        self, send: tvm.runtime.Tensor, in_group: bool, recv: tvm.runtime.Tensor
    ) -> None:
        among = self._among(in_group)
        if among.rank == 0:
            _check_sizes("gather_to_worker0", recv, send, among.size)
        self.sent += _bytes(send)
        among.gather(send, recv if among.rank == 0 else None)

    def recv_from_worker0(self, buffer: tvm.runtime.Tensor) -> None:
        self._check_other(0)
        self.world.recv(buffer, 0)

    def send_to_next_group(self, buffer: tvm.runtime.Tensor) -> None:
        self.send_to_worker(buffer, self.rank + self.num_workers // self.num_groups)

    def recv_from_prev_group(self, buffer: tvm.runtime.Tensor) -> None:
        self.recv_from_worker(buffer, self.rank - self.num_workers // self.num_groups)

    def send_to_worker(self, buffer: tvm.runtime.Tensor, receiver: int) -> None:
        self._check_other(receiver)
        self.sent += _bytes(buffer)
        self.world.send(buffer, receiver)

    def recv_from_worker(self, buffer: tvm.runtime.Tensor, sender: int) -> None:
        self._check_other(sender)
        self.world.recv(buffer, sender)

    def _check_other(self, rank: int) -> None:
        if not 0 <= rank < self.num_workers or rank == self.rank:
            raise ValueError(
                f"worker {self.rank} of {self.num_workers} has no other worker with the number "
                f"{rank}"
            )


def current() -> Communicator:
    """Return the communicator of the calling thread."""
    communicator = _OF_THREAD.get(threading.get_ident())
    if communicator is None:
        raise RuntimeError(
            "this thread is no worker of a session of relax_grad.distributed, which has the "
            "collectives for CPUs"
        )
    return communicator


def register() -> None:
    """Register the collectives under Disco's names in this process."""
    for name in COLLECTIVES:
        tvm_ffi.register_global_func(PREFIX + name, _dispatching(name), override=True)
    tvm_ffi.register_global_func(START, _start_allreduce, override=True)
    tvm_ffi.register_global_func(WAIT, _wait, override=True)
    tvm_ffi.register_global_func(PART, _part_of_peer, override=True)
    tvm_ffi.register_global_func(GATHER, _gather_of_peers, override=True)


def _start_allreduce(kind: str, among: str, *sends: tvm.runtime.Tensor) -> list[tvm.runtime.Tensor]:
    return current().start_allreduce(sends, str(kind), str(among))


def _wait(recvs: Sequence) -> Sequence:
    return current().wait(recvs)


def _part_of_peer(flat: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
    peers = current().peers
    part = tvm.runtime.empty((int(flat.shape[0]) // peers.size,), flat.dtype)
    elements = viewed(part)
    elements[...] = viewed(flat)[elements.size * peers.rank :][: elements.size]
    return part


def _gather_of_peers(part: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
    used = current()
    whole = tvm.runtime.empty((int(part.shape[0]) * used.peers.size,), part.dtype)
    used.call("gather_of_peers", (part, whole))
    return whole


def _dispatching(name: str) -> Callable:
    def collective(*arguments: Any) -> None:
        current().call(name, arguments)

    return functools.update_wrapper(collective, getattr(Communicator, name))


def _key(tensors: Sequence) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors if _elements(tensor))


def _bytes(tensor: tvm.runtime.Tensor) -> int:
    return _elements(tensor) * (tvm.DataType(tensor.dtype).bits // 8 or 1)


def _elements(tensor: tvm.runtime.Tensor) -> int:
    count = 1
    for extent in tensor.shape:
        count *= int(extent)
    return count


def _check_sizes(
    name: str, whole: tvm.runtime.Tensor, part: tvm.runtime.Tensor, count: int
) -> None:
    if _elements(whole) != count * _elements(part) or whole.dtype != part.dtype:
        raise ValueError(
            f"the whole of shape {tuple(whole.shape)} and dtype {whole.dtype} must have {count} "
            f"times the elements of a part of shape {tuple(part.shape)} and dtype {part.dtype}"
        )
