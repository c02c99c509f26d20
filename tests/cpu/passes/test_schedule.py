"""The pass that schedules tensor functions: which functions it schedules, and which it leaves
unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_grad
from relax_grad.cpu.passes import schedule as under_test
from relax_grad.cpu.target import host
from relax_grad.errors import ScheduleWarning
from relax_grad.transform import ScheduleLoops


@I.ir_module(s_tir=True)
class InPlace:
    @T.prim_func(private=True, s_tir=True)
    def turn(A: T.Buffer((20000,), "float32"), B: T.Buffer((20000,), "float32")):
        for i in range(20000):
            with T.sblock("turn"):
                vi = T.axis.spatial(20000, i)
                B[vi] = A[19999 - vi] + T.float32(1)

    @R.function
    def main(x: R.Tensor((20000,), "float32")):
        cls = InPlace
        with R.dataflow():
            doubled = R.add(x, x)
            turned = R.call_tir_inplace(
                cls.turn,
                (doubled, doubled),
                inplace_indices=[1],
                out_ty=[R.Tensor((20000,), "float32")],
            )
            R.output(turned)
        return turned


def is_parallel(function: tirx.PrimFunc) -> bool:
    return "T.parallel" in function.script()


def test_a_tensor_that_is_two_parameters_is_written_in_order():
    compiled = tvm.compile(InPlace, host(), relax_pipeline="relax_grad")
    x = np.arange(20000, dtype="float32")
    result = relax.VirtualMachine(compiled, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    expected = 2 * x
    for i in range(len(x)):
        expected[i] = expected[len(x) - 1 - i] + 1
    np.testing.assert_array_equal(result, expected)


def marks(module) -> set[bool]:
    """Return the values of ``noalias`` on the functions that the pipeline makes of a module."""
    with host():
        compiled = relax_grad.pipeline()(module)
    functions = [f for f in compiled.functions.values() if isinstance(f, tirx.PrimFunc)]
    return {bool(function.attrs["tirx.noalias"]) for function in functions}


def lowered(mod):
    """Return a module that calls its tensor functions as the virtual machine does."""
    passes = [relax.transform.ToNonDataflow(), relax.transform.CallTIRRewrite()]
    return tvm.transform.Sequential(passes)(mod)


def test_functions_are_parallel_but_those_with_aliases():
    separate = InPlace.clone()
    bb = relax.BlockBuilder(separate)
    x, y = (relax.Var(name, relax.TensorType((20000,), "float32")) for name in "xy")
    with bb.function("separate", [x, y]):
        kind = [relax.TensorType((20000,), "float32")]
        turn = separate.get_global_var("turn")
        bb.emit_func_output(
            bb.emit(relax.op.call_tir_inplace(turn, [x, y], inplace_indices=[1], out_ty=kind))
        )
    separate = tvm.IRModule({v: f for v, f in bb.get().functions_items() if v.name_hint != "main"})
    assert is_parallel(ScheduleLoops(host())(lowered(separate))["turn"])
    assert not is_parallel(ScheduleLoops(host())(lowered(InPlace))["turn"])
    assert marks(separate) == {True}
    assert marks(InPlace) == {False}


def test_a_function_that_the_scheduler_fails_on_runs_as_written(monkeypatch):
    def fail(function, cpu):
        raise tvm.error.InternalError("no such nest")

    monkeypatch.setattr(under_test, "schedule", fail)
    module = lowered(InPlace)
    del module["main"]
    with pytest.warns(
        ScheduleWarning, match="function turn, which runs without a schedule.*no such"
    ):
        scheduled = ScheduleLoops(host())(module)
    assert not is_parallel(scheduled["turn"])
