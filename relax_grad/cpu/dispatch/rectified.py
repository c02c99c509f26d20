"""ReLUs behind kernels, which the kernels apply to their results.

The gradient of ReLU compares its operand with 0. The result of ReLU compares with 0 as its operand
does, NaN included: the kernels leave NaN as it is. Therefore the operand is not stored.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

from ...ir.bindings import used
from ...ir.compat import constant_value

_RELU = Op.get("relax.nn.relu")

#: The comparisons with 0 that are the same for an operand and the result of ReLU.
_COMPARISONS = (Op.get("relax.less_equal"), Op.get("relax.greater"))


class Rectified:
    """The tensors in a dataflow block that are only used by ReLU and by comparisons with 0.

    A kernel may store ReLU of such a tensor in its place; then the call of ReLU returns its
    operand.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    """

    def __init__(self, block: relax.DataflowBlock):
        self._relus: dict[relax.Var, list[relax.Var]] = {}
        self._others: set[relax.Var] = set()
        self._elements: dict[relax.Var, list[relax.Var]] = {}
        self._done: set[relax.Var] = set()
        for binding in block.bindings[:]:
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
                if value.index == 0:
                    self._elements.setdefault(value.tuple_value, []).append(binding.var)
            elif isinstance(value, relax.Call) and value.op == _RELU:
                self._relus.setdefault(value.args[0], []).append(binding.var)
            elif not _is_comparison(value):
                self._others.update(used(value))

    def takes(self, var: relax.Var | None) -> bool:
        """Tell whether a kernel may store ReLU of the tensor that a variable is bound to; of a
        tuple, that of its first element."""
        if not isinstance(var, relax.DataflowVar) or var in self._others:
            return False
        if not isinstance(var.ty, relax.TupleType):
            return len(self._relus.get(var, ())) > 0
        elements = self._elements.get(var, [])
        return len(elements) == 1 and self.takes(elements[0])

    def mark(self, var: relax.Var) -> None:
        """Note that a kernel stores ReLU of what a variable is bound to."""
        tensors = self._elements[var] if isinstance(var.ty, relax.TupleType) else [var]
        for tensor in tensors:
            self._done.update(self._relus[tensor])

    def has(self, var: relax.Var | None) -> bool:
        """Tell whether a variable is bound to a call of ReLU that a kernel computes."""
        return var in self._done


def _is_comparison(value: relax.Expr) -> bool:
    """Tell whether a value compares a tensor with 0."""
    if not isinstance(value, relax.Call) or value.op not in _COMPARISONS:
        return False
    limit = constant_value(value.args[1])
    return limit is not None and limit.size == 1 and not limit.any()
