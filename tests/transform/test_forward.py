"""Calls of Relax functions, which are written out: what goes in, what comes out, what is captured."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import build, check, is_sound, run, tensor
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_grad
from relax_grad import GradientError
from relax_grad.transform import Gradient

V = np.array([0.5, -1.0, 0.25])
X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


def gradients(module, *values):
    """The gradients by an adjoint function that is compiled alone."""
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    return run(tvm.IRModule({"main_adjoint": adjoint["main_adjoint"]}), "main_adjoint", *values)[1]


def test_what_a_local_function_captures():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "float64"), w: R.Tensor((3,), "float64")):
            @R.function
            def scaled(y: R.Tensor((3,), "float64")) -> R.Tensor((3,), "float64"):
                z: R.Tensor((3,), "float64") = R.multiply(y, R.exp(x))
                return z

            again = scaled
            a: R.Tensor((3,), "float64") = again(w)
            s: R.Tensor((), "float64") = R.sum(a)
            return s

    adjoint = Gradient("main", "x")(Module)
    alone = tvm.IRModule({"main_adjoint": adjoint["main_adjoint"]})
    _, (found,) = run(alone, "main_adjoint", V, 2 * V)
    np.testing.assert_allclose(found, 2 * V * np.exp(V))


def test_functions_as_arguments_and_results():
    @I.ir_module
    class Module:
        @R.function
        def apply(
            f: R.Callable((R.Tensor((3,), "float64"),), R.Tensor((3,), "float64")),
            x: R.Tensor((3,), "float64"),
        ) -> R.Tensor((3,), "float64"):
            y: R.Tensor((3,), "float64") = f(x)
            return y

        @R.function
        def multiplier(
            x: R.Tensor((3,), "float64"),
        ) -> R.Callable((R.Tensor((3,), "float64"),), R.Tensor((3,), "float64")):
            @R.function
            def by_x(y: R.Tensor((3,), "float64")) -> R.Tensor((3,), "float64"):
                z: R.Tensor((3,), "float64") = R.multiply(x, y)
                return z

            return by_x

        @R.function
        def main(x: R.Tensor((3,), "float64")):
            cls = Module
            f = cls.multiplier(x)
            a: R.Tensor((3,), "float64") = f(x)
            b: R.Tensor((3,), "float64") = cls.apply(f, a)
            s: R.Tensor((), "float64") = R.sum(b)
            return s

    (found,) = gradients(Module, V)
    np.testing.assert_allclose(found, 3 * V**2)


def test_a_function_that_is_a_parameter_is_refused():
    @I.ir_module
    class Module:
        @R.function
        def main(
            f: R.Callable((R.Tensor((3,), "float64"),), R.Tensor((3,), "float64")),
            x: R.Tensor((3,), "float64"),
        ):
            y: R.Tensor((3,), "float64") = f(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    with pytest.raises(GradientError, match=r"binding 'y'.*: f: which Relax function is called"):
        Gradient("main")(Module)


def test_a_local_function_of_a_branch():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool")):
            if c:

                @R.function
                def square(y: R.Tensor((3,), "float64")) -> R.Tensor((3,), "float64"):
                    z: R.Tensor((3,), "float64") = R.multiply(y, y)
                    return z

                a: R.Tensor((3,), "float64") = square(x)
                b = a
            else:
                b = R.exp(x)
            s: R.Tensor((), "float64") = R.sum(b)
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    functions = {v: f for v, f in adjoint.functions_items() if v.name_hint != "main"}
    for taken, wanted in ((True, 2 * V), (False, np.exp(V))):
        _, (found,) = run(tvm.IRModule(functions), "main_adjoint", V, np.array(taken))
        np.testing.assert_allclose(found, wanted)


@I.ir_module
class Symbolic:
    @R.function
    def cube(x: R.Tensor(("n", "k"), "float64")) -> R.Tensor(("n", "k"), "float64"):
        n, k = T.int64(), T.int64()
        flat = R.reshape(x, R.shape([n * k]))
        y: R.Tensor((n, k), "float64") = R.reshape(
            R.multiply(R.multiply(flat, flat), flat), R.shape([n, k])
        )
        return y

    @R.function
    def main(x: R.Tensor(("m", 4), "float64"), c: R.Tensor((), "bool")):
        m = T.int64()
        cls = Symbolic
        if c:
            a: R.Tensor((m, 4), "float64") = cls.cube(x)
            r: R.Tensor((m, 4), "float64") = R.exp(a)
        else:
            r: R.Tensor((m, 4), "float64") = cls.cube(x)
        s: R.Tensor((), "float64") = R.sum(r)
        return s


def test_symbolic_extents_are_those_of_the_caller_to_third_order():
    module = relax_grad.derivatives(Symbolic, order=3, wrt="x")
    is_sound(module)
    x, one = X / 4, np.ones_like(X)
    e = np.exp(x**3)
    wanted = {
        True: (3 * x**2 * e, (6 * x + 9 * x**4) * e, (6 + 54 * x**3 + 27 * x**6) * e),
        False: (3 * x**2, 6 * x, 6 * one),
    }
    for taken, expected in wanted.items():
        _, *found = run(module, "main_order3", x, np.array(taken), one, one)
        for (each,), value in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, value)


def test_symbolic_extents_that_a_local_function_captures():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("m", 4), "float64")):
            m = T.int64()

            @R.function
            def spread(y: R.Tensor((4,), "float64")) -> R.Tensor((), "float64"):
                z = R.broadcast_to(R.exp(y), R.shape([m, 4]))
                t: R.Tensor((), "float64") = R.sum(R.multiply(z, x))
                return t

            s: R.Tensor((), "float64") = spread(R.sum(x, [0]))
            return s

    (found,) = gradients(Module, X)
    sums = X.sum(0)
    np.testing.assert_allclose(found, np.exp(sums) * (1 + sums) + 0 * X)


def test_extents_that_come_as_a_shape():
    @I.ir_module
    class Module:
        @R.function
        def spread(x: R.Tensor((3,), "float64"), s: R.Shape(["a", "b"])):
            a, b = T.int64(), T.int64()
            y: R.Tensor((a, b, 3), "float64") = R.broadcast_to(x, R.shape([a, b, 3]))
            return y

        @R.function
        def main(x: R.Tensor((3,), "float64"), t: R.Tensor(("p",), "int32")):
            p = T.int64()
            cls = Module
            y = cls.spread(x, R.shape([p, p + 1]))
            s: R.Tensor((), "float64") = R.sum(R.exp(y))
            return s

    (found,) = gradients(Module, V, np.zeros(2, "int32"))
    np.testing.assert_allclose(found, 6 * np.exp(V))


def test_arguments_of_which_less_is_known_than_the_parameter_says():
    pair = relax.TupleType([tensor("a", (3, 4)).ty] * 2)
    p = relax.Var("p", pair)
    bb = relax.BlockBuilder()
    with bb.function("product", [p]):
        a, b = (bb.emit(relax.TupleGetItem(p, i)) for i in range(2))
        bb.emit_func_output(bb.emit(op.sum(bb.emit(op.multiply(a, op.exp(b))))))
    product = bb.get().get_global_var("product")
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=2))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.Call(product, [relax.Tuple([x, x])])))
    check(bb.get(), X)


def test_functions_of_the_same_name_are_no_recursion():
    @I.ir_module
    class Module:
        @R.function
        def f(x: R.Tensor((3,), "float64")) -> R.Tensor((3,), "float64"):
            y: R.Tensor((3,), "float64") = R.exp(x)
            return y

        @R.function
        def main(x: R.Tensor((3,), "float64")):
            cls = Module

            @R.function
            def f(y: R.Tensor((3,), "float64")) -> R.Tensor((3,), "float64"):
                z: R.Tensor((3,), "float64") = cls.f(y)
                return z

            y: R.Tensor((3,), "float64") = f(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    assert "R.exp" in Gradient("main")(Module)["main_adjoint"].script()


def test_a_chain_of_200_calls():
    bb = relax.BlockBuilder()
    callee = None
    for i in range(200):
        x = tensor("x", (3,))
        with bb.function(f"f{i}", [x]):
            y = x if callee is None else bb.emit(relax.Call(callee, [x]))
            bb.emit_func_output(bb.emit(op.sin(y)))
        callee = bb.get().get_global_var(f"f{i}")
    x = tensor("x", (3,))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(op.sum(bb.emit(relax.Call(callee, [x])))))
    assert Gradient("main")(bb.get())["main_adjoint"].script().count("R.cos") == 200


def test_extents_of_a_cotangent_that_only_the_body_defines():
    m = T.int64()
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=1))

    def body(bb, x):
        y = bb.match_cast(x, relax.TensorType((m,), "float64"))
        return op.exp(bb.emit(op.concat([y, y], 0)))

    module = build([x], body)
    adjoint = relax_grad.vjp(module)
    is_sound(adjoint)
    _, (found,) = run(adjoint, "main_vjp", V, np.arange(6.0))
    np.testing.assert_allclose(found, np.exp(V) * [3, 5, 7])
    tangents = relax_grad.jvp(module)
    assert relax.analysis.check_well_formed(tangents)
    _, (found,) = run(tangents, "main_jvp", V, V)
    np.testing.assert_allclose(found, np.tile(V * np.exp(V), 2))


def test_a_shape_and_a_scalar_that_name_extents_of_a_branch():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor((3,), "float64"), s: R.Shape(["a"]), k: T.int64, c: R.Tensor((), "bool")
        ):
            a = T.int64()
            y: R.Tensor((a, k, 3), "float64") = R.broadcast_to(x, R.shape([a, k, 3]))
            if c:
                z: R.Tensor((), "float64") = R.sum(R.exp(R.reshape(y, R.shape([a * k, 3]))))
            else:
                z: R.Tensor((), "float64") = R.sum(R.broadcast_to(y, R.shape([a, k, 3])))
            return z

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    for taken, wanted in ((True, 6 * np.exp(V)), (False, 6 + 0 * V)):
        _, (found,) = run(adjoint, "main_adjoint", V, tvm_ffi.Shape([2]), 3, np.array(taken))
        np.testing.assert_allclose(found, wanted)
