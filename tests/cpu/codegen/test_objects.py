"""Object files as assembly: the accepted contents, and the refused ones."""

from __future__ import annotations

import pytest
import tvm
from dispatched import HOST
from tvm import te, tirx

from relax_grad.cpu.codegen import lower
from relax_grad.cpu.codegen.objects import UnsupportedObject, embedded, functions

TARGET = HOST.with_host(HOST)


def compiled(target) -> bytes:
    x = te.placeholder((100,), "float32", name="x")
    y = te.compute((100,), lambda i: tirx.exp(x[i]) + 1.5, name="y")
    z = te.compute((100,), lambda i: x[i] * 2.0, name="z")
    both = {"f": te.create_prim_func([x, y]), "double": te.create_prim_func([x, z])}
    return lower.object_file(both, target)


@pytest.fixture(scope="module")
def data():
    return compiled(TARGET)


def test_functions_of_a_file(data):
    assert sorted(functions(data, "__tvm_ffi_")) == ["double", "f"]
    with pytest.raises(UnsupportedObject, match="damaged"):
        functions(data[: len(data) // 2], "__tvm_ffi_")


def test_only_the_startup_of_system_libraries_is_left_out():
    """Without optimizations, each file has TVM's empty startup function."""
    target = tvm.target.Target({**TARGET.export(), "opt-level": 0, "host": None})
    data = compiled(target.with_host(target))
    assert b".init_array" in data
    assert "init_array" not in embedded(data, {"__tvm_ffi_f": "entry"}).assembly
    other = data.replace(b"__tvm_module_startup", b"__tvm_module_stARTup")
    with pytest.raises(UnsupportedObject, match="init_array is neither code nor plain data"):
        embedded(other, {"__tvm_ffi_f": "entry"})


def test_sections_and_relocations(data):
    image = embedded(data, {"__tvm_ffi_f": "entry", "__tvm_ffi_double": "other"})
    lines = image.assembly.split("\n")
    assert lines.count("entry:") == lines.count("other:") == 1
    assert '.section .text,"ax",@progbits' in lines
    assert any(line.startswith(".reloc .Lentry_") for line in lines)
    assert not any("debug" in line for line in lines)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"MZ" + data[2:],
        lambda data: data[:5] + b"\x02" + data[6:],
        lambda data: data[:18] + b"\x08\x00" + data[20:],
        lambda data: data[:64],
        lambda data: data[: len(data) // 2],
        lambda data: data[:40] + b"\xff" * 8 + data[48:],
    ],
    ids=["empty", "format", "order", "machine", "header", "half", "offset"],
)
def test_damaged_files_are_refused(data, change):
    with pytest.raises(UnsupportedObject):
        embedded(change(data), {"__tvm_ffi_f": "entry"})


def test_a_function_that_is_not_there(data):
    with pytest.raises(UnsupportedObject, match="does not define __tvm_ffi_g"):
        embedded(data, {"__tvm_ffi_f": "entry", "__tvm_ffi_g": "other"})


def test_constants_are_read_where_they_are(data):
    """Two objects with their own labels link into one module."""
    import numpy as np

    from relax_grad.cpu.codegen.compile import _empty_module
    from relax_grad.cpu.codegen.entries import Entry, linked

    labels = {f"{name}_{part}": f"at_{name}_{part}" for name in ("f", "double") for part in "ab"}
    objects = [
        embedded(data, {f"__tvm_ffi_{name}": labels[f"{name}_{part}"] for name in ("f", "double")})
        for part in "ab"
    ]
    entries = {name: Entry(label, label, ()) for name, label in labels.items()}
    library = linked(_empty_module(TARGET), objects, entries, {})
    x = np.linspace(-1, 1, 100, dtype="float32")
    for name in labels:
        y = tvm.runtime.tensor(np.zeros(100, "float32"))
        library[name](tvm.runtime.tensor(x), y)
        expected = 2 * x if name.startswith("double") else np.exp(x) + 1.5
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)
