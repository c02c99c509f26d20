"""Object files as assembly: what they may hold, and what is refused."""

from __future__ import annotations

import pytest
import tvm
from dispatched import HOST
from tvm import te, tirx

from relax_grad.codegen import lower
from relax_grad.codegen.objects import UnsupportedObject, embedded

TARGET = HOST.with_host(HOST)


@pytest.fixture(scope="module")
def data():
    x = te.placeholder((100,), "float32", name="x")
    y = te.compute((100,), lambda i: tirx.exp(x[i]) + 1.5, name="y")
    return lower.object_file(te.create_prim_func([x, y]), "f", TARGET)


def test_sections_and_relocations(data):
    found = embedded(data, "__tvm_ffi_f", "entry")
    lines = found.assembly.split("\n")
    assert found.entry == "entry"
    assert lines.count("entry:") == 1
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
        embedded(change(data), "__tvm_ffi_f", "entry")


def test_a_function_that_is_not_there(data):
    with pytest.raises(UnsupportedObject, match="does not define __tvm_ffi_g"):
        embedded(data, "__tvm_ffi_g", "entry")


def test_constants_are_read_where_they_are(data):
    """Two objects with labels of their own make one module."""
    import numpy as np

    from relax_grad.codegen.compile import _empty_module, _library

    objects = {name: embedded(data, "__tvm_ffi_f", f"entry_{name}") for name in ("one", "two")}
    library = _library(_empty_module(TARGET), objects)
    x = np.linspace(-1, 1, 100, dtype="float32")
    for name in objects:
        y = tvm.runtime.tensor(np.zeros(100, "float32"))
        library[name](tvm.runtime.tensor(x), y)
        np.testing.assert_allclose(y.numpy(), np.exp(x) + 1.5, rtol=1e-6)
