"""Calls of tensor functions in modules."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tensor_functions import expression, module_of, numbers, tensor
from tvm import relax, te, tirx, topi
from tvm.relax.training.utils import register_te_gradient
from tvm.script import tirx as T

import relax_grad
from relax_grad.errors import GradientError

pytestmark = pytest.mark.core


@T.prim_func(s_tir=True)
def doubled(A: T.Buffer((3,), "float64")):
    for i in range(3):
        with T.sblock("double"):
            vi = T.axis.spatial(3, i)
            A[vi] = A[vi] * 2.0


@T.prim_func(s_tir=True)
def squared(A: T.Buffer((3,), "float64")):
    for i in range(3):
        with T.sblock("square"):
            vi = T.axis.spatial(3, i)
            A[vi] = A[vi] * A[vi]


def _in_place(bb, callee, x):
    own = bb.emit(relax.op.multiply(x, x))
    return bb.emit(relax.op.call_tir_inplace(callee, [own], [0], tensor(3)))


def test_in_place():
    module = relax_grad.vjp(module_of(doubled, _in_place, tensor(3)))
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    x = np.array([0.0, 1.0, 2.0])
    with pytest.raises(GradientError, match="overwrites in place"):
        relax_grad.vjp(module_of(squared, _in_place, tensor(3)))
    _, gradients = machine["main_vjp"](*map(tvm.runtime.tensor, (x, np.ones(3))))
    np.testing.assert_allclose(gradients[0].numpy(), 4 * x)


def test_a_read_by_the_old_name_after_a_call_in_place_is_refused():
    def call(bb, callee, x):
        own = bb.emit(relax.op.negative(x))
        new = bb.emit(relax.op.call_tir_inplace(callee, [own], [0], tensor(3)))
        return bb.emit(relax.op.add(own, new))

    with pytest.raises(GradientError, match=r"a binding reads .*overwrites in place"):
        relax_grad.vjp(module_of(doubled, call, tensor(3)))


def _two_calls():
    function = expression(lambda x: topi.multiply(topi.sin(x), x), (4, 3))

    def call(bb, callee, x):
        first = bb.emit(relax.op.call_tir(callee, [x], tensor(4, 3)))
        return bb.emit(relax.op.call_tir(callee, [first], tensor(4, 3)))

    return module_of(function, call, tensor(4, 3))


def _gradient_of_two_calls(module, pipeline, target=TARGET):
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())
    x = np.random.default_rng(0).uniform(size=(4, 3))
    _, (gradient,) = machine["main_vjp"](*map(tvm.runtime.tensor, (x, np.ones((4, 3)))))
    y = np.sin(x) * x
    wanted = (np.cos(y) * y + np.sin(y)) * (np.cos(x) * x + np.sin(x))
    np.testing.assert_allclose(gradient.numpy(), wanted)


def test_a_function_called_twice_has_one_adjoint():
    module = relax_grad.vjp(_two_calls())
    relax.analysis.well_formed(module)
    assert len([v for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)]) == 2
    _gradient_of_two_calls(module, "default")


@pytest.mark.parametrize("way", ["relax_grad", "fused", "json", "script"])
def test_ways_of_a_module(way):
    module = relax_grad.vjp(_two_calls())
    if way == "relax_grad":
        _gradient_of_two_calls(module, "relax_grad", relax_grad.target.host())
        return
    if way == "fused":
        passes = "LegalizeOps", "AnnotateTIROpPattern", "FoldConstant", "FuseOps", "FuseTIR"
        for name in passes:
            module = getattr(relax.transform, name)()(module)
    elif way == "json":
        module = tvm.ir.load_json(tvm.ir.save_json(module))
    else:
        module = tvm.script.from_source(module.script(show_meta=True))
    _gradient_of_two_calls(module, "default")


def _branch(bb, x, condition):
    bb._begin_binding_block()
    result = bb.emit(relax.op.call_tir(condition, [x], tensor(4, 3)))
    return relax.SeqExpr([bb._end_block()], result)


def test_within_a_conditional():
    function = expression(lambda x: topi.multiply(x, x), (4, 3))
    bb = relax.BlockBuilder()
    x = relax.Var("x", tensor(4, 3))
    condition = relax.Var("condition", relax.TensorType((), "bool"))
    callee = bb.add_func(function.without_attr("global_symbol"), "f")
    with bb.function("main", [x, condition]):
        bb._begin_binding_block()
        other = relax.SeqExpr([bb._end_block()], x)
        bb.emit_func_output(bb.emit(relax.If(condition, _branch(bb, x, callee), other)))
    machine = relax.VirtualMachine(tvm.compile(relax_grad.vjp(bb.get()), TARGET), tvm.cpu())
    value = np.arange(12.0).reshape(4, 3)
    for taken, wanted in ((True, 2 * value), (False, np.ones((4, 3)))):
        arguments = value, np.array(taken), np.ones((4, 3))
        _, (gradient,) = machine["main_vjp"](*map(tvm.runtime.tensor, arguments))
        np.testing.assert_allclose(gradient.numpy(), wanted)


def test_checkpoint():
    bb = relax.BlockBuilder()
    x = relax.Var("x", tensor(4, 3))
    function = expression(lambda a: topi.multiply(topi.sin(a), a), (4, 3))
    callee = bb.add_func(function.without_attr("global_symbol"), "f")
    with bb.function("main", [x]):
        with bb.dataflow():
            start = bb.emit(relax.op.grad.start_checkpoint(x))
            first = bb.emit(relax.op.call_tir(callee, [start], tensor(4, 3)))
            second = bb.emit(relax.op.call_tir(callee, [first], tensor(4, 3)))
            result = bb.emit_output(relax.op.grad.end_checkpoint(second))
        bb.emit_func_output(result)
    _gradient_of_two_calls(relax_grad.vjp(bb.get()), "default")


# Where calls may stand


def _square():
    return expression(lambda x: topi.multiply(x, x), (4, 3)).without_attr("global_symbol")


def _run(module, name, *arrays):
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    return machine[name](*(tvm.runtime.tensor(np.asarray(array)) for array in arrays))


@pytest.mark.parametrize("is_dataflow", [True, False])
def test_within_a_callee(is_dataflow):
    """A call within a Relax function that another one calls."""
    bb = relax.BlockBuilder()
    callee = bb.add_func(_square(), "f")
    x, y = (relax.Var(name, tensor(4, 3)) for name in "xy")

    def emit(value):
        inner = bb.emit(relax.op.call_tir(callee, [value], tensor(4, 3)))
        return bb.emit(relax.op.call_tir(callee, [inner], tensor(4, 3)))

    with bb.function("inner", [y], private=True):
        if is_dataflow:
            with bb.dataflow():
                result = bb.emit_output(emit(y))
        else:
            result = emit(y)
        inner = bb.emit_func_output(result)
    with bb.function("main", [x]):
        once = bb.emit(relax.Call(inner, [x]))
        bb.emit_func_output(bb.emit(relax.op.add(once, x)))
    value = np.linspace(0.5, 1.5, 12).reshape(4, 3)
    _, (gradient,) = _run(relax_grad.vjp(bb.get()), "main_vjp", value, np.ones((4, 3)))
    np.testing.assert_allclose(gradient.numpy(), 4 * value**3 + 1)


def test_within_a_recomputed_branch():
    """A checkpoint within a branch, whose tensor function is recomputed."""
    bb = relax.BlockBuilder()
    callee = bb.add_func(_square(), "f")
    x = relax.Var("x", tensor(4, 3))
    condition = relax.Var("condition", relax.TensorType((), "bool"))

    def branch(times):
        bb._begin_binding_block()
        value = bb.emit(relax.op.grad.start_checkpoint(x))
        for _ in range(times):
            value = bb.emit(relax.op.call_tir(callee, [value], tensor(4, 3)))
        value = bb.emit(relax.op.grad.end_checkpoint(value))
        return relax.SeqExpr([bb._end_block()], value)

    with bb.function("main", [x, condition]):
        bb.emit_func_output(bb.emit(relax.If(condition, branch(2), branch(1))))
    module = relax_grad.vjp(bb.get())
    value = np.linspace(0.5, 1.5, 12).reshape(4, 3)
    for taken, wanted in ((True, 4 * value**3), (False, 2 * value)):
        _, (grad,) = _run(module, "main_vjp", value, np.array(taken), np.ones((4, 3)))
        np.testing.assert_allclose(grad.numpy(), wanted)


def _loss():
    """Return the module of the sum of x ** 4, whose powers are tensor functions."""
    bb = relax.BlockBuilder()
    callee = bb.add_func(_square(), "f")
    x = relax.Var("x", tensor(4, 3))
    with bb.function("main", [x]):
        with bb.dataflow():
            value = bb.emit(relax.op.call_tir(callee, [x], tensor(4, 3)))
            value = bb.emit(relax.op.call_tir(callee, [value], tensor(4, 3)))
            value = bb.emit_output(relax.op.sum(value))
        bb.emit_func_output(value)
    return bb.get()


def test_functional_interfaces():
    value, vector = numbers((4, 3), (4, 3))
    _, (gradient,) = _run(relax_grad.value_and_grad(_loss()), "main_adjoint", value)
    np.testing.assert_allclose(gradient.numpy(), 4 * value**3)
    _, (tangent,) = _run(relax_grad.jvp(_loss()), "main_jvp", value, vector)
    np.testing.assert_allclose(tangent.numpy(), np.sum(4 * value**3 * vector))
    (_, (gradient,)), (product,) = _run(relax_grad.hvp(_loss()), "main_hvp", value, vector)
    np.testing.assert_allclose(gradient.numpy(), 4 * value**3)
    np.testing.assert_allclose(product.numpy(), 12 * value**2 * vector)
    module = relax_grad.derivatives(_loss(), order=3)
    *_, (third,) = _run(module, "main_order3", value, vector, vector)
    np.testing.assert_allclose(third.numpy(), 24 * value * vector * vector)


# Whose gradient it is


@pytest.fixture(scope="module")
def seven():
    """Register a gradient that no function has, seven times the cotangent, and return its name."""

    def gradient(output_grad, x):
        return te.compute(x.shape, lambda *i: 7.0 * output_grad(*i), name="seven")

    register_te_gradient("relax_grad_test_seven", gradient)
    return "relax_grad_test_seven"


@pytest.mark.parametrize("place", ["main", "callee", "branch"])
def test_a_registered_gradient_wins(place, seven):
    bb = relax.BlockBuilder()
    x, y = (relax.Var(name, tensor(4, 3)) for name in "xy")
    condition = relax.Var("condition", relax.TensorType((), "bool"))

    def emit(value):
        made = bb.call_te_with_grad(lambda a: topi.multiply(a, a), value, te_grad_name=seven)
        return bb.emit(made)

    def branch(is_own):
        bb._begin_binding_block()
        value = emit(x) if is_own else bb.emit(relax.op.multiply(x, x))
        return relax.SeqExpr([bb._end_block()], value)

    if place == "callee":
        with bb.function("inner", [y], private=True):
            inner = bb.emit_func_output(emit(y))
    with bb.function("main", [x, condition]):
        if place == "main":
            result = emit(x)
        elif place == "callee":
            result = bb.emit(relax.Call(inner, [x]))
        else:
            result = bb.emit(relax.If(condition, branch(True), branch(False)))
        bb.emit_func_output(result)
    value = np.arange(12.0).reshape(4, 3)
    arguments = value, np.array(True), np.ones((4, 3))
    made = relax_grad.vjp(bb.get())
    # TVM does not compile call_tir_with_grad, which the original functions have.
    kept = {v: f for v, f in made.functions_items() if v.name_hint not in ("main", "inner")}
    result, (gradient,) = _run(tvm.IRModule(kept), "main_vjp", *arguments)
    np.testing.assert_array_equal(result.numpy(), value**2)
    np.testing.assert_array_equal(gradient.numpy(), np.full((4, 3), 7.0))


# Several results


@T.prim_func(s_tir=True)
def three_results(
    A: T.Buffer((4, 3), "float64"),
    Y: T.Buffer((4, 3), "float64"),
    N: T.Buffer((4, 3), "int64"),
    Z: T.Buffer((4,), "float64"),
):
    for i, j in T.grid(4, 3):
        with T.sblock("map"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = A[vi, vj] * A[vi, vj]
            N[vi, vj] = T.Cast("int64", A[vi, vj])
    for i, j in T.grid(4, 3):
        with T.sblock("sum"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                Z[vi] = 0.0
            Z[vi] = Z[vi] + Y[vi, vj] * T.Cast("float64", N[vi, vj])


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), (0, 1), (1,)])
def test_results_without_cotangents(used):
    """Some results are used, beside one of integers."""
    out = [tensor(4, 3), tensor(4, 3, dtype="int64"), tensor(4)]

    def emit(bb, callee, x):
        results = bb.emit(relax.op.call_tir(callee, [x], out))
        total = relax.op.multiply(relax.op.sum(x), relax.const(3.0, "float64"))
        for i in used:
            part = relax.op.sum(relax.op.astype(relax.TupleGetItem(results, i), "float64"))
            total = relax.op.add(total, part)
        return bb.normalize(total)

    x = np.linspace(0.3, 3.1, 12).reshape(4, 3)
    module = relax_grad.value_and_grad(module_of(three_results, emit, tensor(4, 3)))
    _, (grad,) = _run(module, "main_adjoint", x)
    wanted = 3 + (2 * x if 0 in used else 0) + (2 * x * np.trunc(x) if 2 in used else 0)
    np.testing.assert_allclose(grad.numpy(), np.broadcast_to(wanted, (4, 3)))


def test_numbers_of_a_call():
    """A number among the arguments reaches the adjoint, which has the symbolic extent as well."""

    @T.prim_func(private=True, s_tir=True)
    def scaled(x: T.handle, k: T.int64, y: T.handle):
        n = T.int64()
        A = T.match_buffer(x, (n,), "float64")
        Y = T.match_buffer(y, (n,), "float64")
        for i in range(n):
            with T.sblock("scale"):
                vi = T.axis.spatial(n, i)
                Y[vi] = A[vi] * A[vi] * T.Cast("float64", k + n)

    n = tirx.Var("n", "int64")
    bb = relax.BlockBuilder()
    callee = bb.add_func(scaled, "f")
    x = relax.Var("x", relax.TensorType((n,), "float64"))
    with bb.function("main", [x]):
        out = relax.TensorType((n,), "float64")
        result = bb.emit(relax.op.call_tir(callee, [x, n * 2], out))
        bb.emit_func_output(result)
    value = np.arange(5.0)
    _, (grad,) = _run(relax_grad.vjp(bb.get()), "main_vjp", value, np.ones(5))
    np.testing.assert_array_equal(grad.numpy(), 2 * value * 15)
