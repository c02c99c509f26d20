"""Passes that move, forward or fold values, on functions with in-place calls."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST
from in_place import KIND, SIZE, add_to, module_of
from programs import run, to_numpy
from tvm import relax
from tvm.relax import op
from tvm.script import from_source

import relax_grad
from relax_grad.cpu import stages
from relax_grad.ir.bindings import bindings_of
from relax_grad.transform import FoldConstants, Gradient, ReorderForPeakMemory

RNG = np.random.default_rng(0)


def values():
    return [RNG.normal(size=(SIZE, SIZE)).astype("float32") for _ in range(2)]


@pytest.mark.parametrize("dataflow", [True, False])
@pytest.mark.parametrize("through_helper", [False, True])
def test_a_gradient_that_needs_an_overwritten_tensor_is_refused(through_helper, dataflow):
    """The derivative of exp is its result, which no longer exists in the backward pass."""

    def body(bb, write, x, y):
        a = bb.emit(op.exp(x), "a")
        loss = bb.emit(op.sum(a))
        return relax.Tuple([loss, write(a, y, through_helper=through_helper)])

    with pytest.raises(
        relax_grad.GradientError, match=r"the gradient needs 'a', which a call overwrites"
    ):
        Gradient("main", "x")(module_of(body, dataflow=dataflow))


def test_a_gradient_in_a_branch_that_needs_an_overwritten_tensor_is_refused():
    module = from_source("""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def add_to(A: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = A[vi, vj] + T.float32(1)

    @R.function
    def main(x: R.Tensor((4, 4), "float32"), cond: R.Tensor((), "bool")):
        cls = Module
        a = R.sin(x)
        if cond:
            s = R.sum(R.exp(a))
            t = R.call_tir_inplace(
                cls.add_to, (a,), inplace_indices=[0], out_ty=[R.Tensor((4, 4), "float32")]
            )
            c = (s, t)
        else:
            u = R.cos(a)
            s2 = R.sum(a)
            c = (s2, u)
        return c
""")
    with pytest.raises(relax_grad.GradientError, match="which a call overwrites in place"):
        Gradient("main", "x")(module)


@pytest.mark.parametrize("dataflow", [True, False])
def test_a_gradient_that_needs_no_overwritten_tensor(dataflow):
    def body(bb, write, x, y):
        a = bb.emit(op.add(x, y))
        loss = bb.emit(op.sum(bb.emit(op.multiply(bb.emit(op.sin(x)), y))))
        return relax.Tuple([loss, write(a, y)])

    module = Gradient("main")(module_of(body, dataflow=dataflow))
    x, y = values()
    (loss, total), gradients = run(module, "main_adjoint", x, y, target=HOST, pipeline="relax_grad")
    np.testing.assert_allclose(loss, (np.sin(x) * y).sum(), rtol=1e-4)
    np.testing.assert_allclose(total, x + 2 * y, rtol=1e-5)
    for grad, wanted in zip(gradients, (np.cos(x) * y, np.sin(x)), strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)


def test_an_adjoint_keeps_copies_of_overwritten_tensors():
    """The transpose of a transpose is a separate tensor, and stays one."""

    def body(bb, write, x, y):
        a = bb.emit(op.add(x, y))
        copy = bb.emit(op.permute_dims(bb.emit(op.permute_dims(a))))
        total = write(a, y)
        loss = bb.emit(op.sum(bb.emit(op.multiply(copy, copy))))
        return relax.Tuple([loss, total])

    module = Gradient("main", "x")(module_of(body))
    x, y = values()
    (loss, _), (gradient,) = run(module, "main_adjoint", x, y, target=HOST, pipeline="relax_grad")
    np.testing.assert_allclose(loss, ((x + y) ** 2).sum(), rtol=1e-4)
    np.testing.assert_allclose(gradient, 2 * (x + y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("through_helper", [False, True])
def test_a_constant_is_not_overwritten(through_helper):
    """Each call of the function must compute the tensor anew, so folding must not make it a
    constant."""

    def body(bb, write, x, y):
        ones = bb.emit(op.add(relax.const(np.ones((SIZE, SIZE), "float32")), relax.const(1.0)))
        return write(ones, x, through_helper=through_helper)

    module = module_of(body)
    legalized = relax.transform.LegalizeOps()(module)
    tvm.ir.assert_structural_equal(FoldConstants()(legalized), legalized)
    executable = tvm.compile(module, HOST, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    x, y = values()
    for _ in range(2):
        result = to_numpy(machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)))
        np.testing.assert_allclose(result, 2 + x, rtol=1e-5)


@pytest.mark.parametrize("through_helper", [False, True])
def test_bindings_stay_on_their_side_of_a_write(through_helper):
    """Reordering could free the write's other operand earlier, but would put the write before the
    read of x."""

    def body(bb, write, x, y):
        a = bb.emit(op.exp(y))
        b = bb.emit(op.sin(x))
        return relax.Tuple([b, write(x, a, through_helper=through_helper)])

    module = module_of(body)
    tvm.ir.assert_structural_equal(ReorderForPeakMemory()(module)["main"], module["main"])


def test_a_reshaped_copy_stays_a_copy():
    """Its source is overwritten, and later the copy itself."""

    def body(bb, write, x, y):
        a = bb.emit(op.add(x, y))
        b = bb.emit(op.reshape(a, (SIZE * SIZE,)))
        c = write(a, y)
        d = bb.emit(op.reshape(c, (SIZE, SIZE)))
        e = write(d, y)
        return relax.Tuple([bb.emit(op.reshape(b, (SIZE, SIZE))), c, e])

    x, y = values()
    results = run(module_of(body), "main", x, y, target=HOST, pipeline="relax_grad")
    for result, wanted in zip(results, (x + y, x + 2 * y, x + 3 * y), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


def test_other_reshapes_become_views():
    """Only a reshape whose source or copy is overwritten keeps memory of its own."""

    def body(bb, write, x, y):
        a, b = bb.emit(op.exp(x)), bb.emit(op.exp(y))
        rows = [
            bb.emit(op.reshape(row, (SIZE * SIZE,)), f"row_{i}") for i, row in enumerate((a, b))
        ]
        c = write(a, y)
        return relax.Tuple([bb.emit(op.sin(row)) for row in (*rows, c)])

    module = stages.view_reshapes(relax.transform.LegalizeOps()(module_of(body)))
    operators = {
        b.var.name: b.value.op.name for b in bindings_of(module["main"].body) if "row" in b.var.name
    }
    assert operators == {"row_0": "relax.call_tir", "row_1": "relax.reshape"}


def test_results_of_a_function_are_not_views_where_callers_write():
    """The function is called twice, so it is not inlined. It has no write itself."""
    bb = relax.BlockBuilder()
    param = relax.Var("a", KIND)
    with bb.function("flat", [param], private=True):
        with bb.dataflow():
            row = bb.emit(op.reshape(param, (SIZE * SIZE,)))
            result = bb.emit_output(relax.Tuple([row]))
        bb.emit_func_output(result)
    (flat,) = bb.get().get_global_vars()
    callee = bb.add_func(add_to, "add_to")
    x, y = relax.Var("x", KIND), relax.Var("y", KIND)
    with bb.function("main", [x, y]):
        with bb.dataflow():
            a = bb.emit(op.add(x, y))
            b = bb.emit(relax.TupleGetItem(bb.emit(relax.Call(flat, [a])), 0))
            c = bb.emit(op.call_tir_inplace(callee, relax.Tuple([a, y]), [0], KIND))
            d = bb.emit(relax.TupleGetItem(bb.emit(relax.Call(flat, [c])), 0))
            result = bb.emit_output(relax.Tuple([b, d]))
        bb.emit_func_output(result)
    x, y = values()
    b, d = run(bb.get(), "main", x, y, target=HOST, pipeline="relax_grad")
    np.testing.assert_allclose(b, (x + y).ravel(), rtol=1e-5)
    np.testing.assert_allclose(d, (x + 2 * y).ravel(), rtol=1e-5)
