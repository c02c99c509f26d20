"""Classification of every operator of the running TVM, and obstacles to the differentiation of a
function."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.ir import Op
from tvm.script import from_source

import relax_grad
from relax_grad import registry
from relax_grad.coverage import coverage, differentiable_arguments
from relax_grad.testing.samples import sampled_operators

#: Operators without samples, since the checker cannot run them: a separate pass lowers them, or
#: their arguments need a device, or a function of the module. tests/rules/test_base.py and
#: tests/op/test_control.py check them.
UNSAMPLED = {
    "relax.builtin.stop_lift_params",
    "relax.grad.with_backward",
    "relax.hint_on_device",
    "relax.to_vdevice",
}


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def module(params, body):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(body(bb, *params))
        bb.emit_func_output(result)
    return bb.get()


def opaque(bb, x, name):
    return bb.emit(relax.op.call_pure_packed("f", x, ty_args=x.ty), name_hint=name)


def missing(*args, **kwargs):
    return [(m.binding, m.operator) for m in relax_grad.missing_gradients(*args, **kwargs)]


def test_every_operator_is_classified():
    """The test fails for each operator that a new release of TVM adds, and names it."""
    unclassified = [
        name for name in registry.operators() if registry.classify(name).kind == "unclassified"
    ]
    assert unclassified == [], (
        "register a rule in relax_grad/rules, or the reason for having none by "
        "register_nondifferentiable in relax_grad/rules/nondifferentiable.py"
    )


def test_every_differentiable_operator_has_samples_and_an_argument_with_a_gradient():
    without = [
        item.classification.op_name
        for item in coverage()
        if item.classification.kind == "differentiable"
        and item.classification.rule != "the pass"
        and not item.arguments
    ]
    assert sorted(without) == sorted(UNSAMPLED), (
        "add samples in relax_grad/testing/samples (docs/samples.md), at least one of which "
        "gets a gradient"
    )


def test_only_differentiable_operators_have_samples():
    for name in sampled_operators():
        assert registry.classify(name).kind == "differentiable", name


def test_a_reason_is_given_exactly_where_there_is_no_gradient():
    for item in coverage():
        entry = item.classification
        assert (entry.reason is None) == (entry.kind == "differentiable"), entry
        assert not (item.arguments and entry.reason)


@pytest.mark.parametrize(
    ("op_name", "kind", "rule", "refused"),
    [
        ("relax.nn.conv2d", "differentiable", "relax_grad", False),
        ("relax.exp", "differentiable", "TVM", False),
        ("relax.grad.start_checkpoint", "differentiable", "the pass", False),
        ("relax.floor", "non-differentiable", "relax_grad", False),
        ("relax.zeros_like", "non-differentiable", "TVM", False),
        ("relax.call_dps_packed", "non-differentiable", "relax_grad", True),
    ],
)
def test_classify(op_name, kind, rule, refused):
    entry = registry.classify(op_name)
    assert (entry.kind, entry.rule, entry.refused) == (kind, rule, refused)


def test_classify_refuses_unknown_operators():
    with pytest.raises(ValueError, match=r"no operator named 'relax\.conv2d'"):
        registry.classify("relax.conv2d")


def test_a_users_own_rule_is_seen():
    op = Op.get("relax.unique")
    before = op.get_attr("FPrimalGradient")
    relax.op.register_gradient("relax.unique", lambda *args: [], level=10)
    try:
        entry = registry.classify("relax.unique")
        assert (entry.kind, entry.rule) == ("differentiable", "user")
        x = tensor("x", 4)
        mod = module([x], lambda bb, x: relax.op.sum(bb.emit(relax.op.unique(x))))
        assert missing(mod, "main") == []
    finally:
        op.reset_attr("FPrimalGradient")
        op.set_attr("FPrimalGradient", before, 9)
    assert registry.classify("relax.unique").rule == "relax_grad"


def test_an_operator_without_samples_has_no_known_arguments():
    assert differentiable_arguments("relax.argmax") == ()


def test_without_the_rules_of_relax_grad():
    """TVM's own rules fail at some samples, and many operators have no rule."""
    relax_grad.uninstall()
    try:
        by_name = {item.classification.op_name: item for item in coverage()}
        assert by_name["relax.nn.conv2d"].classification.rule == "TVM"
        assert by_name["relax.nn.conv2d"].arguments == ("data", "weight")
        assert by_name["relax.tile"].arguments == differentiable_arguments("relax.tile") == ()
    finally:
        relax_grad.install()
    assert differentiable_arguments("relax.tile") == ("data",)


