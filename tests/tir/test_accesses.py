"""Gradients by kind of access, and the structure of the adjoints."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from sweep import TARGET
from tensor_functions import expression, run
from tvm import relax, te, tirx, topi
from tvm.script import tirx as T

import relax_grad
from relax_grad.ir.compat import SBlock
from relax_grad.testing import check_gradients
from relax_grad.testing.fuzz.session import can_fork
from relax_grad.testing.fuzz.tir.memory import guarded
from relax_grad.tir import adjoint

pytestmark = pytest.mark.core


@T.prim_func(s_tir=True)
def gather_rows(
    A: T.Buffer((4,), "float64"), index: T.Buffer((3,), "int32"), Y: T.Buffer((3,), "float64")
):
    for i in range(3):
        with T.sblock("gather"):
            vi = T.axis.spatial(3, i)
            Y[vi] = A[index[vi]]


@pytest.mark.skipif(not can_fork(), reason="guard pages need a system with fork and mprotect")
@pytest.mark.parametrize("at_end", [False, True])
def test_indices_out_of_bounds_are_dropped(at_end):
    """The gradient lies beside a page that cannot be written to."""
    made = adjoint(gather_rows)
    module = tvm.IRModule({"g": made.function.with_attr("global_symbol", "g")})
    compiled = tvm.compile(module, TARGET)["g"]
    table = {"input": np.array([-1, 2, 4], "int32"), "cotangent": np.ones(3)}
    gradient = guarded(np.full(4, 7.0), at_end=at_end)
    compiled(*(guarded(table[kind], at_end=at_end) for kind, _ in made.takes), gradient)
    np.testing.assert_array_equal(gradient.numpy(), [0, 0, 1, 0])


def test_output_that_does_not_depend_on_an_input():
    @T.prim_func(s_tir=True)
    def first(
        A: T.Buffer((3,), "float64"), B: T.Buffer((3,), "float64"), Y: T.Buffer((3,), "float64")
    ):
        for i in range(3):
            with T.sblock("copy"):
                vi = T.axis.spatial(3, i)
                Y[vi] = A[vi]

    grads = run(first, np.ones(3), np.ones(3))
    np.testing.assert_array_equal(grads, [[1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize("n", [0, 1, 5])
def test_symbolic_extents(n):
    def emit(x):
        return relax.BlockBuilder.current().emit_te(
            lambda a: topi.sum(topi.multiply(topi.exp(a), a), axis=1), x
        )

    size = tirx.Var("n", "int64")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((size, 3), "float64"))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.normalize(emit(x)))
    module = relax_grad.vjp(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    value = np.random.default_rng(0).normal(size=(n, 3))
    arguments = map(tvm.runtime.tensor, (value, np.ones(n)))
    _, gradients = machine["main_vjp"](*arguments)
    np.testing.assert_allclose(gradients[0].numpy(), np.exp(value) * (1 + value))


def _blocks(function, **more):
    """Return the types of the axes of each block of the adjoint, for example ``"SSR"``."""
    blocks = []

    def visit(node):
        if node.name_hint != "root":
            blocks.append(
                "".join(
                    "R" if axis.iter_type == tirx.IterVar.CommReduce else "S"
                    for axis in node.iter_vars
                )
            )

    tvm_ffi.structural_walk(adjoint(function, **more).function.body, (SBlock, visit))
    return blocks


STRUCTURE = {
    "exp": (expression(topi.exp, (4, 3)), ["SS"]),
    "transpose": (expression(topi.transpose, (4, 3)), ["SS"]),
    "reshape": (expression(lambda x: topi.reshape(x, (2, 6)), (4, 3)), ["SS"]),
    "slice": (expression(lambda x: topi.strided_slice(x, [1, 0], [3, 3]), (4, 3)), ["SS"]),
    "strides": (
        expression(lambda x: topi.strided_slice(x, [0, 0], [4, 3], [2, 1]), (4, 3)),
        ["SS"],
    ),
    "pad": (expression(lambda x: topi.nn.pad(x, [1, 1], [2, 0]), (4, 3)), ["SS"]),
    "flip": (expression(lambda x: topi.flip(x, 0), (4, 3)), ["SS"]),
    "sum": (expression(lambda x: topi.sum(x, 1), (4, 3)), ["SS"]),
    "broadcast": (expression(lambda x: topi.broadcast_to(x, (4, 3)), (3,)), ["SR"]),
    "matmul": (expression(topi.matmul, (4, 3), (3, 5)), ["SSR", "SSR"]),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name):
    function, wanted = STRUCTURE[name]
    assert _blocks(function) == wanted


def test_structure_of_a_convolution():
    function = expression(
        lambda x, w: topi.nn.conv2d_nchw(x, w, 1, 1, 1), (1, 2, 5, 6), (3, 2, 3, 3)
    )
    blocks = _blocks(function)
    reductions = [block for block in blocks if "R" in block]
    assert len(reductions) == 2
    assert all(block.startswith("SSSS") for block in reductions)


def test_numbers_as_parameters():
    """A shape argument of call_tir becomes a number of the function, which the adjoint takes as
    well."""

    @T.prim_func(s_tir=True)
    def shifted(A: T.Buffer((5,), "float64"), Y: T.Buffer((5,), "float64"), k: T.int64):
        for i in range(5):
            with T.sblock("shift"):
                vi = T.axis.spatial(5, i)
                Y[vi] = T.if_then_else(vi + k < 5, A[vi + k] * A[vi + k], 0.0)

    made = adjoint(shifted, num_outputs=1)
    kinds = [kind for kind, _ in made.takes]
    assert kinds.count("cotangent") == 1
    assert ("input", 1) in made.takes
    table = {
        ("input", 0): tvm.runtime.tensor(np.arange(5.0)),
        ("input", 1): 2,
        ("cotangent", 0): tvm.runtime.tensor(np.ones(5)),
    }
    gradient = tvm.runtime.tensor(np.zeros(5))
    module = tvm.IRModule({"g": made.function.with_attr("global_symbol", "g")})
    tvm.compile(module, TARGET)["g"](*(table[key] for key in made.takes), gradient)
    np.testing.assert_array_equal(gradient.numpy(), [0, 0, 4, 6, 8])


def test_rows_of_a_symbolic_width_are_gathered():
    """Only a constant width is divided into cache lines."""

    def take(x, i):
        return te.compute((3, x.shape[1]), lambda a, b: x[i[a], b] * x[i[a], b], "take")

    def emit(x, i):
        return relax.BlockBuilder.current().emit_te(take, x, i)

    inputs = [np.random.default_rng(0).normal(size=(4, 5)), np.array([2, 0, 2])]
    assert check_gradients(emit, inputs, order=2, symbolic={0: {1: "n"}}).comparisons > 0
    for width in (16, 32):
        wide = [np.random.default_rng(0).normal(size=(4, width)), inputs[1]]
        assert check_gradients(emit, wide, order=1).comparisons > 0
