"""The exceptions of the package: classes, and the sections of the page that explains them."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
import tvm
from tvm import relax

import relax_grad
from relax_grad import errors

ROOT = Path(__file__).parents[1]
CLASSES = {
    name: member
    for name, member in vars(errors).items()
    if isinstance(member, type) and issubclass(member, Exception) and hasattr(member, "page")
}
del CLASSES["_Explained"]
BASES = {
    "GradientError": ValueError,
    "GradientCheckError": AssertionError,
    "UnsupportedOperatorError": NotImplementedError,
    "NotWellFormedError": ValueError,
    "BrokenTrainerError": RuntimeError,
}

x = relax.Var("x", relax.TensorType((4,), "float32"))
y = relax.Var("y", relax.TensorType((4,), "float32"))


def module_of(value: relax.Expr) -> tvm.IRModule:
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            output = bb.emit_output(relax.op.sum(bb.emit(value)))
        bb.emit_func_output(output)
    return bb.get()


@pytest.mark.parametrize("name", BASES)
def test_classes_have_a_section(name):
    error = CLASSES[name]
    assert issubclass(error, BASES[name])
    file, _, anchor = error.page.partition("#")
    sections = re.findall(r"^## (.+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert anchor in [section.lower() for section in sections]
    assert error("a reason").args == ("a reason",)
    assert str(error("a reason")) == "a reason"


def test_all_classes_are_examined():
    assert CLASSES.keys() == BASES.keys()
    page = (ROOT / "docs/errors.md").read_text()
    assert all(re.search(rf"\b{name}`\]\(#{name.lower()}\)", page) for name in CLASSES)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_tracebacks_end_with_the_section():
    packed = module_of(relax.op.call_pure_packed("vendor.filter", x, ty_args=x.ty))
    for transform in (relax_grad.transform.Gradient("main"), relax.transform.Gradient("main")):
        with pytest.raises(relax_grad.GradientError) as raised:
            transform(packed)
        assert "vendor.filter" in str(raised.value)
        assert "docs/errors.md" not in str(raised.value)
        lines = traceback.format_exception_only(raised.value)
        assert lines[-1] == "See docs/errors.md#gradienterror of relax_grad.\n"
        assert sum("docs/errors.md" in line for line in lines) == 1


def test_the_reason_of_a_function_that_is_not_well_formed():
    wrong = module_of(relax.op.add(x, y))
    with pytest.raises(errors.NotWellFormedError, match="main is not well-formed: it uses y, def"):
        relax_grad.value_and_grad(wrong)
