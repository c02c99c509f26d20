"""ReLUs after kernels, which the kernels apply to their results.

The gradient of ReLU compares its operand with 0. The result of ReLU compares with 0 as its operand
does, NaN included: the kernels leave NaN as it is. Therefore the operand is not stored. A cast to
another floating-point dtype may be between them: ReLU and rounding
commute.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.ir import Op

from ...ir.bindings import used
from ...ir.compat import constant_value, dtype_of
from ...ir.dtypes import HALVES

_RELU = Op.get("relax.nn.relu")

_CAST, _FLOATS = Op.get("relax.astype"), ("float32", *HALVES)

_WHERE, _CLOSED = Op.get("relax.where"), Op.get("relax.less_equal")

#: The comparisons with 0 that are the same for an operand and the result of ReLU.
_COMPARISONS = (_CLOSED, Op.get("relax.greater"))


class Rectified:
    """The tensors in a dataflow block that are only used by ReLU and by comparisons with 0, perhaps
    after casts.

    ReLU is also the selection of 0 where a tensor is 0 or less, as imported models have it. A
    kernel may store ReLU of a tensor in its place; then the call of ReLU returns its operand.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    """

    def __init__(self, block: relax.DataflowBlock):
        self._relus: dict[relax.Expr, list[tuple[relax.Var, relax.Expr]]] = {}
        self._others: set[relax.Var] = set()
        self._elements: dict[relax.Var, list[relax.Var]] = {}
        self._casts: dict[relax.Expr, list[relax.Var]] = {}
        self._done: dict[relax.Var, relax.Expr] = {}
        closed: dict[relax.Expr, relax.Expr] = {}
        for binding in block.bindings[:]:
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
                if value.index == 0:
                    self._elements.setdefault(value.tuple_value, []).append(binding.var)
            elif (operand := _rectified(value, closed)) is not None:
                self._relus.setdefault(operand, []).append((binding.var, value))
            elif _is_cast(value):
                self._casts.setdefault(value.args[0], []).append(binding.var)
            elif not _is_comparison(value):
                self._others.update(used(value))
            elif value.op == _CLOSED:
                closed[binding.var] = value.args[0]

    def takes(self, var: relax.Var | None) -> bool:
        """Tell whether a kernel may store ReLU of the tensor that a variable is bound to; of a
        tuple, ReLU of its first element."""
        if not isinstance(var, relax.DataflowVar) or var in self._others:
            return False
        if not isinstance(var.ty, relax.TupleType):
            casts = self._casts.get(var, [])
            return all(map(self.takes, casts)) if casts else var in self._relus
        elements = self._elements.get(var, [])
        return len(elements) == 1 and self.takes(elements[0])

    def mark(self, var: relax.Var) -> None:
        """Note that a kernel stores ReLU of what a variable is bound to."""
        tensors = self._elements[var] if isinstance(var.ty, relax.TupleType) else [var]
        for tensor in tensors:
            self._done.update(self._relus.get(tensor, ()))
            for cast in self._casts.get(tensor, ()):
                self.mark(cast)

    def has(self, var: relax.Var | None, call: relax.Call) -> bool:
        """Tell whether a call is the ReLU that a variable is bound to and that a kernel
        computes."""
        relu = None if var is None else self._done.get(var)
        return relu is not None and relu.same_as(call)


def _rectified(value: relax.Expr, closed: Mapping[relax.Expr, relax.Expr]) -> relax.Expr | None:
    """Return the tensor that a value is ReLU of, or None.

    Parameters
    ----------
    value : relax.Expr
        The value.
    closed : Mapping[relax.Expr, relax.Expr]
        The tensors whose elements are 0 or less where a variable is true.
    """
    if not isinstance(value, relax.Call):
        return None
    if value.op == _RELU:
        return value.args[0]
    if value.op != _WHERE or not _is_zero(value.args[1]):
        return None
    mask, _, tensor = value.args
    source = closed.get(mask)
    return tensor if source is not None and source.same_as(tensor) else None


def _is_cast(value: relax.Expr) -> bool:
    """Tell whether a value is a tensor in another floating-point dtype."""
    return (
        isinstance(value, relax.Call)
        and value.op == _CAST
        and dtype_of(value.ty) in _FLOATS
        and dtype_of(value.args[0].ty) in _FLOATS
    )


def _is_comparison(value: relax.Expr) -> bool:
    """Tell whether a value compares a tensor with 0."""
    if not isinstance(value, relax.Call) or value.op not in _COMPARISONS:
        return False
    return _is_zero(value.args[1])


def _is_zero(expr: relax.Expr) -> bool:
    """Tell whether an expression is the constant 0, a scalar."""
    value = constant_value(expr)
    return value is not None and value.ndim == 0 and not value.any()
