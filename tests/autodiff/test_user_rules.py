"""Gradients that users register: their results are held to the types of the arguments."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import tvm_ffi
from programs import build, tensor
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from relax_grad import GradientError
from relax_grad.ir import partials
from relax_grad.transform import Gradient

X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


@contextmanager
def registered(op_name, rule):
    """Register a rule with TVM in place of the present one."""
    operator, attr = Op.get(op_name), "FPrimalGradient"
    before = operator.get_attr(attr)
    operator.reset_attr(attr)
    op.register_gradient(op_name, rule)
    try:
        yield
    finally:
        operator.reset_attr(attr)
        if before is not None:
            operator.set_attr(attr, before, 10)


def raises(error):
    def rule(orig_var, orig_call, output_grad, ctx):
        raise error

    return rule


#: Invalid results of a rule for a (2, 3) tensor in float64, and the message of each refusal.
NO_PARTIALS = {
    "None": (lambda *_: None, "the rule must return a list of 1 expression.* returned None"),
    "nothing": (lambda *_: [], "the rule must return a list of 1 expression"),
    "too many": (lambda *args: [args[2]] * 2, "the rule must return a list of 1 expression"),
    "an expression": (lambda *args: args[2], "the rule must return a list of 1 expression"),
    "a number": (lambda *_: [1.0], "the rule must return expressions, but it returned 1.0"),
    "text": (lambda *_: ["x"], "the rule must return expressions, but it returned 'x'"),
    "None in a list": (lambda *_: [None], "the rule must return expressions, but it returned None"),
    "another shape": (lambda *args: [op.sum(args[2])], ".*must have its type .* but it has "),
    "another dtype": (lambda *args: [op.astype(args[2], "float32")], ".*must have its type"),
    "a tuple": (lambda *args: [relax.Tuple([args[2]])], ".*must have its type"),
    "a shape": (lambda *_: [relax.ShapeExpr([2, 3])], ".*must have its type"),
    "an expression without a type": (
        lambda *args: [op.add(args[2], relax.const([1.0] * 5, "float64"))],
        "",
    ),
    "an error": (raises(ZeroDivisionError("by zero")), "by zero"),
    "an assertion": (raises(AssertionError()), "AssertionError"),
    "an error with a reason": (raises(GradientError("not today")), "not today"),
}


@pytest.mark.parametrize("dataflow", [True, False])
@pytest.mark.parametrize("result", NO_PARTIALS)
def test_a_rule_of_a_user_is_held_to_the_type_of_its_argument(result, dataflow):
    rule, message = NO_PARTIALS[result]

    def body(bb, x):
        return op.sum(bb.emit(op.atan(x), name_hint="the_binding"))

    module = build([tensor("x", (2, 3))], body, dataflow=dataflow)
    where = r"gradient of relax\.atan, binding 'the_binding': "
    with registered("relax.atan", rule), pytest.raises(GradientError, match=where + message):
        Gradient("main")(module)


@pytest.mark.parametrize("dataflow", [True, False])
def test_a_rule_of_a_user_that_makes_up_a_variable(dataflow):
    """The variable has the right type but no definition. TVM would end in an internal error over
    it."""
    made_up = tensor("made_up", (2, 3))
    module = build([tensor("x", (2, 3))], lambda bb, x: op.sum(op.atan(x)), dataflow=dataflow)
    message = (
        "^main_adjoint would use 'made_up', which neither a binding nor a parameter defines: a "
        "gradient"
    )
    for result in (lambda *_: [made_up], lambda *args: [op.multiply(args[2], made_up)]):
        with registered("relax.atan", result), pytest.raises(GradientError, match=message):
            Gradient("main")(module)


def test_a_rule_of_a_user_that_relax_grad_registers_is_held_to_it_too():
    guarded = partials.guarded("relax.atan", lambda *args: [relax.ShapeExpr([2, 3])], False)
    module = build([tensor("x", (2, 3))], lambda bb, x: op.sum(op.atan(x)))
    message = r"^gradient of relax\.atan, binding '\w+': the gradient of an argument must"
    with registered("relax.atan", guarded), pytest.raises(GradientError, match=message):
        Gradient("main")(module)


def test_partials_of_partly_unknown_type_are_accepted():
    """The shape may be unknown, for example, or an extent may be another symbol."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")

    def of_rank(orig_var, orig_call, output_grad, ctx):
        return [
            op.call_pure_packed("f", output_grad, ty_args=relax.TensorType(None, "float64", ndim=2))
        ]

    def of_extents(orig_var, orig_call, output_grad, ctx):
        return [op.call_pure_packed("f", output_grad, ty_args=tensor("", (m, 3)).ty)]

    def of_an_object(orig_var, orig_call, output_grad, ctx):
        return [op.call_pure_packed("f", output_grad, ty_args=relax.ObjectType())]

    params = [tensor("x", (n, 3)), relax.Var("m", relax.ShapeType([m]))]
    module = build(params, lambda bb, x, _: op.sum(op.atan(x)))
    for rule in (of_rank, of_extents, of_an_object):
        with registered("relax.atan", rule):
            assert "main_adjoint" in str(Gradient("main")(module).get_global_vars())


def test_partials_of_constants_may_have_any_type():
    """TVM's own rules return a placeholder for indices and other constants."""

    def rule(orig_var, orig_call, output_grad, ctx):
        return [output_grad, output_grad]

    def body(bb, x):
        return op.sum(op.power(x, relax.const(2.0, "float64")))

    module = build([tensor("x", (2, 3))], body)
    with registered("relax.power", rule):
        assert relax.analysis.check_well_formed(Gradient("main")(module))


def test_elements_of_a_tuple_in_a_rule_of_a_user():
    def body(bb, x, y):
        return op.sum(op.concat([x, y], axis=1))

    module = build([tensor("x", (2, 3)), tensor("y", (2, 1))], body)
    part = relax.const(X[:2, :3], "float64")
    for fields in ([part], [part, part], [part, op.zeros((2, 1), "float32")]):
        with (
            registered("relax.concat", lambda *_, fields=fields: [relax.Tuple(fields)]),
            pytest.raises(GradientError, match=r"gradient of relax\.concat, .* must have"),
        ):
            Gradient("main")(module)
    right = relax.Tuple([part, op.zeros((2, 1), "float64")])
    with registered("relax.concat", lambda *_: [right]):
        assert relax.analysis.check_well_formed(Gradient("main")(module))


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (lambda *_: None, "the rule must return expressions, but it returned None"),
        (lambda *args: op.sum(args[2]), ".*must have its type"),
        (lambda *args: relax.Tuple([args[2], args[2]]), "a tuple of 1 elements .* it has 2"),
        (raises(KeyError("k")), "k"),
    ],
)
def test_a_te_gradient_is_held_to_the_type_of_its_argument(handler, message):
    from tvm import te

    name = "relax_grad_test_bad"
    tvm_ffi.register_global_func(f"tvm.relax.te_grad._register.{name}", handler, override=True)

    def square(x):
        return te.compute(x.shape, lambda *i: x(*i) * x(*i), name="square")

    def body(bb, x):
        call = bb.call_te_with_grad(square, x, te_grad_name=name)
        return op.sum(bb.emit(call, name_hint="the_binding"))

    message = f"gradient of {name}, binding 'the_binding': .*{message}"
    with pytest.raises(GradientError, match=message):
        Gradient("main")(build([tensor("x", (3, 4))], body))
