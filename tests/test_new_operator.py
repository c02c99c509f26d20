"""``make new-operator`` writes skeletons that import, refuse what is not written, name what
remains, and pass the checks when they are completed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import new_operator
import pytest

ROOT = Path(__file__).parents[1]

#: Uses the skeleton of softplus_backward_data in a package that has it.
_PROGRAM = """
import tvm
from tvm import relax
from tvm.script import from_source

import relax_grad

def module_of(shape):
    grad = relax.Var("grad", relax.TensorType(shape, "float32"))
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [grad, x]):
        with bb.dataflow():
            found = bb.emit(relax.op.grad.softplus_backward_data(grad, x, beta=2.0))
            loss = bb.emit_output(relax.op.sum(found))
        bb.emit_func_output(loss)
    return bb.get()

module = module_of((2, 3))
assert "R.grad.softplus_backward_data(grad, x, beta=" in module.script().replace("float(2)", "2")
tvm.ir.assert_structural_equal(from_source(module.script()), module)

def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")

assert "softplus_backward_data: output_grad must have" in error_of(lambda: module_of((3, 2)))
found = error_of(lambda: relax_grad.value_and_grad(module))
assert found.startswith("GradientError: ") and "the rule of softplus_backward_data is not" in found
found = error_of(lambda: relax.transform.LegalizeOps()(module))
assert "the tensor expression of softplus_backward_data is not written" in found
from relax_grad.testing.samples import samples
assert len(samples("relax.grad.softplus_backward_data")) == 1
assert relax_grad.registry.classify("relax.grad.softplus_backward_data").rule == "relax_grad"
"""


def copied(folder: Path) -> Path:
    shutil.copytree(
        ROOT / "relax_grad", folder / "relax_grad", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def test_skeleton_of_a_backward_operator(tmp_path, capsys):
    root = copied(tmp_path)
    arguments = ["softplus_backward_data", "activation", "--root", str(root)]
    assert new_operator.main(arguments) == 0
    printed = capsys.readouterr().out
    written = [line.split()[1] for line in printed.splitlines() if line.startswith("written: ")]
    assert written == [
        f"relax_grad/{part}/activation.py"
        for part in ("op", "topi", "legalize", "rules/grad", "testing/samples")
    ]
    assert "let the rule of relax.nn.softplus emit it" in printed
    assert "add samples of its attributes" in printed
    assert "the fault" not in printed
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    if shutil.which("ruff"):
        command = ["ruff", "check", "--config", ROOT / "pyproject.toml", "--ignore", "I"]
        subprocess.run([*command, *(root / file for file in written)], check=True)
    # A second run changes no file.
    before = [(root / file).read_bytes() for file in written]
    assert new_operator.main(arguments) == 1
    assert (
        "op/activation.py has a function softplus_backward_data already" in capsys.readouterr().err
    )
    assert [(root / file).read_bytes() for file in written] == before


#: What a developer writes in the place of the lines that raise, by their files.
_WRITTEN = {
    "rules/unary.py": (
        'raise GradientError("the rule of cos is not written")',
        "(x,) = orig_call.args\n    return [relax.op.negative(output_grad * relax.op.sin(x))]",
    ),
    "topi/activation.py": (
        'raise NotImplementedError("the tensor expression of softplus_backward_data is not '
        'written")',
        "def element(*i):\n"
        "        return output_grad(*i) / (1 + te.exp(data(*i) * -beta))\n\n"
        "    return te.compute(data.shape, element)",
    ),
    "rules/grad/activation.py": (
        'raise GradientError("the rule of softplus_backward_data is not written")',
        "grad, data = orig_call.args\n"
        "    beta = relax.const(orig_call.attrs.beta, data.ty.dtype.dtype)\n"
        "    share = relax.op.sigmoid(beta * data)\n"
        "    slope = beta * share * relax.op.sigmoid(relax.op.negative(beta * data))\n"
        "    return [output_grad * share, output_grad * grad * slope]",
    ),
}


def test_completed_skeletons_pass_the_checks(tmp_path, capsys):
    root = copied(tmp_path)
    for arguments in (
        ["softplus_backward_data", "activation"],
        ["relax.cos", "unary", "--corrects", 'its "sign" is wrong'],
    ):
        assert new_operator.main([*arguments, "--root", str(root)]) == 0
    assert "examine whether the samples of relax.cos show the fault" in capsys.readouterr().out
    for file, (skeleton, written) in _WRITTEN.items():
        path = root / "relax_grad" / file
        assert path.read_text().count(skeleton) == 1
        path.write_text(path.read_text().replace(skeleton, written))
    process = subprocess.run(
        [sys.executable, "-m", "relax_grad", "check", "relax.cos", "grad.softplus_backward_data"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2 operators" in process.stdout, process.stdout


def test_a_rule_has_the_operands_and_the_fault():
    (rule,) = new_operator.entries_of("relax.nn.prelu", "nn/activation")
    assert "Backward form: ``[data_grad, alpha_grad]``." in rule.text
    assert "corrects" not in rule.text
    (rule,) = new_operator.entries_of("relax.exp", "unary", "it is 0")
    assert '@register_gradient("relax.exp", corrects="it is 0")' in rule.text


def test_samples_are_written_where_there_are_none(monkeypatch):
    monkeypatch.setattr(new_operator, "has_samples", lambda name: False)
    _, samples = new_operator.entries_of("relax.nn.prelu", "nn/activation")
    assert samples.path == "relax_grad/testing/samples/activation.py"
    assert '{"axis": 1}' in samples.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("relax.tan", "relax_grad has a rule of relax.tan already"),
        ("relax.floor", "relax.floor has no gradient: .*; remove it from relax_grad/rules/nondiff"),
        ("relax.cos", "TVM has a rule of relax.cos, which .* check relax.cos .*: CORRECTS='its"),
        ("softmax_backward", "relax_grad has the operator relax.grad.softmax_backward already"),
    ],
)
def test_what_is_there_is_not_written_again(name, message, capsys, tmp_path):
    assert new_operator.main([name, "unary", "--root", str(tmp_path)]) == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)
    new_operator.check_free("softplus_backward_data")


@pytest.mark.parametrize("name", ["relax.tan", "softplus_backward_data"])
def test_only_rules_of_tvm_have_a_fault(name, capsys, tmp_path):
    assert new_operator.main([name, "unary", "--corrects", "a", "--root", str(tmp_path)]) == 1
    assert re.search("already|corrects states the fault", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("relax.nn.nothing", "unary", "TVM has no operator relax.nn.nothing"),
        ("nothing_backward_data", "unary", "but TVM has no operator of that name"),
        ("softplus_backward_weight", "activation", "relax.nn.softplus has no argument weight, but"),
        ("softplus", "activation", "NAME must be an operator of TVM such as relax.nn.softplus"),
        (
            "softplus_backward_data",
            "sounds",
            "there is no module relax_grad/op/sounds.py; .*: activa",
        ),
    ],
)
def test_names_without_a_skeleton(name, family, message, tmp_path):
    (tmp_path / "relax_grad/op").mkdir(parents=True)
    (tmp_path / "relax_grad/op/activation.py").touch()
    with pytest.raises(new_operator.SkeletonError, match=message):
        list(new_operator.write(new_operator.entries_of(name, family), tmp_path))


def test_imports_join_others_of_the_module():
    source = "from __future__ import annotations\n\nfrom .a import (\n    b,\n    c,\n)\n\nd = b\n"
    imports = [(".a", "c"), (".a", "bb"), (".e", "f"), ("..g", "h as i")]
    assert new_operator.with_imports(source, imports) == (
        "from __future__ import annotations\n\nfrom .a import b, bb, c\nfrom .e import f\n"
        "from ..g import h as i\n\nd = b\n"
    )