def test_missing_gradients_are_all_named_in_order():
    def body(bb, x):
        first = opaque(bb, x, "first")
        second = bb.emit(relax.op.unique(bb.emit(relax.op.exp(first))), name_hint="second")
        return relax.op.sum(second)

    mod = module([tensor("x", 4)], body)
    assert missing(mod, "main") == [("first", "relax.call_pure_packed"), ("second", "relax.unique")]
    for item in relax_grad.missing_gradients(mod, "main"):
        assert item.reason
        assert item.binding in str(item)
        assert item.operator in str(item)


def test_operators_off_the_path_are_not_missing():
    def body(bb, x, mask):
        unused = opaque(bb, x, "unused")
        bb.emit(relax.op.exp(unused))
        of_mask = opaque(bb, mask, "of_mask")
        index = bb.emit(relax.op.argmax(x))
        rounded = bb.emit(relax.op.floor(opaque(bb, x, "behind_a_constant")))
        scaled = bb.emit(relax.op.multiply(x, of_mask))
        scaled = bb.emit(relax.op.multiply(scaled, rounded))
        return relax.op.sum(bb.emit(relax.op.take(scaled, index)))

    x, mask = tensor("x", 4), tensor("mask", 4)
    mod = module([x, mask], body)
    assert missing(mod, "main", "x") == []
    assert missing(mod, "main", [mod["main"].params[0]]) == []
    assert missing(mod, "main", ["mask"]) == [("of_mask", "relax.call_pure_packed")]
    assert missing(mod, "main") == [("of_mask", "relax.call_pure_packed")]


def test_a_target_within_a_tuple():
    x = tensor("x", 4)
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(x))
            other = bb.emit_output(relax.op.sum(opaque(bb, x, "other")))
        bb.emit_func_output(relax.Tuple([loss, other]))
    assert missing(bb.get(), "main") == []
    assert missing(bb.get(), "main", target_index=1) == [("other", "relax.call_pure_packed")]
    with pytest.raises(ValueError, match="target_index: 2 is out of range"):
        relax_grad.missing_gradients(bb.get(), "main", target_index=2)


SOURCE = """
@I.ir_module
class Module:
    @R.function
    def helper(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        within = R.call_pure_packed("g", x, ty_args=(R.Tensor((4,), "float32"),))
        return within

    @R.function
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((), "float32"):
        cls = Module
        a = cls.helper(cls.helper(x))
        if c:
            d = R.call_pure_packed("f", a, ty_args=(R.Tensor((4,), "float32"),))
            b = d
        else:
            e = R.exp(a)
            b = e
        loss = R.sum(b)
        return loss
"""


def test_branches_and_calls_of_other_functions():
    mod = from_source(SOURCE)
    assert missing(mod, "main") == [
        ("within", "relax.call_pure_packed"),
        ("d", "relax.call_pure_packed"),
    ]
    assert relax_grad.missing_gradients(mod, "main", allow_zero="relax.call_pure_packed") == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("module", "main"), TypeError, "mod must be a tvm.IRModule"),
        ((None, "forward"), ValueError, "has no function 'forward'; it has main"),
        ((None, "main", "y"), ValueError, "wrt: main has no variable 'y'"),
        ((None, "main", 3), TypeError, "wrt must be variables or names of variables"),
        ((None, "main", tensor("x", 4)), ValueError, "main has no variable x"),
    ],
)
def test_bad_input(arguments, error, message):
    mod = module([tensor("x", 4)], lambda bb, x: relax.op.sum(x))
    arguments = (mod if arguments[0] is None else arguments[0], *arguments[1:])
    with pytest.raises(error, match=message):
        relax_grad.missing_gradients(*arguments)


def test_a_function_outside_of_relax_is_refused():
    bb = relax.BlockBuilder()
    x = tensor("x", 4)
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(bb.call_te(tvm.topi.exp, x))
        bb.emit_func_output(out)
    with pytest.raises(TypeError, match="exp must be a Relax function"):
        relax_grad.missing_gradients(bb.get(), "exp")
