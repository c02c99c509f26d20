"""The faults that the emulation of CUDA and the inspection of kernels have to find."""

from __future__ import annotations

import numpy as np
import pytest
from compile_cuda import compile_for_cuda, missing
from tvm import relax, te
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)


def of_statements(body):
    """Return a module whose ``main`` maps 64 numbers to 64 numbers by the statements of
    ``body``."""

    def generate(ins, outs):
        with IRBuilder() as builder:
            body(*ins, *outs)
            return builder.get()

    def kernel(x):
        return te.extern([x.shape], [x], generate, dtype="float32", name="kernel")

    x = relax.Var("x", relax.TensorType((64,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            result = bb.emit_output(bb.emit_te(kernel, x))
        bb.emit_func_output(result)
    return bb.get()


def threads(extent):
    return T.thread_binding(extent, thread="threadIdx.x")


def block():
    return T.thread_binding(1, thread="blockIdx.x")


def in_parallel(x, out):
    with block(), threads(64) as i:
        T.buffer_store(out, x[63 - i], [i])


def in_one_thread(x, out):
    with block(), threads(32) as thread, T.If(thread < 1), T.Then(), T.serial(64) as i:
        T.buffer_store(out, x[i], [i])


def on_the_host(x, out):
    with T.serial(64) as i:
        T.buffer_store(out, x[i], [i])


def racing(x, out):
    with block(), threads(64) as i:
        T.buffer_store(out, x[i], [i // 2])
        T.buffer_store(out, x[i], [i // 2 + 32])


def test_serial_and_host_code_is_found():
    good = compile_for_cuda(of_statements(in_parallel))
    assert (good.on_host, good.serial) == ([], [])
    assert compile_for_cuda(of_statements(in_one_thread)).serial
    assert compile_for_cuda(of_statements(on_the_host)).on_host


@NEEDS_CXX
def test_threads_run():
    x = np.arange(64, dtype="float32")
    with compile_for_cuda(of_statements(in_parallel)).emulate() as emulation:
        (result,) = emulation.run("main", [x])
    np.testing.assert_array_equal(result, x[::-1])


@NEEDS_CXX
def test_a_race_is_found():
    with (
        compile_for_cuda(of_statements(racing)).emulate() as emulation,
        pytest.raises(AssertionError, match="order of its threads"),
    ):
        emulation.run("main", [np.arange(64, dtype="float32")])
