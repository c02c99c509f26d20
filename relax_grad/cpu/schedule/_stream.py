"""Loops over contiguous elements in explicit vectors: updates in place, and loops over more memory
than the caches hold.

LLVM leaves loops over several tensors that are updated in place without vectors on some processors:
with AVX2, an update with momentum took 4 times as long. Tensors that are only written are stored
past the caches, if all tensors are large; such stores write whole aligned vectors, and tensors that
are not aligned are stored as usual.
"""

from __future__ import annotations

from contextlib import nullcontext

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.tirx import Ramp

from ..kernel.language.streams import LARGE, fence, stream, streams
from ..target import CPU
from . import _elements
from ._elements import Emitter
from ._fuse import Group
from ._nest import is_zero


class Stream(Emitter):
    """A generator of loops over contiguous elements, which are computed in vectors and, if they are
    many, stored past the caches.

    Parameters
    ----------
    group, cpu
        As for :class:`Emitter`.
    may_share : bool
        Whether results may later be written to the memory of inputs.
    """

    def __init__(self, group: Group, cpu: CPU, may_share: bool = False):
        super().__init__(group, cpu)
        self._may_share = may_share

    @property
    def is_worth_it(self) -> bool:
        """Tell whether the elements are many or updated in place, of float32, contiguous, and need
        only vectorisable arithmetic."""
        if len(self.axes) != 1 or self.accesses.tested:
            return False
        (axis,) = self.axes
        if not axis.size:  # symbolic or empty
            return False
        stored = [a for a in self.accesses.stores if a.buffer in self.group.stored]
        if not self._is_large and not self._in_place and not self._may_share:
            return False
        dtypes = {str(access.buffer.dtype) for access in self.accesses.all}
        return (
            dtypes == {"float32"}
            and all(access.stride(axis) in (0, 1) for access in self.accesses.all)
            and all(access.stride(axis) == 1 and is_zero(access.base) for access in stored)
            and all(map(self.is_vector, range(len(self.group.nests))))
        )

    @property
    def _is_large(self) -> bool:
        """Whether the loop reads and writes more memory than the caches hold."""
        (axis,) = self.axes
        whole = {a.buffer for a in self.accesses.loads.values() if a.stride(axis) == 1}
        return 4 * (axis.size or 0) * (len(whole) + len(self.group.stored)) >= LARGE

    @property
    def _in_place(self) -> set[tirx.Buffer]:
        """The tensors that are updated in place. Their lines are in the caches when they are
        stored."""
        return set(self.group.stored) & set().union(*self.read)

    def emit(self) -> None:
        (axis,), lanes = self.axes, self.cpu.lanes
        elements = int(axis.extent)  # symbolic extents are not worth it
        is_large = self._is_large
        pieces = 8 * self.cpu.cores if elements >= _elements.SMALL else 1
        line = max(_elements.LINE, lanes)  # the stores need whole vectors
        piece = -(-elements // (pieces * line)) * line
        pieces = -(-elements // piece)
        loop = T.parallel if pieces > 1 else T.serial
        with streams(lanes) if is_large else nullcontext(), loop(0, pieces) as part:
            start = T.Bind(part * piece)
            size = T.Bind(tirx.min(piece, elements - start)) if elements % piece else piece
            with T.serial(0, size // lanes) as i:
                self._vector(T.Bind(start + i * lanes))
            if elements % lanes:
                done = T.Bind(size // lanes * lanes)
                with T.serial(0, size - done) as i:
                    self.element({axis.var: start + done + i})
            if is_large:
                fence(lanes)

    def _vector(self, start: tirx.PrimExpr) -> None:
        lanes, (axis,) = self.cpu.lanes, self.axes
        is_large, in_place = self._is_large, self._in_place
        rows = {
            buffer: T.alloc_buffer([lanes], "float32", layout=None) for buffer in self.group.stored
        }
        with T.vectorized(0, lanes) as j:
            self.element({axis.var: start + j}, stored={row: (rows[row], j) for row in rows})
        zero, one = tirx.IntImm("int32", 0), tirx.IntImm(str(start.ty.dtype), 1)
        for buffer, row in rows.items():
            vector = row[Ramp(zero, tirx.IntImm("int32", 1), lanes)]
            if is_large and buffer not in in_place:
                stream(buffer, start, vector, lanes)
            else:
                T.buffer_store(buffer, vector, [Ramp(start, one, lanes)])
