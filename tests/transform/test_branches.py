"""What the branches of conditionals hold besides arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from programs import check, is_sound, run
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_grad
from relax_grad import GradientError
from relax_grad.transform import Gradient

V = np.array([0.5, -1.0, 0.25])


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
    _, (found,) = run(adjoint, "main_adjoint", V, np.array(True))
    np.testing.assert_allclose(found, np.exp(V))
    assert capfd.readouterr().out.count("taken") == 1
    is_sound(relax_grad.hvp(Module, wrt="x"))


def test_what_may_be_another_when_computed_again_is_refused():
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
        GradientError, match=r"binding 'noise': .* call it outside of the conditional"
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


def test_quantized_numbers_go_into_a_conditional_but_not_out():
    scale, zero = relax.const(0.5, "float32"), relax.const(0, "int8")

    def dequantized(bb, q):
        return bb.emit(relax.op.dequantize(q, scale, zero, axis=-1))

    def conditional(bb, condition, function):
        """A conditional both branches of which do the same."""
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
    _, (found,) = run(adjoint, "main_adjoint", V.astype("float32"), np.array(True))
    np.testing.assert_array_equal(found, np.ones(3))
    with pytest.raises(GradientError, match="conditional that quantizes; dequantize within"):
        Gradient("main")(build(False))
