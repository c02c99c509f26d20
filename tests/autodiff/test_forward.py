"""Inlined calls of Relax functions: arguments, results and captured variables."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import check, gradients, is_sound, run, tensor
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_grad import GradientError
from relax_grad.transform import Gradient

V = np.array([0.5, -1.0, 0.25])
X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


def test_calls_of_other_functions():
    @I.ir_module
    class Module:
        @R.function
        def cube(x: R.Tensor(("n", "m"), "float64")) -> R.Tensor(("n", "m"), "float64"):
            n, m = T.int64(), T.int64()
            with R.dataflow():
                square = R.multiply(x, x)
                y = R.multiply(square, x)
                R.output(y)
            return y

        @R.function
        def twice(x: R.Tensor(("n", 4), "float64")) -> R.Tensor(("n", 4), "float64"):
            n = T.int64()
            cls = Module
            y: R.Tensor((n, 4), "float64") = cls.cube(x)
            z: R.Tensor((n, 4), "float64") = cls.cube(y)
            return z

        @R.function
        def main(x: R.Tensor((3, 4), "float64")):
            cls = Module
            y: R.Tensor((3, 4), "float64") = cls.twice(x)
            z: R.Tensor((3, 4), "float64") = cls.cube(x)
            s: R.Tensor((), "float64") = R.sum(R.add(y, z))
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    _, (grad,) = run(adjoint, "main_adjoint", X)
    np.testing.assert_allclose(grad, 9 * X**8 + 3 * X**2, rtol=1e-12)


def test_calls_within_a_branch():
    @I.ir_module
    class Module:
        @R.function
        def cube(x: R.Tensor((3, 4), "float64")) -> R.Tensor((3, 4), "float64"):
            y: R.Tensor((3, 4), "float64") = R.multiply(R.multiply(x, x), x)
            return y

        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            cls = Module
            if c:
                y: R.Tensor((3, 4), "float64") = cls.cube(x)
            else:
                y: R.Tensor((3, 4), "float64") = R.exp(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    for taken in (True, False):
        check(Module, X, np.array(taken))


def test_recursion_is_refused():
    @I.ir_module
    class Module:
        @R.function
        def again(x: R.Tensor((3, 4), "float64")) -> R.Tensor((3, 4), "float64"):
            cls = Module
            y: R.Tensor((3, 4), "float64") = cls.again(x)
            return y

        @R.function
        def main(x: R.Tensor((3, 4), "float64")):
            cls = Module
            y: R.Tensor((3, 4), "float64") = cls.again(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    with pytest.raises(GradientError, match=r"recursion .* again calls again"):
        Gradient("main")(Module)


def test_a_local_function_that_takes_a_variable_from_outside():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            y: R.Tensor((3, 4), "float64") = R.exp(x)

            @R.function
            def outer(a: R.Tensor((), "float64")) -> R.Tensor((3, 4), "float64"):
                z: R.Tensor((3, 4), "float64") = R.multiply(y, a)
                return z

            if c:
                z: R.Tensor((3, 4), "float64") = outer(R.const(2.0, "float64"))
            else:
                z: R.Tensor((3, 4), "float64") = R.sin(x)
            w: R.Tensor((3, 4), "float64") = outer(R.const(3.0, "float64"))
            s: R.Tensor((), "float64") = R.sum(R.multiply(z, w))
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    del adjoint["main"]  # TVM compiles it only after LambdaLift
    for taken in (True, False):
        _, (grad,) = run(adjoint, "main_adjoint", X, np.array(taken))
        y, z, dz = np.exp(X), np.sin(X), np.cos(X)
        wanted = 12 * y * y if taken else 3 * y * (z + dz)
        np.testing.assert_allclose(grad, wanted, rtol=1e-12)


def test_gradients_reach_variables_captured_by_a_local_function():
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
    _, (grad,) = run(alone, "main_adjoint", V, 2 * V)
    np.testing.assert_allclose(grad, 2 * V * np.exp(V))


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

    (grad,) = gradients(Module, V)
    np.testing.assert_allclose(grad, 3 * V**2)


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

    with pytest.raises(
        GradientError, match=r"binding 'y'.*: f: the Relax function that is called is known at run"
    ):
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
        _, (grad,) = run(tvm.IRModule(functions), "main_adjoint", V, np.array(taken))
        np.testing.assert_allclose(grad, wanted)


def test_arguments_with_a_less_precise_type_than_the_parameter():
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


def test_functions_of_the_same_name_are_not_recursion():
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


def test_calls_deeper_than_the_stack_of_python():
    bb = relax.BlockBuilder()
    callee = None
    for i in range(400):
        x = tensor("x", (3,))
        with bb.function(f"f{i}", [x]):
            y = x if callee is None else bb.emit(relax.Call(callee, [x]))
            bb.emit_func_output(bb.emit(op.sin(y)))
        callee = bb.get().get_global_var(f"f{i}")
    x = tensor("x", (3,))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(op.sum(bb.emit(relax.Call(callee, [x])))))
    assert Gradient("main")(bb.get())["main_adjoint"].script().count("R.cos") == 400
