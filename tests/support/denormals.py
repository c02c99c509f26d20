"""Whether a function computes with denormal numbers that memory happens to hold.

Many processors take more than a hundred cycles for an operation with a denormal operand. Elements
that no result needs are computed too, in whole vectors and tiles. If they were not initialized,
programs would take several times as long, depending on what memory held before.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import platform
import sys
from collections.abc import Callable

import numpy as np
import tvm
import tvm.tirx.script.builder as T
from tvm import tirx

from relax_grad.cpu.kernel.language import builder as b

#: Float32 numbers as bytes: 1, and a denormal one, whose halves are denormal in 16 bits too.
ONE, DENORMAL = (value.to_bytes(4, "little") for value in (0x3F800000, 0x00120023))

#: Whether the flag of denormal operands can be read: the environment of glibc ends with the
#: register MXCSR.
CAN_TELL = sys.platform == "linux" and platform.machine() == "x86_64"

_SIZE, _MXCSR, _FLAGS, _IS_DENORMAL = 32, 28, 0x3F, 0x02

#: Buffers on the stack, and their elements: TVM places up to 1024 bytes there.
_BUFFERS, _ELEMENTS = 32, 250


def computes_with_denormals(prepared: Callable[[bytes], Callable[[], object]]) -> bool:
    """Tell whether a function has denormal operands if memory holds such numbers, and otherwise
    not.

    Parameters
    ----------
    prepared : Callable
        Returns the call of the function in this thread, with memory that holds a float32 number.
    """
    if not CAN_TELL:
        return False
    return not _has_denormals(prepared, ONE) and _has_denormals(prepared, DENORMAL)


def _has_denormals(prepared: Callable[[bytes], Callable[[], object]], number: bytes) -> bool:
    prepared(number)()  # The first call may load libraries.
    call, fill = prepared(number), _fill_stack()
    libm, environment = _libm(), ctypes.create_string_buffer(_SIZE)
    of_stack = tvm.runtime.tensor(np.frombuffer(number, "int32"))
    libm.fegetenv(environment)
    cleared = bytearray(environment.raw)
    cleared[_MXCSR] &= ~_FLAGS & 0xFF
    libm.fesetenv(bytes(cleared))
    # Directly before the call: other functions write to the stack too.
    fill(of_stack)
    call()
    libm.fegetenv(environment)
    return bool(environment.raw[_MXCSR] & _IS_DENORMAL)


@functools.cache
def _libm() -> ctypes.CDLL:
    return ctypes.CDLL(ctypes.util.find_library("m"))


@functools.cache
def _fill_stack() -> Callable[[tvm.runtime.Tensor], None]:
    """Return a function that fills the stack below its caller with a number of 32 bits."""

    def body(number: tirx.Buffer) -> None:
        for _ in range(_BUFFERS):
            buffer, count = b.scratch(_ELEMENTS), tirx.const(_ELEMENTS, "int64")
            T.evaluate(tirx.call_extern("handle", "wmemset", buffer.data, number[0], count))

    function = b.prim_func("fill_stack", [("number", [1], "int32")], body)
    return tvm.compile(tvm.IRModule({"fill_stack": function}), {"kind": "llvm"})["fill_stack"]
