"""The removal of tensor functions without a call."""

from __future__ import annotations

import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_grad.cpu.passes.unused import remove_unused


@I.ir_module(check_well_formed=False)
class _Module:
    @T.prim_func(private=True)
    def unused(x: T.Buffer((4,), "float32")):
        for i in range(4):
            x[i] = T.float32(0)

    @T.prim_func(private=True)
    def helper(x: T.Buffer((4,), "float32")):
        for i in range(4):
            x[i] = T.float32(1)

    @T.prim_func
    def public(x: T.Buffer((4,), "float32")):
        for i in range(4):
            x[i] = T.float32(2)

    @T.prim_func(private=True)
    def called(x: T.Buffer((4,), "float32")):
        _Module.helper(x.data)

    @R.function
    def main() -> R.Tensor((4,), "float32"):
        with R.dataflow():
            y = R.call_tir(_Module.called, R.tuple(), out_ty=R.Tensor((4,), "float32"))
            R.output(y)
        return y


def names(mod: tvm.IRModule) -> set[str]:
    return {variable.name_hint for variable in mod.get_global_vars()}


def test_only_unused_functions_are_removed():
    """Functions that tensor functions call stay, and those that a user may call by name."""
    assert names(remove_unused(_Module)) == {"helper", "public", "called", "main"}
