"""Conditionals: the adjoint of the taken branch, and the contents of branches."""

from __future__ import annotations

import numpy as np
import pytest
from programs import check, is_sound, run
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from versions import NESTED_SYMBOLIC_CONDITIONALS

import relax_grad
from relax_grad import GradientError, missing_gradients
from relax_grad.transform import Gradient

V = np.array([0.5, -1.0, 0.25])
X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


@I.ir_module
class Branches:
    @R.function
    def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
        y: R.Tensor((3, 4), "float64") = R.multiply(x, x)
        if c:
            z = R.add(y, y)
        else:
            e = R.exp(y)
            z = R.multiply(e, x)
        s: R.Tensor((), "float64") = R.sum(z)
        return s


@pytest.mark.parametrize("taken", [True, False])
def test_the_branch_that_is_taken(taken):
    condition = np.array(taken)
    check(Branches, X, condition)
    first = Gradient("main")(Branches)
    second = Gradient("main_adjoint", [first["main_adjoint"].params[0]], (1, 0), cotangents=True)(
        first
    )
    is_sound(second)
    _, (grad,) = run(second, "main_adjoint_adjoint", X, condition, np.ones_like(X))
    e = np.exp(X * X)
    wanted = 4 * np.ones_like(X) if taken else e * (6 * X + 4 * X**3)
    np.testing.assert_allclose(grad, wanted, rtol=1e-12)


def test_nested_and_consecutive_conditionals():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool"), d: R.Tensor((), "bool")):
            if c:
                if d:
                    y = R.exp(x)
                else:
                    y = R.sin(x)
            else:
                y = R.multiply(x, x)
            if d:
                z = R.multiply(y, x)
            else:
                z = x
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    for c in (True, False):
        for d in (True, False):
            _, (grad,) = run(adjoint, "main_adjoint", X, np.array(c), np.array(d))
            y, dy = (np.exp(X), np.exp(X)) if c else (X * X, 2 * X)
            np.testing.assert_allclose(grad, y + X * dy if d else np.ones_like(X), rtol=1e-12)


def test_a_conditional_over_symbolic_shapes():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float64"), c: R.Tensor((), "bool")):
            n = T.int64()
            y: R.Tensor((n * 4,), "float64") = R.reshape(x, R.shape([n * 4]))
            if c:
                z = R.multiply(y, y)
            else:
                z = R.exp(y)
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    for taken in (True, False):
        check(Module, X, np.array(taken))


def test_symbolic_extents_that_only_the_branch_of_a_conditional_uses():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float64"), y: R.Tensor((4,), "float64"), c: R.Tensor((), "bool")
        ):
            n = T.int64()
            if c:
                z: R.Tensor((n, 4), "float64") = R.broadcast_to(y, R.shape([n, 4]))
            else:
                z: R.Tensor((n, 4), "float64") = R.sin(x)
            s: R.Tensor((), "float64") = R.sum(R.multiply(z, z))
            return s

    assert "ndim=" not in Gradient("main")(Module).script()
    for taken in (True, False):
        check(Module, X, X[0], np.array(taken), at=(0, 1))


