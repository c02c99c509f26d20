"""Tensors in memory of their own, flush against inaccessible pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np
import tvm
import tvm_ffi

_PAGE = mmap.PAGESIZE
#: Bytes reserved on each side of a buffer, so that far out-of-bounds indices hit them too. They
#: cost no memory.
_GUARD = 1 << 36
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def repeated(content: bytes, size: int) -> bytes:
    """Return so many bytes that repeat others."""
    return (content * -(-size // len(content)))[:size]


class Place:
    """The place of one buffer: pages that can be opened right before or right after an address."""

    def __init__(self):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        base = _libc.mmap(None, 2 * _GUARD, _NONE, flags, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        self._middle = base + _GUARD
        self._open = (self._middle, 0)

    def hold(self, data: bytes, shape, dtype: str, at_end: bool, fill: int) -> Guarded:
        """Place a buffer so that it ends, or begins, exactly where the accessible memory does.

        The rest of the accessible memory, less than a page, is filled with the byte ``fill``.
        """
        size = max(1, -(-len(data) // _PAGE)) * _PAGE
        first = self._middle - size if at_end else self._middle
        if (first, size) != self._open:
            self._protect(*self._open, _NONE)
            self._protect(first, size, _READ_WRITE)
            self._open = (first, size)
        pages = (ctypes.c_uint8 * size).from_address(first)
        return Guarded(pages, data, shape, dtype, size - len(data) if at_end else 0, fill)

    def _protect(self, first: int, size: int, access: int) -> None:
        if size and _libc.mprotect(first, size, access):
            raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """A buffer within opened pages, as a tensor."""

    def __init__(self, pages, data: bytes, shape, dtype: str, start: int, fill: int):
        self._bytes = np.ndarray((len(pages),), np.uint8, pages)
        self._inside = slice(start, start + len(data))
        self._fill = fill
        self._bytes[:] = fill
        # An empty buffer needs its own view too: its address matters.
        inside = np.ndarray((len(data),), np.uint8, pages, start)
        inside[:] = np.frombuffer(data, np.uint8)
        # Aligned only to its elements.
        raw = tvm_ffi.from_dlpack(inside, require_alignment=0)
        self.tensor: tvm.runtime.Tensor = raw._create_view(shape, dtype)

    def data(self) -> bytes:
        return self._bytes[self._inside].tobytes()

    def is_clean(self) -> bool:
        """Tell whether the rest of the pages is unchanged."""
        before, behind = self._bytes[: self._inside.start], self._bytes[self._inside.stop :]
        return bool(np.all(before == self._fill) and np.all(behind == self._fill))


class Workspaces:
    """The workspaces that the kernels of a library allocate, each in pages of its own.

    They hold a float32 ``number``, if it is set, and the byte ``fill`` otherwise.
    """

    def __init__(self, library: str):
        self._free: list[Place] = []
        self._held: dict[int, tuple] = {}
        self._callbacks: list = []
        self.at_end, self.fill, self.faults = True, 0, []
        self.number: bytes | None = None
        integer, size, pointer = ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
        loaded = ctypes.CDLL(library)
        for name, kind, function in (
            ("Alloc", (pointer, integer, integer, size, integer, integer), self._allocate),
            ("Free", (integer, integer, integer, pointer), self._release),
        ):
            callback = ctypes.CFUNCTYPE(*kind)(function)
            self._callbacks.append(callback)
            # A library defines only the symbols that its kernels use.
            with contextlib.suppress(ValueError):
                variable = pointer.in_dll(loaded, f"__TVMBackend{name}Workspace")
                variable.value = ctypes.cast(callback, pointer).value

    def _allocate(self, _kind, _device, size, _code, _bits) -> int:
        place = self._free.pop() if self._free else Place()
        content = repeated(self.number or bytes([self.fill]), size)
        held = place.hold(content, (size,), "uint8", self.at_end, self.fill)
        address = held.tensor.data_ptr()
        self._held[address] = place, held
        return address

    def _release(self, _kind, _device, address) -> int:
        place, held = self._held.pop(address)
        if not held.is_clean():
            self.faults.append("bytes next to a workspace were overwritten")
        self._free.append(place)
        return 0
