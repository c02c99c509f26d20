"""Registration: levels, order relative to a user's rule, idempotence, and errors of rules."""

from __future__ import annotations

import pytest
from processes import run_python
from tvm import relax
from tvm.ir import Op

import relax_grad
from relax_grad import registry
from relax_grad.errors import GradientError
from relax_grad.ir import partials

DIFFERENTIATE = """
    import tvm
    from tvm import relax
    called = []
    def mine(orig_var, orig_call, output_grad, ctx):
        called.append(orig_call.op.name)
        return [relax.op.zeros_like(arg) for arg in orig_call.args]
    def differentiate():
        x = relax.Var("x", relax.TensorType((1, 2, 5, 5), "float32"))
        w = relax.Var("w", relax.TensorType((3, 2, 3, 3), "float32"))
        bb = relax.BlockBuilder()
        with bb.function("main", [x, w]):
            with bb.dataflow():
                y = bb.emit(relax.op.tile(relax.op.nn.conv2d(x, w), (1, 1, 2, 1)))
                loss = bb.emit_output(relax.op.sum(y))
            bb.emit_func_output(loss)
        return relax.transform.Gradient("main")(bb.get()).script()
"""


@pytest.mark.parametrize("first", ["user", "package"])
@pytest.mark.parametrize(("op", "level"), [("relax.tile", 10), ("relax.nn.conv2d", 11)])
def test_a_users_rule_wins_in_any_order(first, op, level):
    """The default level is enough where TVM has no rule. One level above the default is enough
    where TVM has one."""
    steps = [
        f"relax.op.register_gradient({op!r}, mine, level={level})",
        "import relax_grad",
    ]
    if first == "package":
        steps.reverse()
    code = (
        DIFFERENTIATE + f"\n    {steps[0]}\n    {steps[1]}\n    differentiate()\n    print(called)"
    )
    assert run_python(code) == f"[{op!r}]"


def test_import_replaces_the_stock_rule():
    code = DIFFERENTIATE + "\n    import relax_grad\n    print(differentiate())"
    script = run_python(code)
    assert "R.grad.conv2d_backward_data" in script
    assert "R.grad.conv2d_backward_weight" in script


def test_import_is_idempotent():
    code = (
        DIFFERENTIATE
        + """
    import importlib, sys
    import relax_grad
    first = differentiate()
    relax_grad.registry.install()
    importlib.reload(relax_grad)
    assert differentiate() == first
    for name in [n for n in sys.modules if n.split(".")[0] == "relax_grad"]:
        del sys.modules[name]
    import relax_grad
    assert differentiate() == first
    print("conv2d_backward_data" in first)
    """
    )
    assert run_python(code) == "True"


def test_every_declaration_is_installed_and_describes_its_correction():
    for declaration in registry.declarations():
        op = Op.get(declaration.op_name)
        assert op.get_attr(declaration.attr) is not None, declaration
        assert declaration.corrects != "", declaration


def test_corrections_are_exactly_replacements_of_stock_registrations():
    """A declaration says that it corrects TVM exactly where stock TVM registers something."""
    keys = [(d.op_name, d.attr) for d in registry.declarations()]
    code = f"""
        import tvm
        from tvm import relax
        ops = set(tvm.ir.Op.list_op_names())
        for op, attr in {keys!r}:
            if op in ops and tvm.ir.Op.get(op).get_attr(attr) is not None:
                print(op, attr)
    """
    stock = {tuple(line.split()) for line in run_python(code).splitlines()}
    corrected = {(d.op_name, d.attr) for d in registry.declarations() if d.corrects is not None}
    assert corrected == stock


def _differentiate_erf(rule):
    """Differentiate a function of one operator with a temporary rule."""
    op = Op.get("relax.erf")
    before = op.get_attr("FPrimalGradient")
    op.reset_attr("FPrimalGradient")
    op.set_attr("FPrimalGradient", partials.guarded("relax.erf", rule, quantized=False), 10)
    try:
        x = relax.Var("x", relax.TensorType((2,), "float32"))
        bb = relax.BlockBuilder()
        with bb.function("main", [x]):
            with bb.dataflow():
                y = bb.emit(relax.op.erf(x), name_hint="the_binding")
                loss = bb.emit_output(relax.op.sum(y))
            bb.emit_func_output(loss)
        return relax.transform.Gradient("main")(bb.get())
    finally:
        op.reset_attr("FPrimalGradient")
        if before is not None:
            op.set_attr("FPrimalGradient", before, 10)


@pytest.mark.parametrize("returned", [None, [], [1, 2], (), "text"])
def test_a_rule_that_returns_nonsense_is_an_error(returned):
    with pytest.raises(GradientError, match=r"relax\.erf, binding 'the_binding'.*list of 1"):
        _differentiate_erf(lambda *args: returned)


