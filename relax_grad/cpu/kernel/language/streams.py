"""Nontemporal stores, which write past the caches.

A processor reads the cache line that it stores to, except with nontemporal stores. TVM has no such
stores, but LLVM does: they are emitted as functions in LLVM IR, which are inlined.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op

from ....ir.compat import loaded_buffer, structural_map
from .extents import const
from .halves import Half, Tensor
from .statements import bind

#: The minimum number of bytes read and written. With a cache of 32 MiB, a relu that reads and
#: writes 24 MiB takes 1.4 times as long with nontemporal stores, and an update of 48 MiB 1.3 times
#: as long without them; steps of networks take the same time with a minimum of 16 and of 32 MiB.
LARGE = 32 << 20

_CALL_EXTERN = Op.get("tirx.call_extern")

#: The start of the name of the function that stores, before the number of lanes.
_STREAM = "relax_grad_stream_"

_LLVM = """
define void @relax_grad_stream_{lanes}(ptr %to, <{lanes} x float> %value, i32 %large) {{
  %address = ptrtoint ptr %to to i64
  %offset = urem i64 %address, {size}
  %is_aligned = icmp eq i64 %offset, 0
  %is_large = icmp ne i32 %large, 0
  %both = and i1 %is_aligned, %is_large
  br i1 %both, label %past, label %through
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


def are_large(tensors: Iterable[Tensor]) -> bool | tirx.PrimExpr:
    """Tell whether flat tensors, none of them in half precision, have more bytes than the caches
    hold.

    For tensors of symbolic sizes, this is a condition, bound to a variable.
    """
    size = tirx.const(0, "int64")
    for tensor in tensors:
        if isinstance(tensor, Half):
            return False
        number = tensor.shape[0]
        is_known = isinstance(number, tirx.IntImm)
        number = tirx.const(int(number), "int64") if is_known else tirx.Cast("int64", number)
        size = size + number * tvm_ffi.dtype(str(tensor.dtype)).itemsize
    if isinstance(size, tirx.IntImm):
        return int(size) >= LARGE
    return bind(size >= tirx.const(LARGE, "int64"))


def streams(lanes: int) -> AbstractContextManager[object]:
    """Return the frame of statements that may call :func:`stream` and :func:`fence`."""
    return T.attr(0, "pragma_import_llvm", _LLVM.format(lanes=lanes, size=4 * lanes))


def stream(
    buffer: tirx.Buffer,
    index: tirx.PrimExpr,
    vector: tirx.PrimExpr,
    lanes: int,
    is_large: bool | tirx.PrimExpr = True,
) -> None:
    """Emit the store of a vector of float32: past the caches if its address is aligned to its size,
    and the tensors are large."""
    place = tirx.address_of(buffer[index])
    large = const(int(is_large)) if isinstance(is_large, bool) else tirx.Cast("int32", is_large)
    T.evaluate(tirx.call_extern("void", f"{_STREAM}{lanes}", place, vector, large))


def fence(lanes: int) -> None:
    """Emit a fence, after which other threads see the stores of this thread."""
    T.evaluate(tirx.call_extern("void", f"relax_grad_streamed{lanes}"))


def without_streams(body: tirx.Stmt) -> tirx.Stmt:
    """Return statements with usual stores instead of non-temporal ones."""

    def store(node: tirx.Evaluate) -> tirx.PrimExpr:
        call = node.value
        if not isinstance(call, Call) or call.op != _CALL_EXTERN:
            return node
        name = call.args[0].value
        if not name.startswith(_STREAM):
            return node
        (element,), vector = call.args[1].args, call.args[2]
        (index,) = element.indices
        one = tirx.IntImm(str(index.ty.dtype), 1)
        ramp = tirx.Ramp(index, one, int(name.removeprefix(_STREAM)))
        return tirx.BufferStore(loaded_buffer(element), vector, [ramp])

    return structural_map(body, (tirx.Evaluate, store))