def test_an_element_of_a_tuple_that_is_used_before_and_after_a_conditional():
    """ConvertToDataflow replaces the element by the field of the tuple, but does not output that
    field."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            with R.dataflow():
                y = R.exp(x)
                t = (c, y)
                u = t[1]
                R.output(t, u)
            if c:
                z = R.sin(x)
            else:
                z = R.cos(x)
            with R.dataflow():
                w = R.multiply(t[1], z)
                s = R.sum(w)
                R.output(s)
            return s

    check(Module, X, np.array(True))


def test_match_cast_of_an_element_beside_a_conditional():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            parts = R.split(x, 2, axis=1)
            part = R.match_cast(parts[1], R.Tensor((3, 2), "float64"))
            if c:
                y = R.exp(part)
            else:
                y = R.sin(part)
            s = R.sum(y)
            return s

    check(Module, X, np.array(True))


def test_a_conditional_between_checkpoints():
    """The recomputation does not repeat the conditional. It contains no match_cast to a known
    type."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            y = R.grad.start_checkpoint(x)
            z = R.exp(y)
            if c:
                e = R.match_cast(R.multiply(z, z), R.Tensor((3, 4), "float64"))
                w = R.sin(e)
            else:
                w = R.multiply(z, y)
            a = R.match_cast(R.multiply(w, z), R.Tensor((3, 4), "float64"))
            b = R.grad.end_checkpoint(R.multiply(a, w))
            s = R.sum(R.tanh(b))
            return s

    def elements(x, taken):
        z = np.exp(x)
        w = np.sin(z * z) if taken else z * x
        return np.tanh(w * z * w)

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    del adjoint["main"]  # compiled alone, it crashes in TVM's memory planning
    assert "match_cast" not in adjoint.script()
    for taken in (True, False):
        _, (grad,) = run(adjoint, "main_adjoint", X / 4, np.array(taken))
        wanted = elements(X / 4 + 1e-30j, taken).imag / 1e-30
        np.testing.assert_allclose(grad, wanted, rtol=1e-10)


def test_unused_elements_of_tuples_need_no_gradient():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            if c:
                u = R.call_pure_packed("mystery", x, ty_args=R.Tensor((3, 4), "float64"))
                r = (R.exp(x), (u, x))
            else:
                r = (x, (x, x))
            other = r
            a: R.Tensor((3, 4), "float64") = other[0]
            s: R.Tensor((), "float64") = R.sum(a)
            return s

    assert missing_gradients(Module, "main") == []
    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    assert "R.exp" in adjoint.script()


def test_unused_results_of_a_branch_take_no_gradient():
    """A zero cotangent would turn non-finite values into NaN: here, powers of negative numbers."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool")):
            power: R.Tensor((3,), "float64") = R.power(R.subtract(x, R.const(9.0, "float64")), x)
            if c:
                _ = R.exp(power)
                y = (R.sin(x), power)
            else:
                y = (x, x)
            first: R.Tensor((3,), "float64") = y[0]
            s: R.Tensor((), "float64") = R.sum(first)
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    for taken, wanted in ((True, np.cos(V)), (False, np.ones_like(V))):
        _, (grad,) = run(adjoint, "main_adjoint", V, np.array(taken))
        np.testing.assert_allclose(grad, wanted)


def test_effects_happen_once(capfd):
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool")):
            if c:
                _ = R.print(format="taken")
                y = R.exp(x)
            else:
                y = R.sin(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    _, (grad,) = run(adjoint, "main_adjoint", V, np.array(True))
    np.testing.assert_allclose(grad, np.exp(V))
    assert capfd.readouterr().out.count("taken") == 1
    is_sound(relax_grad.hvp(Module, wrt="x"))


def test_impure_calls_in_a_branch_are_refused():
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool")):
            if c:
                noise = R.call_packed("noise", ty_args=R.Tensor((3,), "float64"))
                y = R.multiply(x, noise)
            else:
                y = x
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    with pytest.raises(
        GradientError, match=r"binding 'noise': .* move the call out of the conditional"
    ):
        Gradient("main")(Module)


def test_a_conditional_within_a_checkpointed_stretch():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool")):
            start = R.grad.start_checkpoint(x)
            y = R.exp(start)
            if c:
                z = R.multiply(y, y)
            else:
                z = R.sin(y)
            w = R.multiply(R.tanh(z), z)
            end = R.grad.end_checkpoint(w)
            s: R.Tensor((), "float64") = R.sum(end)
            return s

    for taken in (True, False):
        check(Module, V, np.array(taken))
    assert Gradient("main")(Module)["main_adjoint"].script().count("R.tanh") == 2


def test_a_checkpointed_stretch_within_a_branch():
    """The adjoint computes a branch again as a whole; the marks change nothing."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool")):
            if c:
                start = R.grad.start_checkpoint(R.exp(x))
                y = R.multiply(R.tanh(start), start)
                z = R.multiply(R.grad.end_checkpoint(y), x)
            else:
                z = R.sin(x)
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    for taken in (True, False):
        check(Module, V, np.array(taken))


