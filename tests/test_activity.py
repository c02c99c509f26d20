"""Variables on the path from the inputs of a gradient to its target."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_grad.activity import has_gradient, holds_floats, passes, useful, varied
from relax_grad.ir.bindings import bindings_of


@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor((3,), "float32"), y: R.Tensor((3,), "float32"), c: R.Tensor((), "bool")
    ) -> R.Tensor((), "float32"):
        both = (x, R.exp(y))
        whole = R.floor(x)
        if c:
            _spare = R.sin(x)
            chosen = R.cos(both[0])
        else:
            chosen = R.multiply(y, whole)
        loss: R.Tensor((), "float32") = R.sum(chosen)
        return loss


BODY = Module["main"].body
BINDINGS = list(bindings_of(BODY))
X, Y, C = Module["main"].params


def names(variables):
    """Return the names of variables that the program above defines.

    TVM adds other variables so that each binding holds one operator.
    """
    written = {"x", "y", "both", "whole", "_spare", "chosen", "loss"}
    return {variable.name for variable in variables} & written


def test_bindings_of_branches_come_before_their_conditional():
    order = [binding.var.name for binding in BINDINGS]
    assert order.index("_spare") < order.index("loss")
    assert sum(isinstance(binding.value, relax.If) for binding in BINDINGS) == 1


def test_variables_that_depend_on_the_sources():
    assert names(varied(BINDINGS, [X])) == {"x", "both", "_spare", "chosen", "loss"}
    assert names(varied(BINDINGS, [Y])) == {"y", "both", "chosen", "loss"}
    assert names(varied(BINDINGS, [X], {"relax.sum"})) == {"x", "both", "_spare", "chosen"}


def test_variables_that_the_target_depends_on():
    variables = useful(BINDINGS, BODY.body)
    assert {X, Y} <= variables
    assert names(variables) == {"x", "y", "both", "whole", "chosen", "loss"}
    assert names(useful(BINDINGS, BODY.body, {"relax.sum"})) == {"loss"}


def test_only_elements_that_are_used_of_a_tuple():
    bindings = [b for b in BINDINGS if not isinstance(b.value, relax.If)]
    both = next(b.var for b in bindings if b.var.name == "both")
    first = useful(bindings, relax.TupleGetItem(both, 0))
    assert X in first
    assert Y not in first


@pytest.mark.parametrize(
    ("kind", "holds", "has"),
    [
        (relax.TensorType((2,), "float32"), True, True),
        (relax.TensorType((2,), "bfloat16"), True, True),
        (relax.TensorType(None, None), True, True),
        (relax.TensorType((2,), "int64"), False, False),
        (relax.TupleType([relax.TensorType((2,), "int64")]), False, False),
        (
            relax.TupleType([relax.TensorType((2,), "int64"), relax.TensorType((2,), "float64")]),
            True,
            True,
        ),
        (relax.ShapeType([2]), False, False),
        (relax.ObjectType(), True, False),
    ],
)
def test_types_that_hold_floats_and_have_gradients(kind, holds, has):
    assert (holds_floats(kind), has_gradient(kind)) == (holds, has)


def test_operators_that_pass_gradients():
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    assert passes(relax.op.exp(x))
    assert not passes(relax.op.exp(x), {"relax.exp"})
    assert not passes(relax.op.floor(x))
    assert passes(relax.op.unique(x))  # its gradient is refused, so it is not a constant
    assert passes(relax.Tuple([x]))
