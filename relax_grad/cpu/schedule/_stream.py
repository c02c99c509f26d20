"""Loops over more memory than the caches hold, with nontemporal stores.

A processor reads the cache line that it stores to, except with nontemporal stores. TVM has no such
stores, but LLVM does: they are emitted as functions in LLVM IR, which are inlined. They store whole
aligned vectors; tensors that are not aligned are stored as usual.
"""

from __future__ import annotations

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.tirx import Ramp

from . import _elements
from ._elements import Emitter
from ._nest import is_zero

#: The minimum number of bytes read and written. With a cache of 32 MiB, a relu that reads and
#: writes 24 MiB takes 1.4 times as long with nontemporal stores, and an update of 48 MiB 1.3 times
#: as long without them; steps of networks take the same time with a minimum of 16 and of 32 MiB.
LARGE = 32 << 20

_LLVM = """
define void @relax_grad_stream{lanes}(ptr %to, <{lanes} x float> %value) {{
  %address = ptrtoint ptr %to to i64
  %offset = urem i64 %address, {size}
  %is_aligned = icmp eq i64 %offset, 0
  br i1 %is_aligned, label %past, label %through
past:
  store <{lanes} x float> %value, ptr %to, align {size}, !nontemporal !0
  ret void
through:
  store <{lanes} x float> %value, ptr %to, align 4
  ret void
}}
define void @relax_grad_streamed{lanes}() {{
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""


class Stream(Emitter):
    """A generator of loops over contiguous elements, which are computed in vectors and stored past
    the caches."""

    @property
    def is_worth_it(self) -> bool:
        """Tell whether the elements are many, of float32, contiguous, and need only vectorisable
        arithmetic."""
        if len(self.axes) != 1 or self.accesses.tested:
            return False
        (axis,) = self.axes
        if axis.size is None:
            return False
        stored = [a for a in self.accesses.stores if a.buffer in self.group.stored]
        whole = {a.buffer for a in self.accesses.loads.values() if a.stride(axis) == 1}
        if 4 * axis.size * (len(whole) + len(stored)) < LARGE:
            return False
        dtypes = {str(access.buffer.dtype) for access in self.accesses.all}
        return (
            dtypes == {"float32"}
            and all(access.stride(axis) in (0, 1) for access in self.accesses.all)
            and all(access.stride(axis) == 1 and is_zero(access.base) for access in stored)
            and all(map(self.is_vector, range(len(self.group.nests))))
        )

    def emit(self) -> None:
        (axis,), lanes = self.axes, self.cpu.lanes
        elements = int(axis.extent)  # symbolic extents are not worth it
        pieces = 8 * self.cpu.cores
        line = max(_elements.LINE, lanes)  # the stores need whole vectors
        piece = -(-elements // (pieces * line)) * line
        pieces = -(-elements // piece)
        code = _LLVM.format(lanes=lanes, size=4 * lanes)
        with T.attr(0, "pragma_import_llvm", code), T.parallel(0, pieces) as part:
            start = T.Bind(part * piece)
            size = T.Bind(tirx.min(piece, elements - start)) if elements % piece else piece
            with T.serial(0, size // lanes) as i:
                self._vector(T.Bind(start + i * lanes))
            if elements % lanes:
                done = T.Bind(size // lanes * lanes)
                with T.serial(0, size - done) as i:
                    self.element({axis.var: start + done + i})
            T.evaluate(tirx.call_extern("void", f"relax_grad_streamed{lanes}"))

    def _vector(self, start) -> None:
        lanes, (axis,) = self.cpu.lanes, self.axes
        rows = {
            buffer: T.alloc_buffer([lanes], "float32", layout=None) for buffer in self.group.stored
        }
        with T.vectorized(0, lanes) as j:
            self.element({axis.var: start + j}, stored={row: (rows[row], j) for row in rows})
        zero = tirx.IntImm("int32", 0)
        for buffer, row in rows.items():
            vector = row[Ramp(zero, tirx.IntImm("int32", 1), lanes)]
            place = tirx.address_of(buffer[start])
            T.evaluate(tirx.call_extern("void", f"relax_grad_stream{lanes}", place, vector))
