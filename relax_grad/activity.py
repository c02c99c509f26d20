"""Activity analysis: the variables of a function between the sources of a gradient and its target.

A variable is *varied* if it depends on a source by a path that a gradient can pass: floating-point
numbers, through operators that do not count as constants. It is *useful* if the target depends on
it by such a path. Gradients are needed for the variables that are both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tvm import relax
from tvm.ir import Op

from .ir.bindings import used
from .ir.compat import dtype_of
from .registry import classify

#: The operator whose results are integers that encode floating-point numbers; gradients pass
#: straight through.
_QUANTIZE = "relax.quantize"

#: The operator that passes gradients to its second argument only.
_WITH_BACKWARD = "relax.grad.with_backward"


def varied(
    bindings: Iterable[relax.Binding],
    sources: Iterable[relax.Var],
    constants: Collection[str] = (),
) -> set[relax.Var]:
    """Return the sources and the variables that depend on them.

    Parameters
    ----------
    bindings : Iterable[relax.Binding]
        The bindings in order, including bindings of branches.
    sources : Iterable[relax.Var]
        The variables to differentiate with respect to.
    constants : Collection[str]
        Operators that count as constants here.
    """
    reached = set(sources)
    is_quantized = False  # an element of a tuple may be integers that carry gradients
    for binding in bindings:
        value = binding.value
        if not passes(value, constants):
            continue
        inputs = [variable for variable in _operands(value) if variable in reached]
        if inputs and (
            _may_carry(binding.var.ty)
            or _calls(value, _QUANTIZE)
            or not all(holds_floats(variable.ty) for variable in inputs)
            or (is_quantized and isinstance(value, relax.TupleGetItem))
        ):
            reached.add(binding.var)
            is_quantized = is_quantized or _calls(value, _QUANTIZE)
    return reached


def useful(
    bindings: Sequence[relax.Binding], target: relax.Expr, constants: Collection[str] = ()
) -> set[relax.Var]:
    """Return the variables that the target depends on; arguments as for :func:`varied`."""
    needed: dict[relax.Var, set[int] | None] = {}  # elements of a tuple; None for all
    _need(needed, target, None)
    for binding in reversed(bindings):
        if binding.var in needed and passes(binding.value, constants):
            _need(needed, binding.value, needed[binding.var])
    return set(needed)


def _need(needed: dict, value: relax.Expr, elements: set[int] | None) -> None:
    """Add to ``found`` the variables from which a value, or some of its elements, are computed."""
    if isinstance(value, relax.SeqExpr):
        value = value.body
    if isinstance(value, relax.Var):
        known = needed.get(value, set())
        needed[value] = None if known is None or elements is None else known | elements
    elif isinstance(value, relax.If):
        _need(needed, value.true_branch, elements)
        _need(needed, value.false_branch, elements)
    elif isinstance(value, relax.TupleGetItem):
        _need(needed, value.tuple_value, {value.index})
    elif isinstance(value, relax.Tuple):
        for i, field in enumerate(value.fields):
            if elements is None or i in elements:
                _need(needed, field, None)
    else:
        for variable in _operands(value):
            needed[variable] = None


def _operands(value: relax.Expr) -> list[relax.Var]:
    """Return the variables that may take a gradient from a value."""
    is_operator = isinstance(value, relax.Call) and isinstance(value.op, Op)
    return used(value.args[1] if is_operator and value.op.name == _WITH_BACKWARD else value)


def passes(value: relax.Expr, constants: Collection[str] = ()) -> bool:
    """Tell whether gradients pass a value, or would pass it if its operator had a gradient."""
    if not (isinstance(value, relax.Call) and isinstance(value.op, Op)):
        return True
    if value.op.name in constants:
        return False
    classification = classify(value.op.name)
    return classification.kind != "non-differentiable" or classification.refused


def holds_floats(kind: relax.Type) -> bool:
    """Tell whether a type holds, or may hold, floating-point tensors."""
    if isinstance(kind, relax.TupleType):
        return any(map(holds_floats, kind.fields))
    if not isinstance(kind, relax.TensorType):
        return isinstance(kind, relax.ObjectType)  # its contents are unknown
    return kind.dtype is None or "float" in dtype_of(kind)


def _may_carry(kind: relax.Type) -> bool:
    """Tell whether a value of a type may depend on the sources; a function may do so by its
    captures."""
    if isinstance(kind, relax.TupleType):
        return any(map(_may_carry, kind.fields))
    return holds_floats(kind) or isinstance(kind, relax.FuncType)


def has_gradient(kind: relax.Type) -> bool:
    """Tell whether variables of a type can have a gradient; objects have none."""
    return holds_floats(kind) and not isinstance(kind, relax.ObjectType)


def _calls(value: relax.Expr, op_name: str) -> bool:
    return isinstance(value, relax.Call) and value.op == Op.get(op_name)
