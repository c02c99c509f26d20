"""Trainers without a runtime, as ``Trainer.export(folder, runtime="none")`` writes them: compiled
by the C compiler of the system, and called by ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1")

#: What a program without an operating system can offer.
LIBRARY_FUNCTIONS = {"memcpy", "memset", "memcmp", "memmove"}


class StaticError(Exception):
    """A function returned another code than RELAX_GRAD_OK."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class CTensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("num_axes", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> CTensor:
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        made = cls(
            name.encode(), str(array.dtype).encode(), array.ndim, shape, array.ctypes.data,
            array.nbytes,
        )  # fmt: skip
        made.kept = array
        return made

    def array(self) -> np.ndarray:
        data = ctypes.string_at(self.data, self.num_bytes)
        return np.frombuffer(data, self.dtype.decode()).reshape(self.shape[: self.num_axes])


class Options(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("skip_nonfinite", "check_inputs", "drop_history")
    )


class Counters(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("seed", "steps", "updates", "skipped", "epoch", "batch")
    )


class Result(ctypes.Structure):
    _fields_ = (("loss", ctypes.c_double), ("applied", ctypes.c_int32))


def built(folder: Path, sources: str = "*.c", flags: Sequence[str] = ()) -> Path:
    """Compile a folder, or some of its sources, and link a shared library; skip the test without a
    C compiler."""
    if COMPILER is None:
        pytest.skip("needs a C compiler, cc or gcc")
    library, objects = folder / "step.shared", folder / "objects"
    objects.mkdir(exist_ok=True)
    _run(COMPILER, *FLAGS, *flags, "-fPIC", "-c", *sorted(folder.glob(sources)), cwd=objects)
    _run(COMPILER, "-shared", *flags, *linked(folder), "-o", library)
    return library


def linked(folder: Path) -> list[Path | str]:
    """Return what a program links of a folder that was built."""
    return [*sorted((folder / "objects").glob("*.o")), folder / "kernels.o", "-lm"]


def program(source: Path, folder: Path) -> Path:
    """Compile and link a program with a folder that was built."""
    _run(COMPILER, *FLAGS, "-I", folder, source, *linked(folder), "-o", source.with_suffix(""))
    return source.with_suffix("")


def _run(*command: object, cwd: Path | None = None) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr


class StaticTrainer:
    """A trainer of C, with its memory."""

    def __init__(
        self,
        library: Path,
        state: bytes | None = None,
        *,
        more: int = 0,
        less: int = 0,
        shift: int = 0,
        **options: int,
    ):
        self.library = ctypes.CDLL(str(library))
        self.library.relax_grad_last_error.restype = ctypes.c_char_p
        self.library.relax_grad_memory_bytes.restype = ctypes.c_uint64
        state = (library.parent / "state.safetensors").read_bytes() if state is None else state
        self.model = ctypes.byref(ctypes.c_char.in_dll(self.library, "relax_grad_exported"))
        self.size = self.library.relax_grad_memory_bytes(self.model)
        size = self.size + more - less
        self.memory = np.full(size + 64, 0xA5, "uint8")
        self.guarded = self.memory[shift : shift + size]
        own = Options(**{"check_inputs": 1, **options})
        self.handle = ctypes.c_void_p()
        self.call(
            "open_static", self.model, ctypes.c_void_p(self.guarded.ctypes.data),
            ctypes.c_uint64(size), state, ctypes.c_uint64(len(state)), ctypes.byref(own),
            ctypes.byref(self.handle),
        )  # fmt: skip

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, f"relax_grad_{name}")(*arguments)
        if code:
            raise StaticError(code, self.library.relax_grad_last_error().decode())

    def step(self, **batch: np.ndarray) -> float:
        result = Result()
        self.call("step", self.handle, *_tensors(batch), ctypes.byref(result))
        self.applied = result.applied
        return result.loss

    def predict(self, ema: bool = False, **inputs: np.ndarray) -> list[np.ndarray]:
        self.call("predict_ema" if ema else "predict", self.handle, *_tensors(inputs))
        return self.outputs()

    def outputs(self) -> list[np.ndarray]:
        return [self._item("output", i).array() for i in range(self.number("num_outputs"))]

    def number(self, name: str, *arguments: object) -> int:
        number = ctypes.c_int64()
        self.call(name, self.handle, *arguments, ctypes.byref(number))
        return number.value

    def _item(self, name: str, index: int, *before: object) -> CTensor:
        tensor = CTensor()
        self.call(name, self.handle, *before, ctypes.c_int64(index), ctypes.byref(tensor))
        return tensor

    def group(self, name: str) -> dict[str, np.ndarray]:
        own = name.encode()
        items = [
            self._item("group_tensor", i, own) for i in range(self.number("num_group_tensors", own))
        ]
        return {item.name.decode(): item.array() for item in items}

    def metrics(self) -> dict[str, float]:
        found = {}
        for i in range(self.number("num_metrics")):
            name, value = ctypes.c_char_p(), ctypes.c_double()
            self.call(
                "metric", self.handle, ctypes.c_int64(i), ctypes.byref(name), ctypes.byref(value)
            )
            found[name.value.decode()] = value.value
        return found

    def set(self, name: str, value: float) -> None:
        self.call("set_hyperparameter", self.handle, name.encode(), ctypes.c_double(value))

    def counters(self) -> Counters:
        counters = Counters()
        self.call("get_counters", self.handle, ctypes.byref(counters))
        return counters

    def save(self) -> bytes:
        size = ctypes.c_uint64()
        self.call("state_bytes", self.handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call("save_state", self.handle, buffer, size, ctypes.byref(size))
        return buffer.raw

    def load(self, state: bytes) -> None:
        self.call("load_state", self.handle, state, ctypes.c_uint64(len(state)))


def _tensors(batch: Mapping[str, np.ndarray]) -> tuple:
    tensors = [CTensor.of(name, array) for name, array in batch.items()]
    return (CTensor * len(tensors))(*tensors), ctypes.c_int64(len(tensors))


def tensors_in(data: bytes) -> dict[str, bytes]:
    """Return the bytes of each tensor in a file of safetensors."""
    import safetensors

    return {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(data)}
