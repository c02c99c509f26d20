"""The workspace and the machine code of lowered kernels."""

import pytest
from tvm import relax, tirx
from tvm.script import tirx as T

import relax_grad
from relax_grad.static.kernels import lowered_kernels, object_file, workspaces

TARGET = relax_grad.target.x86_64("v2", num_cores=1)


def convolution() -> dict[str, tirx.PrimFunc]:
    x = relax.Var("x", relax.TensorType((2, 16, 6, 6), "float32"))
    w = relax.Var("w", relax.TensorType((8, 16, 3, 3), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, w]):
        with bb.dataflow():
            y = bb.emit_output(relax.op.nn.conv2d(x, w))
        bb.emit_func_output(y)
    mod = relax_grad.pipeline(TARGET)(bb.get())
    functions = {v.name_hint: f for v, f in mod.functions_items()}
    return {name: f for name, f in functions.items() if isinstance(f, tirx.PrimFunc)}


@T.prim_func
def nested(x: T.Buffer((4096,), "float32"), y: T.Buffer((4096,), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i in range(2):
        a = T.alloc_buffer((1000,), "float32")
        b = T.alloc_buffer((2000,), "float64")
        for j in range(1000):
            a[j] = x[i * 1000 + j]
            b[2 * j] = T.Cast("float64", a[j])
        for j in range(1000):
            y[i * 1000 + j] = a[j] + T.Cast("float32", b[2 * j])


def test_the_workspace_of_a_kernel_is_the_largest_stack():
    lowered = lowered_kernels({"nested": nested}, TARGET)
    # 1000 numbers of 4 bytes and 2000 of 8, each rounded up to 64.
    assert workspaces(lowered) == {"nested": 4032 + 16000}


def test_object_files_for_other_processors():
    """The formats and machines, by the first bytes of the files."""
    kernels = convolution()
    assert max(workspaces(lowered_kernels(kernels, TARGET)).values()) > 0
    for target, start in (
        (relax_grad.target.arm("cortex-a76", 1), (b"\x7fELF\x02", 183)),
        (relax_grad.target.cortex_m("cortex-m55"), (b"\x7fELF\x01", 40)),
        (relax_grad.target.riscv64(), (b"\x7fELF\x02", 243)),
        (relax_grad.target.wasm(), (b"\0asm", None)),
    ):
        data = object_file(lowered_kernels(kernels, target), target)
        assert data.startswith(start[0])
        if start[1] is not None:
            assert int.from_bytes(data[18:20], "little") == start[1]


@T.prim_func
def calling(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
    T.evaluate(T.call_packed("tvm.contrib.sort.sort", x.data, y.data))


def test_a_packed_function_is_refused_by_name():
    with pytest.raises(ValueError, match=r"the kernel calling calls .*tvm\.contrib\.sort\.sort"):
        workspaces(lowered_kernels({"calling": calling}, TARGET))
