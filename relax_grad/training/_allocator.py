"""The memory that TVM's allocator keeps for the steps of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import tvm_ffi

from ..ir.module import MEMORY

#: Frees the memory that TVM's allocators keep for later tensors of the same size.
_free = tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")


class Allocator:
    """TVM's allocator, as one trainer uses it. All trainers of a process share it."""

    #: How often its memory was freed.
    _frees: ClassVar[int] = 0

    def __init__(self) -> None:
        #: The symbolic extents of the last call.
        self.extents: dict[str, int] = {}
        #: The functions for which it has the memory, how often it was freed before, and the steps
        #: under way, whose results take memory too.
        self._taken: set[tuple[str, int, int]] = set()

    def begin(self, extents: dict[str, int]) -> None:
        """Free the memory of tensors of other symbolic extents, which TVM would keep for each
        size."""
        if extents != self.extents:
            _free()
            Allocator._frees += 1
            self.extents = extents

    def take(self, machine: Mapping, name: str, arguments: Sequence, under_way: int = 0) -> None:
        """Take the memory of a function, so that a lack of memory is an error before it runs."""
        wanted = name, Allocator._frees, under_way
        if wanted in self._taken:
            return
        try:
            function = machine[name + MEMORY]
        except (AttributeError, KeyError):  # another pipeline, or workers, which take their own
            return
        function(*arguments)
        self._taken = {wanted, *(taken for taken in self._taken if taken[1] == wanted[1])}