def test_quantized_numbers_go_into_a_conditional_but_not_out():
    scale, zero = relax.const(0.5, "float32"), relax.const(0, "int8")

    def dequantized(bb, q):
        return bb.emit(relax.op.dequantize(q, scale, zero, axis=-1))

    def conditional(bb, condition, function):
        """Return a conditional whose two branches do the same."""
        branches = []
        for _ in range(2):
            bb._begin_binding_block()
            result = function()
            branches.append(relax.SeqExpr([bb._end_block()], result))
        return bb.emit(relax.If(condition, *branches))

    def build(inside):
        x = relax.Var("x", relax.TensorType((3,), "float32"))
        c = relax.Var("c", relax.TensorType((), "bool"))
        bb = relax.BlockBuilder()
        with bb.function("main", [x, c]):

            def quantized():
                return bb.emit(relax.op.quantize(x, scale, zero, axis=-1, out_dtype="int8"))

            if inside:
                pair = bb.emit(relax.Tuple([quantized(), x]))
                q = bb.emit(relax.TupleGetItem(pair, 0))
                y = conditional(bb, c, lambda: dequantized(bb, q))
            else:
                y = dequantized(bb, conditional(bb, c, quantized))
            bb.emit_func_output(bb.emit(relax.op.sum(y)))
        return bb.get()

    adjoint = Gradient("main")(build(True))
    assert relax.analysis.check_well_formed(adjoint)
    _, (grad,) = run(adjoint, "main_adjoint", V.astype("float32"), np.array(True))
    np.testing.assert_array_equal(grad, np.ones(3))
    with pytest.raises(GradientError, match="conditional that quantizes; dequantize within"):
        Gradient("main")(build(False))


def test_a_tuple_that_holds_more_than_floats_in_two_conditionals():
    """The adjoint branches' results for the other elements are not added: TVM adds neither booleans
    nor shapes."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3,), "float64"), c: R.Tensor((), "bool"), i: R.Tensor((), "int64")):
            y = R.multiply(x, x)
            held = (y, (c, i), R.shape([3]))
            if c:
                z = R.exp(held[0])
            else:
                z = held[0]
            other = held[1]
            if other[0]:
                u = R.multiply(z, held[0])
            else:
                u = R.add(z, held[0])
            s: R.Tensor((), "float64") = R.sum(u)
            return s

    adjoint = Gradient("main", "x")(Module)
    is_sound(adjoint)
    assert '"bool") = R.add' not in adjoint.script()
    for taken in (True, False):
        _, (grad,) = run(adjoint, "main_adjoint", V, np.array(taken), np.array(7))
        y = V * V
        wanted = 2 * V * (np.exp(y) * (1 + y) if taken else 2.0)
        np.testing.assert_allclose(grad, wanted, rtol=1e-12)


@NESTED_SYMBOLIC_CONDITIONALS
def test_unchanged_values_in_nested_symbolic_conditionals():
    """Copied branches keep the extents of the function. Otherwise their zeros would not compile."""

    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor((2, "n", 3), "float64"),
            y: R.Tensor((2, 3), "float64"),
            c: R.Tensor((), "bool"),
        ):
            n = T.int64()
            if c:
                if c:
                    v = x
                else:
                    v = x
                d = R.greater(R.sum(y), R.const(0.0, "float64"))
                if d:
                    w = x
                else:
                    w = v
                z = w
            else:
                z = x
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    adjoint = Gradient("main", "x")(Module)
    is_sound(adjoint)
    x, y = np.ones((2, 5, 3)), np.ones((2, 3))
    for sign in (1, -1):
        _, (grad,) = run(adjoint, "main_adjoint", x, sign * y, np.array(True))
        np.testing.assert_array_equal(grad, x)
