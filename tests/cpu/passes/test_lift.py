"""Branch lifting: the pipeline's code for conditionals runs without a crash, whichever branch is
taken."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from dispatched import HOST
from programs import is_sound, to_numpy
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm_ffi import structural_equal

from relax_grad.ir.bindings import bindings_of
from relax_grad.transform import InlineSingleUse, LiftBranches

X = np.random.default_rng(0).uniform(-1, 1, (5, 4)).astype("float32")


@I.ir_module
class Conditionals:
    """Consecutive and nested conditionals whose branches allocate memory."""

    @R.function
    def main(
        x: R.Tensor(("n", 4), "float32"), c: R.Tensor((), "bool"), d: R.Tensor((), "bool")
    ) -> R.Tensor(("n", 4), "float32"):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        if c:
            a = R.matmul(y, R.matmul(R.permute_dims(y), x))
            if d:
                b = R.nn.softmax(a)
            else:
                b = y
            z = R.cumsum(b, axis=1)
        else:
            z = R.sin(y)
        s = R.sum(z, axis=0)
        if d:
            w = R.add(R.nn.softmax(R.cumsum(z, axis=1)), s)
        else:
            w = R.matmul(z, R.matmul(R.permute_dims(z), x))
        return w


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def wanted(x, c, d):
    y = np.exp(x)
    z = np.sin(y)
    if c:
        z = np.cumsum(softmax(y @ (y.T @ x)) if d else y, axis=1)
    return softmax(np.cumsum(z, axis=1)) + z.sum(0) if d else z @ (z.T @ x)


def compiled(module):
    return relax.VirtualMachine(tvm.compile(module, HOST, relax_pipeline="relax_grad"), tvm.cpu())


def test_each_branch():
    machine = compiled(Conditionals)
    for (c, d), rows in itertools.product(itertools.product((True, False), repeat=2), (5, 1, 40)):
        x = np.resize(X, (rows, 4)) * np.float32(0.5)
        result = machine["main"](*map(tvm.runtime.tensor, (x, np.array(c), np.array(d))))
        np.testing.assert_allclose(to_numpy(result), wanted(x, c, d), rtol=1e-4, atol=1e-5)


def test_branches_only_call():
    lifted = LiftBranches()(Conditionals)
    is_sound(lifted)
    for variable, function in lifted.functions_items():
        for binding in bindings_of(function.body):
            if isinstance(binding.value, relax.If):
                for branch in (binding.value.true_branch, binding.value.false_branch):
                    calls = [
                        b.value for b in bindings_of(branch) if isinstance(b.value, relax.Call)
                    ]
                    assert all(isinstance(call.op, tvm.ir.GlobalVar) for call in calls)
        straight = [b for b in function.body.blocks if isinstance(b, relax.DataflowBlock)]
        assert straight or variable.name_hint == "main_then"
        assert (variable.name_hint == "main") == ("global_symbol" in (function.attrs or {}))
    assert len(lifted.functions) == 6  # one branch is a variable
    tvm.ir.assert_structural_equal(LiftBranches()(lifted), lifted)
    tvm.ir.assert_structural_equal(InlineSingleUse()(lifted), lifted)


@I.ir_module
class Local:
    @R.function
    def main(x: R.Tensor((3,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((3,), "float32"):
        @R.function
        def double(y: R.Tensor((3,), "float32")) -> R.Tensor((3,), "float32"):
            z = R.add(y, y)
            return z

        if c:
            w = double(x)
        else:
            w = R.exp(x)
        return w


@I.ir_module
class Straight:
    @R.function
    def main(x: R.Tensor((3,), "float32")) -> R.Tensor((3,), "float32"):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


@pytest.mark.parametrize("module", [Local, Straight], ids=["local", "straight"])
def test_local_functions_and_straight_code_stay(module):
    assert structural_equal(LiftBranches()(module), module, map_free_vars=True)
