"""The library for C in programs of Python, by ctypes; the first argument of a program is its
path."""

from __future__ import annotations

import ctypes
import sys

import numpy as np


class Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("num_axes", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
    )


class Type(ctypes.Structure):
    _fields_ = (
        *Tensor._fields_[:4],
        ("symbols", ctypes.POINTER(ctypes.c_char_p)),
    )


class Result(ctypes.Structure):
    _fields_ = (("loss", ctypes.c_double), ("applied", ctypes.c_int32))


class Counters(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("seed", "steps", "updates", "skipped", "epoch", "batch")
    )


library = ctypes.CDLL(sys.argv[1])
library.relax_grad_last_error.restype = ctypes.c_char_p


def call(name: str, *arguments: object) -> None:
    if getattr(library, f"relax_grad_{name}")(*arguments):
        raise RuntimeError(f"{name}: {library.relax_grad_last_error().decode()}")


def error_of(function) -> str:
    """Call a function, and return the text of its error; empty without one."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


class Trainer:
    """A trainer of a step with one input, ``x`` in float32."""

    def __init__(self, folder: str):
        self.handle = ctypes.c_void_p()
        call("open", folder.encode(), None, ctypes.byref(self.handle))

    def step(self, x: np.ndarray) -> float:
        shape = (ctypes.c_int64 * x.ndim)(*x.shape)
        batch = Tensor(b"x", b"float32", x.ndim, shape, x.ctypes.data, x.nbytes)
        result = Result()
        call("step", self.handle, ctypes.byref(batch), ctypes.c_int64(1), ctypes.byref(result))
        return result.loss

    def state(self) -> bytes:
        """Return all values and counters."""
        counters, number, parts = Counters(), ctypes.c_int64(), []
        call("get_counters", self.handle, ctypes.byref(counters))
        for group in (b"params", b"states", b"optimizer_state"):
            call("num_group_tensors", self.handle, group, ctypes.byref(number))
            for i in range(number.value):
                tensor = Tensor()
                call("group_tensor", self.handle, group, ctypes.c_int64(i), ctypes.byref(tensor))
                parts.append(ctypes.string_at(tensor.data, tensor.num_bytes))
        return bytes(counters) + b"".join(parts)

    def save(self, path: str) -> None:
        call("save", self.handle, path.encode())

    def load(self, path: str) -> None:
        call("load", self.handle, path.encode())

    def close(self) -> None:
        call("close", self.handle)
