"""Cases that are compiled together are checked one by one, and an error names its case."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machine_code import as_tvm_compiles
from programs import build, tensor
from tvm import relax
from wrong_rules import exp_rule, rule_of

from relax_grad.errors import GradientCheckError
from relax_grad.ir.compat import dtype_of
from relax_grad.testing import GradientCase, TorchCase, _program, check_many_gradients

X = np.array([[0.5, -1.5, 2.0], [3.0, -0.25, 1.0]])
SINE = GradientCase("relax.sin", [X], order=2)
SUM = GradientCase("relax.sum", [X], {"axis": 1}, dtypes=["float32"])


def test_reports_and_one_compilation(monkeypatch):
    compiled = []
    compile_module = _program.compile_module

    def count(module, target):
        compiled.append(module)
        return compile_module(module, target)

    monkeypatch.setattr(_program, "compile_module", count)
    narrow = GradientCase("relax.exp", [X], dtypes="bfloat16", through="relax_grad")
    symbolic = GradientCase("relax.tanh", [X.astype("float32")], symbolic={0: {0: "n"}}, order=2)
    reports = check_many_gradients([SINE, SUM, narrow, symbolic], through="tvm")
    assert [report.operator for report in reports] == [
        *("relax.sin", "relax.sum", "relax.exp", "relax.tanh")
    ]
    assert [report.order for report in reports] == [2, 1, 1, 2]
    assert all(report.comparisons for report in reports)
    assert len(compiled) == 1
    assert check_many_gradients([]) == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_wrong_rule_is_named(at):
    """Wherever the case stands among the others."""
    rule = exp_rule(lambda grad, x: relax.op.multiply(grad, relax.const(1.001, "float64")))
    cases = [SINE, SUM]
    cases.insert(at, GradientCase("relax.exp", [X]))
    with (
        rule_of("relax.exp", rule),
        pytest.raises(GradientCheckError, match=r"relax\.exp, order 1: .*x0 is wrong.*\(2, 3\)"),
    ):
        check_many_gradients(cases)


def test_a_rule_that_is_wrong_at_another_order_or_dtype():
    def of_float32(grad, x):
        if dtype_of(x.ty) != "float32":
            return grad
        return relax.op.multiply(grad, relax.const(1.01, "float32"))

    def of_the_second_order(orig_var, orig_call, output_grad, ctx):
        return [relax.op.multiply(output_grad, relax.op.grad.no_grad(orig_var))]

    exp = GradientCase("relax.exp", [X], dtypes=["float16"])
    both = [exp, GradientCase("relax.exp", [X], dtypes=["float32"])]
    with rule_of("relax.exp", exp_rule(of_float32)):
        check_many_gradients([SINE, exp])
        with pytest.raises(GradientCheckError, match=r"relax\.exp in float32, order 1"):
            check_many_gradients([*both, SUM])
    with rule_of("relax.exp", of_the_second_order):
        check_many_gradients([exp, SINE])
        with pytest.raises(GradientCheckError, match=r"relax\.exp, order 2"):
            check_many_gradients([SINE, GradientCase("relax.exp", [X], order=2)])


def test_another_function_in_pytorch(torch):
    right = TorchCase("relax.exp", [X], lambda torch, x: torch.exp(x))
    wrong = TorchCase("relax.clip", [X], lambda torch, x: x, {"min": -1.0, "max": 1.0})
    _, report = check_many_gradients([SUM, right])
    assert report.max_error < 1e-12
    assert report.comparisons == 1 + X.size
    with pytest.raises(GradientCheckError, match=r"relax\.clip: the result.*PyTorch.*'max': 1"):
        check_many_gradients([SINE, right, wrong])


@pytest.mark.parametrize(("level", "is_assembled"), [(0, True), (1, False), (None, False)])
def test_without_optimizations_machine_code_is_made_once(level, is_assembled):
    options = {"kind": "llvm"} if level is None else {"kind": "llvm", "opt-level": level}
    target = tvm.target.Target(options)
    with as_tvm_compiles():
        executable = tvm.compile(
            build([tensor("x", X.shape)], lambda bb, x: relax.op.exp(x)), target=target
        )
        before = executable.mod.imports[0].inspect_source("ll")
        _program.assemble(executable.mod, target)
    after = executable.mod.imports[0].inspect_source("ll")
    assert "module asm" not in before
    assert ("module asm" in after) == is_assembled
    machine = relax.VirtualMachine(executable, tvm.cpu())
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(X)).numpy(), np.exp(X))
