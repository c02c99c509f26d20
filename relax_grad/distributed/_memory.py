"""Memory that the processes of one machine share, with messages between each two of them.

A message is a place in the memory of its sender. Semaphores in the memory tell that it is there,
and that it has been read. They also order the accesses of the processors. The memory has no name:
processes inherit its file descriptor, and it ends with the last of them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Collection

#: The bytes of the messages of a sender, of which only those in use take memory.
CAPACITY = 128 * 2**20

#: The messages between two workers that may be under way.
_SLOTS = 256

#: The bytes of a semaphore, of a slot (its place and its size), and of the unit of places.
_SEMAPHORE, _SLOT, _UNIT = 64, 16, 64

#: The seconds between looks at the flag that ends all waits.
_LOOK = 0.1

#: The sets of workers that may exchange messages: all, a group, and the workers of one place
#: in all groups.
SETS = 3


class Ended(RuntimeError):
    """The session has ended while a worker waited."""


def is_available() -> bool:
    """Tell whether this system has shared memory without a name, and semaphores in it."""
    return hasattr(os, "memfd_create") and hasattr(_libc(), "sem_timedwait")


def create(workers: int) -> int:
    """Return the file descriptor of new memory for the workers of a machine."""
    handle = os.memfd_create("relax_grad", os.MFD_CLOEXEC)
    os.ftruncate(handle, mmap.PAGESIZE + SETS * workers * _size_of_worker(workers))
    libc = _libc()
    for number in range(SETS):
        for own in range(workers):
            with _Mapped(handle, _start(number, own, workers), _head(workers)) as view:
                for i in range(2 * workers):
                    if libc.sem_init(ctypes.c_void_p(view.address + i * _SEMAPHORE), 1, 0):
                        raise OSError(ctypes.get_errno(), "sem_init has failed")
    return handle


def end(handle: int) -> None:
    """Let all waits fail, now and later."""
    with _Mapped(handle, 0, mmap.PAGESIZE) as view:
        view.memory[0] = 1


class Message:
    """A message that has been sent.

    Attributes
    ----------
    address : int
        Its address.
    readers : dict[int, int]
        The number of messages that each of its readers must have read.
    is_kept : bool
        Whether the sender itself still reads it.
    """

    def __init__(self, address: int, readers: dict[int, int]):
        self.address, self.readers, self.is_kept = address, readers, False


class Messages:
    """The messages of one worker with the others of a set.

    Parameters
    ----------
    handle : int
        The file descriptor of the memory.
    number : int
        The number of the set.
    name : int
        The worker's number in the session.
    members : dict[int, int]
        The numbers of the workers of the set in the session, and in the memory.
    workers : int
        The number of all workers in the memory.
    timeout : float
        The seconds after which a wait fails.

    Attributes
    ----------
    rank, size : int
        The worker's number in the set, and how many they are.
    names : list[int]
        The numbers of the workers of the set in the session.
    """

    def __init__(
        self,
        handle: int,
        number: int,
        name: int,
        members: dict[int, int],
        workers: int,
        timeout: float,
    ):
        self.names = list(members)
        self.rank, self.size, self._timeout = self.names.index(name), len(members), timeout
        self._libc, self._flag = _libc(), _Mapped(handle, 0, mmap.PAGESIZE)
        length = _size_of_worker(workers)
        self._regions = [
            _Mapped(handle, _start(number, worker, workers), length) for worker in members.values()
        ]
        self._members, self._own = list(members.values()), self._regions[self.rank]
        self._workers = workers
        self._data = _head(workers)
        self._sent, self._read = [0] * self.size, [0] * self.size  # of each pair
        self._seen, self._acknowledged = [0] * self.size, [0] * self.size
        self._expected = [0] * self.size
        self._out_of_order: list[set[int]] = [set() for _ in range(self.size)]
        self._held: deque[Message] = deque()
        self._end = 0
        #: Called before a wait that may depend on the messages that this worker has yet to read.
        self.before_wait: Callable[[], None] = lambda: None

    def place(self, size: int) -> tuple[int, int]:
        """Return the place and the address of memory for messages of a size, which must be at most
        :data:`CAPACITY`. It may wait until earlier messages have been read."""
        size = -(-size // _UNIT) * _UNIT
        self._release()
        if self._end + size > CAPACITY or len(self._held) >= _SLOTS - 1:
            self.before_wait()
            while self._held:
                for reader, count in self._held[0].readers.items():
                    while self._acknowledged[reader] < count:
                        self._wait(self._semaphore(self._own, reader, 1), reader)
                        self._acknowledged[reader] += 1
                self._held.popleft()
            self._end = 0
        place, self._end = self._end, self._end + size
        return place, self._own.address + self._data + place

    def send(self, place: int, size: int, readers: Collection[int]) -> Message:
        """Tell workers of a message at a place of :meth:`place`."""
        for reader in readers:
            slot = self._slot(self._own, reader, self._sent[reader])
            slot[0], slot[1] = place, size
            self._sent[reader] += 1
            self._libc.sem_post(self._semaphore(self._own, reader, 0))
        address = self._own.address + self._data + place
        message = Message(address, {reader: self._sent[reader] for reader in readers})
        self._held.append(message)
        return message

    def expect(self, sender: int) -> int:
        """Return the number of the next message of a sender, for :meth:`read` and :meth:`done`."""
        self._expected[sender] += 1
        return self._expected[sender] - 1

    def read(self, sender: int, number: int) -> tuple[int, int]:
        """Wait for a message, and return its address and its size."""
        region = self._regions[sender]
        semaphore = self._semaphore(region, self.rank, 0)
        while self._seen[sender] <= number:
            if self._libc.sem_trywait(semaphore):
                self.before_wait()
                if self._seen[sender] > number:
                    break
                self._wait(semaphore, sender)
            self._seen[sender] += 1
        place, size = self._slot(region, self.rank, number)
        return region.address + self._data + place, size

    def done(self, sender: int, number: int) -> None:
        """Tell the sender that a message has been read. The senders hear of it in the order of the
        messages."""
        waiting = self._out_of_order[sender]
        waiting.add(number)
        while self._read[sender] in waiting:
            waiting.remove(self._read[sender])
            self._read[sender] += 1
            self._libc.sem_post(self._semaphore(self._regions[sender], self.rank, 1))

    def close(self) -> None:
        """Give the memory back."""
        for region in (*self._regions, self._flag):
            region.close()

    def _release(self) -> None:
        """Take the memory of the oldest messages back as far as they have been read."""
        while self._held and not self._held[0].is_kept:
            for reader, count in self._held[0].readers.items():
                semaphore = self._semaphore(self._own, reader, 1)
                while self._acknowledged[reader] < count:
                    if self._libc.sem_trywait(semaphore):
                        return
                    self._acknowledged[reader] += 1
            self._held.popleft()
        if not self._held:
            self._end = 0

    def _semaphore(self, region: _Mapped, reader: int, kind: int) -> ctypes.c_void_p:
        at = (2 * self._members[reader] + kind) * _SEMAPHORE
        return ctypes.c_void_p(region.address + at)

    def _slot(self, region: _Mapped, reader: int, number: int) -> ctypes.Array:
        at = 2 * self._workers * _SEMAPHORE
        at += (self._members[reader] * _SLOTS + number % _SLOTS) * _SLOT
        return (ctypes.c_int64 * 2).from_address(region.address + at)

    def _wait(self, semaphore: ctypes.c_void_p, other: int) -> None:
        finish = time.monotonic() + self._timeout
        while (left := finish - time.monotonic()) > 0:
            if self._flag.memory[0]:
                raise Ended("the session has ended")
            # The clock of semaphores may be set, and then a wait may end early.
            until = time.time() + min(left, _LOOK)
            moment = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
            if not self._libc.sem_timedwait(semaphore, moment):
                return
            if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(ctypes.get_errno(), "sem_timedwait has failed")
        raise TimeoutError(f"worker {self.names[other]} has not come within {self._timeout:g} s")


class _Mapped:
    """A part of the memory in the address space of this process."""

    def __init__(self, handle: int, start: int, length: int):
        self.memory = mmap.mmap(handle, length, offset=start)
        anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(anchor)
        self._anchor: ctypes.c_char | None = anchor

    def close(self) -> None:
        """Give the address space back."""
        self._anchor = None
        self.memory.close()

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _head(workers: int) -> int:
    """Return the bytes before the data of a worker: semaphores and slots for each other one."""
    size = workers * (2 * _SEMAPHORE + _SLOTS * _SLOT)
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _size_of_worker(workers: int) -> int:
    return _head(workers) + CAPACITY


def _start(number: int, own: int, workers: int) -> int:
    return mmap.PAGESIZE + (number * workers + own) * _size_of_worker(workers)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


__all__ = ["CAPACITY", "SETS", "Ended", "Messages", "create", "end", "is_available"]
