"""Results that a kernel has at hand besides its own, and that later calls would compute again.

The gradient of a function does not change the function: what its rules need of the forward pass, they compute
from what it was given, or returns. Where a call and what computes again what it knew are in one block, one kernel
returns both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import Op

from ._registry import Kernel, Site

#: What takes the place of a later call: takes the call, and the saved results.
Use = Callable[[relax.Call, Sequence[relax.Var]], Kernel | relax.Expr]


@dataclass(frozen=True)
class Saving:
    """A kernel that saves something.

    Attributes
    ----------
    kernel : Kernel
        Its function returns what the call returns, and then what is saved.
    types : Sequence[relax.TensorType]
        The types of what is saved.
    uses : Mapping[relax.Var, Use]
        What takes the place of the calls that later variables are bound to.
    """

    kernel: Kernel
    types: Sequence[relax.TensorType]
    uses: Mapping[relax.Var, Use]


class Calls:
    """The calls in a block, of which some come after that of a variable.

    Parameters
    ----------
    block : relax.BindingBlock
        The block.
    """

    def __init__(self, block: relax.BindingBlock):
        self._all = {
            binding.var: binding.value
            for binding in block.bindings
            if isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.Call)
        }
        self._places = {var: i for i, var in enumerate(self._all)}

    def of(self, expr: relax.Expr, op_name: str) -> relax.Call | None:
        """Return the call of an operator that a variable is bound to; None for anything else."""
        call = self._all.get(expr) if isinstance(expr, relax.Var) else None
        return call if call is not None and _is_of(call, op_name) else None

    def after(self, var: relax.Var, op_name: str) -> Iterator[tuple[relax.Var, relax.Call]]:
        """Yield the calls of an operator that come after that of a variable."""
        for other, call in self._all.items():
            if self.is_after(other, var) and _is_of(call, op_name):
                yield other, call

    def is_after(self, other: relax.Expr, var: relax.Var) -> bool:
        """Tell whether something is bound to a call that comes after that of a variable."""
        place = self._places.get(other) if isinstance(other, relax.Var) else None
        return place is not None and place > self._places[var]


_SAVINGS: dict[str, Callable[[Site, relax.Var, Calls], Saving | None]] = {}


def saving_for(*op_names: str):
    """Register what returns the saving of a call of operators, or None where nothing later needs it.

    It takes the site of the call, the variable that it is bound to, and the calls of the block. In these,
    nothing has been replaced yet.
    """

    def register(make: Callable[[Site, relax.Var, Calls], Saving | None]):
        for op_name in op_names:
            if op_name in _SAVINGS:
                raise ValueError(f"{op_name} has a saving already, by {_SAVINGS[op_name].__name__}")
            _SAVINGS[op_name] = make
        return make

    return register


def find_saving(op_name: str, site: Site, var: relax.Var, calls: Calls) -> Saving | None:
    """Return the saving of a call, if there is one."""
    make = _SAVINGS.get(op_name)
    return None if make is None else make(site, var, calls)


def _is_of(call: relax.Call, op_name: str) -> bool:
    return isinstance(call.op, Op) and call.op.name == op_name