def test_a_rule_that_cannot_names_operator_binding_and_reason():
    def rule(orig_var, orig_call, output_grad, ctx):
        raise GradientError("not today")

    with pytest.raises(
        GradientError, match=r"gradient of relax\.erf, binding 'the_binding': not today"
    ):
        _differentiate_erf(rule)


def test_a_second_declaration_is_refused():
    with pytest.raises(ValueError, match=r"FPrimalGradient of relax\.nn\.conv2d is declared twice"):
        relax_grad.register_gradient("relax.nn.conv2d")(lambda *args: [])


@pytest.mark.parametrize("register", [relax_grad.register_gradient, relax_grad.register_legalize])
def test_a_declaration_that_would_have_no_effect_is_refused(register):
    """TVM's own registration has a higher level."""
    before = registry.classify("relax.exp")
    with pytest.raises(
        ValueError, match=r"of relax\.exp is registered with TVM already.*corrects="
    ):
        register("relax.exp")(lambda *args: [])
    assert registry.classify("relax.exp") == before
    if register is relax_grad.register_gradient:
        with pytest.raises(ValueError, match=r"register_gradient\('relax\.exp', rule, level=11\)"):
            register("relax.exp")(lambda *args: [])


def test_operators_with_a_rule_of_tvm_cannot_be_declared_non_differentiable():
    with pytest.raises(ValueError, match=r"of relax\.exp is registered with TVM already"):
        registry.register_nondifferentiable("relax.exp", "nothing")
    assert registry.classify("relax.exp").kind == "differentiable"


def test_a_declaration_that_corrects_takes_effect_after_the_import():
    code = """
        import relax_grad
        from tvm import relax
        from tvm.ir import Op

        @relax_grad.register_gradient("relax.exp", corrects="nothing")
        def exp(orig_var, orig_call, output_grad, ctx):
            return [output_grad]

        print(relax_grad.registry.classify("relax.exp").rule)
        relax.op.register_gradient("relax.exp", exp, level=11)
        print(relax_grad.registry.classify("relax.exp").rule)
    """
    assert run_python(code).split() == ["relax_grad", "user"]


def test_a_declaration_after_the_import_takes_effect_at_once():
    code = """
        import relax_grad, tvm
        from tvm import relax
        tvm.ir._ffi_api.RegisterOp("relax.of_a_plugin", "")

        @relax_grad.register_gradient("relax.of_a_plugin")
        def of_a_plugin(orig_var, orig_call, output_grad, ctx):
            return [output_grad]

        print(tvm.ir.Op.get("relax.of_a_plugin").get_attr("FPrimalGradient") is not None)
    """
    assert run_python(code) == "True"


def test_an_unknown_operator_is_refused():
    with pytest.raises(ValueError, match="no operator named"):
        relax_grad.register_gradient("relax.no_such_operator")(lambda *args: [])


def test_an_operator_that_this_tvm_lacks_is_passed_over_at_the_import(monkeypatch):
    monkeypatch.setattr(registry, "_ready", False)
    relax_grad.register_gradient("relax.no_such_operator")(lambda *args: [])
    try:
        registry.install()
        assert "relax.no_such_operator" not in Op.list_op_names()
    finally:
        del registry._declarations["relax.no_such_operator", "FPrimalGradient"]


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_partial_of_another_type_is_refused(change):
    def rule(orig_var, orig_call, output_grad, ctx):
        if change == "shape":
            return [relax.op.expand_dims(output_grad, [0])]
        return [relax.op.astype(output_grad, "float64")]

    with pytest.raises(GradientError, match=r"'the_binding': .*must have its type.*but it has"):
        _differentiate_erf(rule)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
def test_only_a_rule_that_says_so_gives_quantized_numbers_a_float32_partial(dtype):
    x = relax.Var("x", relax.TensorType((2,), dtype))
    grad = relax.Var("grad", relax.TensorType((2,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, grad]):
        y = bb.emit(relax.op.abs(x))
        call = bb.lookup_binding(y)

        def rule(partial, quantized=False):
            return partials.guarded("relax.abs", lambda *args: [partial], quantized)

        (partial,) = rule(grad, quantized=True)(y, call, grad, bb)
        assert partial.same_as(grad)
        with pytest.raises(GradientError, match=f'must have its type.*dtype="{dtype}".*"float32"'):
            rule(grad)(y, call, grad, bb)
        for wrong in (relax.op.astype(grad, "float64"), relax.op.expand_dims(grad, 0)):
            with pytest.raises(GradientError, match="must have its type"):
                rule(wrong, quantized=True)(y, call, grad, bb)
        bb.emit_func_output(y)


def test_stock_rules_that_nothing_corrects_stay():
    assert "relax.exp" not in [declaration.op_name for declaration in registry.declarations()]
    assert Op.get("relax.exp").get_attr("FPrimalGradient") is not None
