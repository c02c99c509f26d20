"""Tensors that end, or begin, at an unreadable page, so that an access out of bounds ends the
process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import tvm
import tvm_ffi

_PAGE, _NO_ACCESS = mmap.PAGESIZE, 0


def guarded(value: np.ndarray, at_end: bool) -> tvm.runtime.Tensor:
    """Return a tensor of the same elements between two inaccessible pages.

    It has only the alignment of its elements.

    Parameters
    ----------
    value : np.ndarray
        The elements.
    at_end : bool
        Whether the tensor ends at the second page; otherwise it begins after the first page.

    Raises
    ------
    OSError
        If the pages cannot be protected.
    """
    size = max(1, -(-value.nbytes // _PAGE)) * _PAGE
    memory = mmap.mmap(-1, size + 2 * _PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (address, address + _PAGE + size):
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = _PAGE + (size - value.nbytes if at_end else 0)
    elements: np.ndarray = np.ndarray((value.nbytes,), np.uint8, memory, start)
    elements[:] = np.frombuffer(value.tobytes(), np.uint8)
    tensor = tvm_ffi.from_dlpack(elements, require_alignment=0)
    return tensor._create_view(value.shape, str(value.dtype))
