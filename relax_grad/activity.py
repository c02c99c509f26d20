"""Activity analysis: the variables of a function between the sources of a gradient and its target.

A variable is *varied* if it depends on a source by a path that a gradient can pass: floating-point numbers,
through operators that do not count as constants. It is *useful* if the target depends on it by such a path.
Gradients are needed for the variables that are both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tvm import relax
from tvm.ir import Op

from .ir.bindings import used
from .ir.compat import dtype_of
from .registry import classify

#: The operator whose results are integers that encode floating-point numbers; gradients pass straight through.
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
        The bindings in order, including those of branches.
    sources : Iterable[relax.Var]
        The variables to differentiate with respect to.
    constants : Collection[str]
        Operators that count as constants here.
    """
    found = set(sources)
    is_quantized = False  # an element of a tuple may be integers that carry gradients
    for binding in bindings:
        value = binding.value
        if not passes(value, constants):
            continue
        inputs = [variable for variable in _operands(value) if variable in found]
        if inputs and (
            _may_carry(binding.var.ty)
            or _calls(value, _QUANTIZE)
            or not all(holds_floats(variable.ty) for variable in inputs)
            or (is_quantized and isinstance(value, relax.TupleGetItem))
        ):
            found.add(binding.var)
            is_quantized = is_quantized or _calls(value, _QUANTIZE)
    return found


def useful(
    bindings: Sequence[relax.Binding], target: relax.Expr, constants: Collection[str] = ()
) -> set[relax.Var]:
    """Return the variables that the target depends on; arguments as for :func:`varied`."""
    found: dict[relax.Var, set[int] | None] = {}  # elements of a tuple; None for all
    _need(found, target, None)
    for binding in reversed(bindings):
        if binding.var in found and passes(binding.value, constants):
            _need(found, binding.value, found[binding.var])
    return set(found)


def _need(found: dict, value: relax.Expr, elements: set[int] | None) -> None:
    """Add to ``found`` the variables from which a value, or some of its elements, are computed."""
    if isinstance(value, relax.SeqExpr):
        value = value.body
    if isinstance(value, relax.Var):
        known = found.get(value, set())
        found[value] = None if known is None or elements is None else known | elements
    elif isinstance(value, relax.If):
        _need(found, value.true_branch, elements)
        _need(found, value.false_branch, elements)
    elif isinstance(value, relax.TupleGetItem):
        _need(found, value.tuple_value, {value.index})
    elif isinstance(value, relax.Tuple):
        for i, field in enumerate(value.fields):
            if elements is None or i in elements:
                _need(found, field, None)
    else:
        for variable in _operands(value):
            found[variable] = None


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
    found = classify(value.op.name)
    return found.kind != "non-differentiable" or found.refused


def holds_floats(found: relax.Type) -> bool:
    """Tell whether a type holds, or may hold, floating-point tensors."""
    if isinstance(found, relax.TupleType):
        return any(map(holds_floats, found.fields))
    if not isinstance(found, relax.TensorType):
        return isinstance(found, relax.ObjectType)  # its contents are unknown
    return found.dtype is None or "float" in dtype_of(found)


def _may_carry(found: relax.Type) -> bool:
    """Tell whether a value of a type may depend on the sources; a function may do so by its captures."""
    if isinstance(found, relax.TupleType):
        return any(map(_may_carry, found.fields))
    return holds_floats(found) or isinstance(found, relax.FuncType)


def has_gradient(found: relax.Type) -> bool:
    """Tell whether variables of a type can have a gradient; objects have none."""
    return holds_floats(found) and not isinstance(found, relax.ObjectType)


def _calls(value: relax.Expr, op_name: str) -> bool:
    return isinstance(value, relax.Call) and value.op == Op.get(op_name)
