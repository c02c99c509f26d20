"""Calls of tensor functions that compute an operator are differentiated as the operator."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tensor_functions import numbers
from tvm import relax, te, tirx, topi
from tvm.ir import Op
from tvm.script import tirx as T

import relax_grad
from relax_grad.autodiff import gradient
from relax_grad.tir.recognise import with_operators

MATRIX, OTHER, IMAGES = (3, 4), (4, 2), (1, 4, 5, 6)
N = tirx.Var("n", "int64")


def module_of(compute, *shapes, dtype="float32"):
    """Return a module whose function calls a tensor function."""
    params = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            value = bb.emit_output(bb.call_te(compute, *params))
        bb.emit_func_output(value)
    return bb.get()


def operators(function):
    """Return the names of the operators of a function, without the prefix."""
    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    value = [call.op for call in values if isinstance(call, relax.Call)]
    return [op.name.removeprefix("relax.") for op in value if isinstance(op, Op)]


def _pool(kind, **more):
    return lambda x: topi.nn.pool2d(x, (3, 2), (2, 2), (1, 1), (1, 0, 1, 0), kind, **more)


def _summed(x, y):
    """Sum over two axes, with the axes of the result in another order."""
    k, m = te.reduce_axis((0, 4), "k"), te.reduce_axis((0, 5), "m")
    return te.compute((6, 2, 3), lambda j, b, i: te.sum(x[m, b, i, k] * y[j, k, b, m], [k, m]))


#: Functions, the shapes of their arguments, and the operators.
KNOWN = {
    "matmul": (topi.matmul, (MATRIX, OTHER), ["matmul"]),
    "matmul of transposes": (
        lambda a, b: topi.matmul(a, b, True, True),
        ((4, 3), (5, 4)),
        ["permute_dims", "permute_dims", "matmul"],
    ),
    "matmul of symbolic extents": (topi.matmul, ((N, 4), OTHER), ["matmul"]),
    "dense": (topi.nn.dense, (MATRIX, (5, 4)), ["permute_dims", "matmul"]),
    "batch_matmul": (
        topi.nn.batch_matmul,
        ((2, 3, 4), (2, 5, 4)),
        ["permute_dims", "matmul"],
    ),
    "vector": (
        lambda a, b: topi.tensordot(a, b, 1),
        (MATRIX, (4,)),
        ["reshape", "matmul", "reshape"],
    ),
    "two axes": (
        _summed,
        ((5, 2, 3, 4), (6, 4, 2, 5)),
        ["permute_dims", "reshape", "permute_dims", "reshape", "matmul", "permute_dims"],
    ),
    "conv1d": (
        lambda x, w: topi.nn.conv1d_ncw(x, w, 1, 1, 1),
        ((2, 3, 7), (2, 3, 3)),
        ["nn.conv1d"],
    ),
    "conv2d": (
        lambda x, w: topi.nn.conv2d_nchw(x, w, (2, 1), (1, 0, 2, 1), (1, 2)),
        (IMAGES, (3, 4, 3, 2)),
        ["nn.conv2d"],
    ),
    "grouped": (
        lambda x, w: topi.nn.conv(x, w, 1, 1, 1, 2, "NCHW", "OIHW"),
        (IMAGES, (6, 2, 3, 3)),
        ["nn.conv2d"],
    ),
    "channels last": (
        lambda x, w: topi.nn.conv2d_nhwc(x, w, 1, 1, 1),
        ((1, 5, 6, 2), (3, 3, 2, 3)),
        ["nn.conv2d"],
    ),
    "conv3d": (
        lambda x, w: topi.nn.conv3d_ncdhw(x, w, 1, 1, 1, 1),
        ((1, 2, 3, 3, 3), (2, 2, 3, 3, 3)),
        ["nn.conv3d"],
    ),
    "max_pool": (_pool("max"), (IMAGES,), ["nn.max_pool2d"]),
    "max_pool, rounded up": (_pool("max", ceil_mode=True), (IMAGES,), ["nn.max_pool2d"]),
    "avg_pool": (_pool("avg"), (IMAGES,), ["nn.avg_pool2d"]),
    "avg_pool, of elements": (_pool("avg", count_include_pad=False), (IMAGES,), ["nn.avg_pool2d"]),
    "global_pool": (lambda x: topi.nn.global_pool(x, "avg"), (IMAGES,), ["nn.adaptive_avg_pool2d"]),
    "softmax": (topi.nn.softmax, (MATRIX,), ["nn.softmax"]),
    "softmax of an axis": (lambda x: topi.nn.softmax(x, 0), ((N, 4),), ["nn.softmax"]),
    "log_softmax": (topi.nn.log_softmax, (MATRIX,), ["nn.log_softmax"]),
    "layer_norm": (
        lambda x, g, b: topi.nn.layer_norm(x, g, b, [1], 1e-3),
        (MATRIX, (4,), (4,)),
        ["nn.layer_norm"],
    ),
    "sum": (lambda x: topi.sum(x, [0, 2], True), ((3, 4, 2),), ["sum"]),
    "sum of symbolic extents": (lambda x: topi.sum(x, 1), ((N, 4),), ["sum"]),
    "mean": (lambda x: topi.sum(x, 1) / tirx.const(4.0, x.dtype), (MATRIX,), ["mean"]),
    "max": (lambda x: topi.max(x, 1), (MATRIX,), ["max"]),
    "min": (topi.min, (MATRIX,), ["min"]),
    "prod": (lambda x: topi.prod(x, 0), (MATRIX,), ["prod"]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_functions(name):
    compute, shapes, wanted = KNOWN[name]
    module = module_of(compute, *shapes)
    recognised = with_operators(module)
    assert operators(recognised["main"]) == wanted
    assert operators(module["main"]) == ["call_tir"]
    assert relax.analysis.well_formed(recognised) is not False  # raises, or says so in 0.26
    result = recognised["main"].body.blocks[0].bindings[-1].var
    assert result.same_as(module["main"].body.blocks[0].bindings[-1].var)


def _softmax_with(offset):
    """A softmax that adds a number to the sum of the exponentials."""

    def compute(x):
        k, m = te.reduce_axis((0, 4), "k"), te.reduce_axis((0, 4), "m")
        peak = te.compute((3,), lambda i: te.max(x[i, k], k))
        raised = te.compute(MATRIX, lambda i, j: tirx.exp(x[i, j] - peak[i]))
        total = te.compute((3,), lambda i: te.sum(raised[i, m], m))
        return te.compute(
            MATRIX, lambda i, j: raised[i, j] / (total[i] + tirx.const(offset, x.dtype))
        )

    return compute


def _convolution_of_padded(value):
    def compute(x, w):
        return topi.nn.conv2d_nchw(topi.nn.pad(x, [0, 0, 1, 1], [0, 0, 1, 1], value), w, 1, 0, 1)

    return compute


def _sum_of(function, shape=(3, 2)):
    def compute(a, b):
        k = te.reduce_axis((0, 4), "k")
        return te.compute(shape, lambda i, j: te.sum(function(a, b, i, j, k), k))

    return compute


DIFFERENT = {
    "another epsilon": (_softmax_with(1e-6), (MATRIX,)),
    "another pad value": (_convolution_of_padded(1.0), (IMAGES, (3, 4, 3, 3))),
    "a window of another size": (
        lambda x: topi.nn.pool2d(x, (3, 2), (2, 2), (1, 1), (1, 0, 1, 0), "max") * 2.0,
        (IMAGES,),
    ),
    "a sum of squares": (lambda x: topi.sum(x * x, 1), (MATRIX,)),
    "a map": (topi.exp, (MATRIX,)),
    "a sum of differences": (_sum_of(lambda a, b, i, j, k: a[i, k] - b[k, j]), (MATRIX, OTHER)),
    "one factor": (
        _sum_of(lambda a, b, i, j, k: a[i, k] * a[i, k] + b[k, j] * 0.0),
        (MATRIX, OTHER),
    ),
    "a shorter axis": (_sum_of(lambda a, b, i, j, k: a[i, k] * b[k, j]), ((3, 5), (5, 2))),
    "a diagonal": (_sum_of(lambda a, b, i, j, k: a[k, k] * b[k, j]), ((4, 4), OTHER)),
    "an offset": (_sum_of(lambda a, b, i, j, k: a[i, k + 1] * b[k, j]), ((3, 5), OTHER)),
    "a part of the result": (
        _sum_of(lambda a, b, i, j, k: a[i, k] * b[k, j], (2, 2)),
        (MATRIX, OTHER),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_functions_that_differ(name):
    compute, shapes = DIFFERENT[name]
    module = module_of(compute, *shapes)
    assert with_operators(module).same_as(module)


def test_a_contraction_that_starts_at_one_is_none():
    @T.prim_func(s_tir=True)
    def product(
        A: T.Buffer((3, 4), "float32"),
        B: T.Buffer((4, 2), "float32"),
        C: T.Buffer((3, 2), "float32"),
    ):
        for i, j, k in T.grid(3, 2, 4):
            with T.sblock("product"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(1)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    params = [
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in zip("ab", (MATRIX, OTHER), strict=True)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            callee = bb.add_func(product.without_attr("global_symbol"), "product")
            kind = relax.TensorType((3, 2), "float32")
            value = bb.emit_output(relax.op.call_tir(callee, params, kind))
        bb.emit_func_output(value)
    module = bb.get()
    assert with_operators(module).same_as(module)


def _gradients(module, arrays):
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    value, grads = machine["main_vjp"](*map(tvm.runtime.tensor, arrays))
    return [value.numpy(), *(grad.numpy() for grad in grads)]


@pytest.mark.parametrize("name", ["two axes", "vector", "grouped", "channels last", "avg_pool"])
def test_gradients_agree_with_those_of_the_function(name, monkeypatch):
    compute, shapes, wanted = KNOWN[name]
    module = module_of(compute, *shapes)
    own = relax_grad.vjp(module)
    assert operators(own["main_vjp"])[: len(wanted)] == wanted
    assert "call_tir" not in operators(own["main_vjp"])
    monkeypatch.setattr(gradient, "with_operators", lambda mod: mod)
    other = relax_grad.vjp(module)
    assert "call_tir" in operators(other["main_vjp"])
    result = [int(extent) for extent in module["main"].ret_ty.shape]
    arrays = [array.astype("float32") for array in numbers(*shapes, result)]
    for grad, expected in zip(_gradients(own, arrays), _gradients(other, arrays), strict=True):
        np.testing.assert_allclose(grad, expected, 1e-5, 1e-5)


def test_branches_and_callees():
    """Calls within branches and called functions are replaced; the functions themselves stay."""
    x = relax.Var("x", relax.TensorType(MATRIX, "float32"))
    condition = relax.Var("condition", relax.TensorType((), "bool"))
    y = relax.Var("y", relax.TensorType(MATRIX, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("callee", [y]):
        bb.emit_func_output(bb.emit(bb.call_te(topi.nn.softmax, y)))
    with bb.function("main", [condition, x]):
        called = bb.emit(relax.Call(bb.get().get_global_var("callee"), [x]))
        bb.emit_func_output(bb.emit(relax.op.sum(called)))
    module = bb.get()
    adjoint = relax_grad.vjp(module, wrt="x")
    assert operators(adjoint["callee"]) == ["call_tir"]
    assert "nn.softmax" in operators(adjoint["main_vjp"])
    assert "call_tir" not in operators(adjoint["main_vjp"])


def test_a_registered_gradient_wins():
    """``call_tir_with_grad`` is no call that is replaced."""
    module = module_of(topi.nn.softmax, MATRIX)
    (x,) = module["main"].params
    callee = next(variable for variable in module.get_global_vars() if variable.name_hint != "main")
    bb = relax.BlockBuilder(module)
    with bb.function("other", [x]):
        with bb.dataflow():
            call = relax.op.call_tir_with_grad(callee, x, x.ty, te_grad_name="own")
            value = bb.emit_output(call)
        bb.emit_func_output(value)
    assert operators(with_operators(bb.get())["other"]) == ["call_tir_with_grad"]
