"""Transport between processes of one machine by memory that they share.

A worker writes its tensors once, and each of the others reads them there. All workers add the same
values in the same order, so that their results have the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arrays import at_address, reduce_to, viewed
from ._memory import CAPACITY, Message, Messages
from ._reduction import Reduction

if TYPE_CHECKING:
    import tvm

#: The bytes to which the places of tensors within a message are aligned.
_UNIT = 64


class Shared:
    """The workers of a machine that exchange messages.

    Parameters
    ----------
    messages : Messages
        The messages of this worker.
    """

    def __init__(self, messages: Messages):
        self.rank, self.size = messages.rank, messages.size
        self._messages = messages
        messages.before_wait = self._finish
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._pending: deque[_Pending] = deque()
        self._is_finishing = False

    def close(self) -> None:
        """Give the memory back."""
        self._messages.close()

    def allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> None:
        """Write the reduced tensors to ``recvs``."""
        self.start_allreduce(sends, kind, recvs).wait()

    def start_allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> Reduction:
        """Start to write the reduced tensors to ``recvs``, and return the reduction. ``sends`` are
        not needed any more."""
        arrays, results = [viewed(tensor) for tensor in sends], [viewed(tensor) for tensor in recvs]
        if sum(map(_padded, arrays)) > CAPACITY:
            for own, result in zip(arrays, results, strict=True):
                for part, of_result in zip(_pieces(own), _pieces(result), strict=True):
                    self._finish(self._started([part], kind, [of_result]))
            return Reduction(None, lambda: None)
        pending = self._started(arrays, kind, results)
        return Reduction(None, lambda: self._finish(pending), is_beside=False)

    def _started(self, arrays: Sequence, kind: str, results: Sequence) -> _Pending:
        message, places = self._write(arrays, self._others)
        message.is_kept = True
        expected = {rank: self._messages.expect(rank) for rank in self._others}
        pending = _Pending(self, message, places, expected=expected, kind=kind, results=results)
        self._pending.append(pending)
        return pending

    def _write(self, arrays: Sequence[np.ndarray], readers: Sequence[int]) -> tuple[Any, list[int]]:
        """Send arrays as one message; return it, and their places in it."""
        sizes = [_padded(array) for array in arrays]
        places = list(itertools.accumulate(sizes, initial=0))[:-1]
        place, address = self._messages.place(sum(sizes))
        for at, array in zip(places, arrays, strict=True):
            at_address(address + at, array.size, array.dtype)[...] = array
        return self._messages.send(place, sum(sizes), readers), places

    def _finish(self, last: _Pending | None = None) -> None:
        """Finish reductions in the order of their starts, up to one of them, or all: other workers
        may wait until their messages have been read."""
        if self._is_finishing or (last is not None and last not in self._pending):
            return
        self._is_finishing = True
        try:
            while self._pending:
                reduction = self._pending.popleft()
                reduction.finish()
                if reduction is last:
                    break
        finally:
            self._is_finishing = False

    @contextlib.contextmanager
    def _message(self, sender: int, size: int) -> Iterator[int]:
        """Read the next message of a worker, which must have a size; the result is its address."""
        number = self._messages.expect(sender)
        yield self._checked(sender, number, size)
        self._messages.done(sender, number)

    def _checked(self, sender: int, number: int, size: int) -> int:
        address, sent_size = self._messages.read(sender, number)
        if sent_size != size:
            raise ValueError(
                f"worker {self._messages.names[sender]} has given {sent_size} bytes, but worker "
                f"{self._messages.names[self.rank]} expects {size}: "
                "the shapes and dtypes must be the same"
            )
        return address

    def _receive(self, array: np.ndarray, sender: int) -> None:
        """Write the message of a worker to an array."""
        with self._message(sender, _padded(array)) as address:
            array[...] = at_address(address, array.size, array.dtype)

    def allgather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor) -> None:
        """Write the tensors of all workers to ``recv``, in the order of their numbers."""
        own, whole = _bytes(send), _bytes(recv).reshape(self.size, -1)
        whole[self.rank] = own
        for part in _ranges(own.size):
            self._write([own[part]], self._others)
            for sender in self._others:
                self._receive(whole[sender][part], sender)

    def broadcast(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Write the tensor of worker 0 to ``recv``; ``send`` is None on the others."""
        result = _bytes(recv)
        if self.rank == 0 and send is not recv:
            result[...] = _bytes(send)
        for part in _ranges(result.size):
            if self.rank == 0:
                self._write([result[part]], self._others)
            else:
                self._receive(result[part], 0)

    def scatter(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Write the worker's part of the tensor of worker 0 to ``recv``; ``send`` is None on the
        others."""
        result = _bytes(recv)
        if self.rank:
            self._receive_all(result, 0)
            return
        parts = _bytes(send).reshape(self.size, -1)
        result[...] = parts[0]
        for reader in self._others:
            self._send_all(parts[reader], reader)

    def gather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor | None) -> None:
        """Write the tensors of all workers to ``recv`` of worker 0, which is None on the others."""
        own = _bytes(send)
        if self.rank:
            self._send_all(own, 0)
            return
        parts = _bytes(recv).reshape(self.size, -1)
        parts[0] = own
        for sender in self._others:
            self._receive_all(parts[sender], sender)

    def send(self, buffer: tvm.runtime.Tensor, receiver: int) -> None:
        """Send a tensor to another worker."""
        self._send_all(_bytes(buffer), receiver)

    def recv(self, buffer: tvm.runtime.Tensor, sender: int) -> None:
        """Receive a tensor of another worker."""
        self._receive_all(_bytes(buffer), sender)

    def _send_all(self, array: np.ndarray, receiver: int) -> None:
        for part in _ranges(array.size):
            self._write([array[part]], [receiver])

    def _receive_all(self, array: np.ndarray, sender: int) -> None:
        for part in _ranges(array.size):
            self._receive(array[part], sender)


class _Pending:
    """A reduction that has started: the worker's own message, and those that it expects."""

    def __init__(
        self,
        shared: Shared,
        message: Message,
        places: Sequence[int],
        expected: dict[int, int],
        kind: str,
        results: Sequence[np.ndarray],
    ):
        self._shared, self._message, self._places = shared, message, places
        self._expected, self._kind, self._results = expected, kind, results

    def finish(self) -> None:
        """Wait for the messages of the others, and write the results."""
        shared = self._shared
        size = sum(map(_padded, self._results))
        addresses = [
            self._message.address
            if rank == shared.rank
            else shared._checked(rank, self._expected[rank], size)
            for rank in range(shared.size)
        ]
        for at, result in zip(self._places, self._results, strict=True):
            parts = [at_address(address + at, result.size, result.dtype) for address in addresses]
            reduce_to(result, parts, self._kind)
        for rank, number in self._expected.items():
            shared._messages.done(rank, number)
        self._message.is_kept = False


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // _UNIT) * _UNIT


def _bytes(tensor: tvm.runtime.Tensor) -> np.ndarray:
    return viewed(tensor).view(np.uint8)


def _ranges(count: int, itemsize: int = 1) -> list[slice]:
    """Return the ranges of elements that fit into messages."""
    step = CAPACITY // 2 // itemsize
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    return [array[piece] for piece in _ranges(array.size, array.itemsize)]


def connect(
    handle: int, settings: dict, rank: int, machine: Sequence[int], other: Callable
) -> tuple:
    """Return the connections of a worker: to all workers, within its group, and to the
    workers of its place in other groups.

    Parameters
    ----------
    handle : int
        The file descriptor of the memory of this machine.
    settings : dict
        ``timeout``, ``num_workers`` and ``num_groups``.
    rank : int
        The worker's number.
    machine : Sequence[int]
        The numbers of the workers of this machine.
    other : Callable
        Returns the connections to workers of several machines, by another transport.
    """
    size, groups = settings["num_workers"], settings["num_groups"]
    group_size = size // groups
    group, place = divmod(rank, group_size)
    members = [
        list(range(size)),
        list(range(group * group_size, (group + 1) * group_size)),
        list(range(place, size, group_size)),
    ]
    connections: dict[tuple, object] = {}
    others = None
    for number, ranks in enumerate(members):
        key = tuple(ranks)
        if key in connections:
            continue
        if set(ranks) <= set(machine):
            places = {member: machine.index(member) for member in ranks}
            messages = Messages(
                handle,
                number,
                rank,
                members=places,
                workers=len(machine),
                timeout=settings["timeout"],
            )
            connections[key] = Shared(messages)
        else:
            others = other() if others is None else others
            connections[key] = others[number]
    return tuple(connections[tuple(ranks)] for ranks in members)


__all__ = ["Shared", "connect"]
