"""Symbolic extents of calls of other functions."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from programs import build, check, gradients, is_sound, run, with_assertions
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_grad
from relax_grad.transform import Gradient

V = np.array([0.5, -1.0, 0.25])
X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


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


def test_extents_of_a_call():
    """A symbolic extent of a callee receives a product of extents, and a constant extent receives a
    symbolic one."""

    @I.ir_module
    class Module:
        @R.function
        def shifted(x: R.Tensor(("m", 4), "float64"), b: R.Tensor((4,), "float64")):
            y = R.exp(R.add(x, b))
            return y

        @R.function
        def six(x: R.Tensor((6, 4), "float64"), b: R.Tensor((4,), "float64")):
            y = R.tanh(R.multiply(x, b))
            return y

        @R.function
        def main(x: R.Tensor(("n", 4), "float64"), b: R.Tensor((4,), "float64")):
            n = T.int64()
            cls = Module
            twice = R.concat([x, x])
            y: R.Tensor((2 * n, 4), "float64") = cls.shifted(twice, b)
            z: R.Tensor((6, 4), "float64") = cls.six(R.add(y, b), b)
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    check(Module, X / 4, np.array([0.5, -0.25, 0.125, 1]), at=(0, 1))


def test_extents_that_a_call_finds_equal():
    """The adjoint function checks at run time the equalities that the types do not state."""

    @I.ir_module
    class Module:
        @R.function
        def scaled(x: R.Tensor(("n",), "float64"), y: R.Tensor(("n",), "float64")):
            n = T.int64()
            z: R.Tensor((n,), "float64") = R.multiply(R.exp(x), y)
            return z

        @R.function
        def main(x: R.Tensor(("a",), "float64"), y: R.Tensor(("b",), "float64")):
            cls = Module
            s: R.Tensor((), "float64") = R.sum(cls.scaled(x, y))
            return s

    check(Module, V, 2 * V, at=(0, 1))
    # The cast refuses them, or the kernel after it.
    with with_assertions(), pytest.raises((RuntimeError, ValueError)):
        run(Gradient("main")(Module), "main_adjoint", V, np.ones(4))


def test_extents_that_a_call_in_a_branch_finds_equal():
    @I.ir_module
    class Module:
        @R.function
        def scaled(x: R.Tensor(("n",), "float64"), y: R.Tensor(("n",), "float64")):
            n = T.int64()
            z: R.Tensor((n,), "float64") = R.multiply(R.exp(x), y)
            return z

        @R.function
        def main(
            x: R.Tensor(("a",), "float64"), y: R.Tensor(("b",), "float64"), c: R.Tensor((), "bool")
        ):
            cls = Module
            if c:
                z = cls.scaled(y, x)
            else:
                z = R.sin(y)
            s: R.Tensor((), "float64") = R.sum(R.multiply(z, z))
            return s

    check(Module, V, 2 * V, np.array(True), at=(0, 1))


def test_a_call_whose_argument_has_an_extent_that_is_an_expression():
    @I.ir_module
    class Module:
        @R.function
        def pairs(x: R.Tensor(("m", 2), "float64")) -> R.Tensor(("m * 2", 2), "float64"):
            m = T.int64()
            y: R.Tensor((m * 2, 2), "float64") = R.concat((x, R.sin(x)), axis=0)
            z: R.Tensor((m * 2, 2), "float64") = R.add(y, R.const([0.5, 1.0], "float64"))
            return z

        @R.function
        def main(x: R.Tensor(("n", 4), "float64")):
            n = T.int64()
            cls = Module
            y: R.Tensor((n * 4, 2), "float64") = cls.pairs(R.reshape(x, R.shape([n * 2, 2])))
            s: R.Tensor((), "float64") = R.sum(R.multiply(y, y))
            return s

    check(Module, X)


def test_symbolic_extents_are_those_of_the_caller_to_third_order():
    module = relax_grad.derivatives(Symbolic, order=3, wrt="x")
    is_sound(module)
    x, ones = X / 4, np.ones_like(X)
    e = np.exp(x**3)
    wanted = {
        True: (3 * x**2 * e, (6 * x + 9 * x**4) * e, (6 + 54 * x**3 + 27 * x**6) * e),
        False: (3 * x**2, 6 * x, 6 * ones),
    }
    for taken, expected in wanted.items():
        _, *derivatives = run(module, "main_order3", x, np.array(taken), ones, ones)
        for (derivative,), value in zip(derivatives, expected, strict=True):
            np.testing.assert_allclose(derivative, value)


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

    (grad,) = gradients(Module, X)
    sums = X.sum(0)
    np.testing.assert_allclose(grad, np.exp(sums) * (1 + sums) + 0 * X)


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

    (grad,) = gradients(Module, V, np.zeros(2, "int32"))
    np.testing.assert_allclose(grad, 6 * np.exp(V))


def test_extents_of_a_cotangent_that_only_the_body_defines():
    m = T.int64()
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=1))

    def body(bb, x):
        y = bb.match_cast(x, relax.TensorType((m,), "float64"))
        return op.exp(bb.emit(op.concat([y, y], 0)))

    module = build([x], body)
    adjoint = relax_grad.vjp(module)
    is_sound(adjoint)
    _, (grad,) = run(adjoint, "main_vjp", V, np.arange(6.0))
    np.testing.assert_allclose(grad, np.exp(V) * [3, 5, 7])
    tangents = relax_grad.jvp(module)
    assert relax.analysis.check_well_formed(tangents)
    _, (grad,) = run(tangents, "main_jvp", V, V)
    np.testing.assert_allclose(grad, np.tile(V * np.exp(V), 2))


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
        _, (grad,) = run(adjoint, "main_adjoint", V, tvm_ffi.Shape([2]), 3, np.array(taken))
        np.testing.assert_allclose(grad, wanted)
