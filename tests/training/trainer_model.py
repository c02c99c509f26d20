"""Examines the functions for C of models, buffers, properties, memory and evaluation.

The arguments are the library, the folder of a step with the input x (4, 3) in float32 and the
parameter ``w`` (3) in float16, a state that Python saved, with the properties ``note``, a text, and
``tree``, and a folder for files.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
from c_trainer import Tensor, Trainer, call, error_of

MODEL, STATE, HOME = map(Path, sys.argv[2:])
X = np.arange(12, dtype="float32").reshape(4, 3) / 12
FILES = ("manifest.json", "step.so", "state.safetensors")


def from_memory(**changed: bytes) -> Trainer:
    trainer = Trainer.__new__(Trainer)
    trainer.handle = ctypes.c_void_p()
    parts: list = []
    for name in FILES:
        data = changed.get(Path(name).stem, (MODEL / name).read_bytes())
        parts += [data, ctypes.c_uint64(len(data))]
    call("open_memory", *parts, None, ctypes.byref(trainer.handle))
    return trainer


def evaluate(trainer: Trainer, x: np.ndarray) -> float:
    shape = (ctypes.c_int64 * 2)(*x.shape)
    batch = Tensor(b"x", b"float32", 2, shape, x.ctypes.data, x.nbytes)
    loss = ctypes.c_double()
    call("evaluate", trainer.handle, ctypes.byref(batch), ctypes.c_int64(1), ctypes.byref(loss))
    return loss.value


def buffer_of(trainer: Trainer, group: bytes) -> np.ndarray:
    size = ctypes.c_uint64()
    call("group_bytes", trainer.handle, group, ctypes.byref(size))
    data = np.zeros(size.value, "uint8")
    call("copy_group", trainer.handle, group, ctypes.c_void_p(data.ctypes.data), size)
    return data


def set_group(trainer: Trainer, group: bytes, data: np.ndarray) -> None:
    size = ctypes.c_uint64(data.nbytes)
    call("set_group", trainer.handle, group, ctypes.c_void_p(data.ctypes.data), size)


def properties_of(trainer: Trainer) -> dict[str, str]:
    number, name, value = ctypes.c_int64(), ctypes.c_char_p(), ctypes.c_char_p()
    call("num_properties", trainer.handle, ctypes.byref(number))
    properties = {}
    for i in range(number.value):
        place = ctypes.c_int64(i)
        call("property", trainer.handle, place, ctypes.byref(name), ctypes.byref(value))
        properties[name.value.decode()] = value.value.decode()
    return properties


def memory() -> None:
    whole, memory = Trainer(str(MODEL)), from_memory()
    assert memory.state() == whole.state()
    assert memory.step(X) == whole.step(X)
    assert memory.state() == whole.state()
    for stem, message in (
        ("manifest", "manifest.json in memory"),
        ("step", "step.so in memory is damaged"),
        ("state", "state.safetensors in memory is damaged"),
    ):
        error = error_of(lambda stem=stem: from_memory(**{stem: b"\x08" + bytes(20)}))
        assert message in error, error
    assert "library is a null pointer" in error_of(
        lambda: call("open_memory", b"", 0, None, 0, b"", 0, None, ctypes.byref(ctypes.c_void_p()))
    )


def evaluation() -> None:
    trainer = Trainer(str(MODEL))
    trainer.step(X)
    before = trainer.state()
    loss = evaluate(trainer, X)
    assert trainer.state() == before
    assert trainer.step(X) == loss
    infinite = np.full((4, 3), np.inf, "float32")
    assert not np.isfinite(evaluate(trainer, infinite))
    assert "x must have shape" in error_of(lambda: evaluate(trainer, X[:2]))


def models() -> None:
    trained, other = Trainer(str(MODEL)), Trainer(str(MODEL))
    for _ in range(3):
        trained.step(X)
    path = str(HOME / "model").encode()
    call("save_model", trained.handle, path)
    other.step(X)
    slots = buffer_of(other, b"optimizer_state").tobytes()
    call("load_model", other.handle, path)
    assert (buffer_of(other, b"params") == buffer_of(trained, b"params")).all()
    assert len(buffer_of(other, b"optimizer_state")) == len(slots)
    assert evaluate(other, X) == evaluate(trained, X)
    before = other.state()
    error = error_of(lambda: call("load_model", other.handle, str(STATE).encode()))
    assert "lacks w" in error, error
    assert other.state() == before


def buffers() -> None:
    trainer = Trainer(str(MODEL))
    trainer.step(X)
    values = np.array([2.0, -1.0, 0.5], "float16")
    set_group(trainer, b"params", values.view("uint8"))
    assert (buffer_of(trainer, b"params").view("float16") == values).all()
    loss = float(np.mean((X @ values.astype("float32")) ** 2))
    assert abs(trainer.step(X) - loss) < 1e-6
    # The step goes on from these values, of which the optimizer has a copy.
    moved = buffer_of(trainer, b"params").view("float16")
    assert np.abs(moved - values).max() < 0.02, moved
    before = trainer.state()
    for size in (0, 5, 7):
        error = error_of(lambda size=size: set_group(trainer, b"params", np.zeros(size, "uint8")))
        assert f"has 6 bytes, but the buffer has {size}" in error, error
    assert "there is no group weights" in error_of(lambda: buffer_of(trainer, b"weights"))
    assert trainer.state() == before
    slots = buffer_of(trainer, b"optimizer_state")
    set_group(trainer, b"optimizer_state", slots)
    assert trainer.state() == before


def properties() -> None:
    trainer = Trainer(str(MODEL))
    assert properties_of(trainer) == {}
    trainer.load(str(STATE))
    assert properties_of(trainer) == {"note": "é", "tree": '{"a": [1, 2.5, null]}'}
    for name, value in ((b"note", "ü\n".encode()), (b"new", b'"'), (b"tree", None)):
        call("set_property", trainer.handle, name, value)
    for name, value, message in (
        (b"\xff", b"", "the name of a property must be UTF-8"),
        (b"note", b"\xc3", "the text of the property note must be UTF-8"),
        (b"none", None, "there is no property none"),
        (None, b"", "name is a null pointer"),
    ):
        error = error_of(
            lambda name=name, value=value: call("set_property", trainer.handle, name, value)
        )
        assert message in error, error
    assert properties_of(trainer) == {"note": "ü\n", "new": '"'}
    trainer.save(str(HOME / "state"))


if __name__ == "__main__":
    memory()
    evaluation()
    models()
    buffers()
    properties()
    print("all functions work")
