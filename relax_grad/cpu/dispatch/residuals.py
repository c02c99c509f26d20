"""Intermediate results that a kernel saves for later calls, which would otherwise recompute them.

Differentiation does not change the forward pass: its rules recompute intermediate results from the
operands or the results of the forward call. If a call and its recomputation are in one block, one
kernel returns the result of the call and the intermediate result.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.ir import Op

from ...ir.aliases import Memory
from ...ir.bindings import used
from .registry import CallSite, Kernel

#: Makes the replacement of a later call: takes the call and the saved results.
Replacement = Callable[[relax.Call, Sequence[relax.Var]], Kernel | relax.Expr]

#: The description of a call: a key, and the results that a kernel of an earlier call with this key
#: can save.
Description = tuple[Hashable, tuple[relax.Var, ...]]


@dataclass(frozen=True)
class ResidualKernel:
    """A kernel that also returns saved results.

    Attributes
    ----------
    kernel : Kernel
        Its function returns the results of the call, then the saved results.
    types : Sequence[relax.TensorType]
        The types of the saved results.
    uses : Mapping[relax.Var, Replacement]
        The variables whose calls are replaced, each with the function that makes the replacement.
        For a variable that is bound before the kernel, this is one of the saved results.
    """

    kernel: Kernel
    types: Sequence[relax.TensorType]
    uses: Mapping[relax.Var, Replacement]


class BlockCalls:
    """The calls in a block, and the candidates for replacement by a kernel of an earlier call.

    A call is no candidate if an operand or the result is overwritten anywhere in the function,
    because such a call must stay at its place.

    Parameters
    ----------
    block : relax.BindingBlock
        The block.
    memory : Memory
        The memory of the function that the block belongs to.
    """

    def __init__(self, block: relax.BindingBlock, memory: Memory):
        self._bindings = block.bindings[:]
        self._all = {
            binding.var: binding.value
            for binding in self._bindings
            if isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.Call)
        }
        self._places = {var: i for i, var in enumerate(self._all)}
        self._memory = memory
        self._of_operator: dict[str, list[relax.Var]] = {}
        for var, call in self._all.items():
            if isinstance(call.op, Op) and self._is_settled(var):
                self._of_operator.setdefault(call.op.name, []).append(var)
        self._indices: dict[tuple[str, Describe, bool], dict[Hashable, deque]] = {}
        self._taken: set[relax.Var] = set()

    def original(self, var: relax.Var) -> relax.Call | None:
        """Return the call that a variable is bound to before any replacement; None if it is bound
        to no call."""
        return self._all.get(var)

    def of(self, expr: relax.Expr, op_name: str) -> relax.Call | None:
        """Return the movable call of an operator that a variable is bound to, or None."""
        call = self._all.get(expr) if isinstance(expr, relax.Var) else None
        is_found = call is not None and _is_of(call, op_name) and self._is_settled(expr)
        return call if is_found else None

    def precedes(self, var: relax.Var, other: relax.Var) -> bool:
        """Tell whether a variable is bound to a call before another one."""
        return self._places[var] < self._places[other]

    def take(
        self,
        var: relax.Var,
        op_name: str,
        describe: Describe,
        wanted: Hashable,
        may_precede: bool = False,
    ) -> tuple[relax.Var, ...] | None:
        """Take and return the first variables with a key that are all computed after a variable, or
        None.

        Each variable is taken once. Each call is described once. It is also skipped at most once,
        because residual kernels are searched in the order of the block. The total time of all calls
        of this function is linear in the calls of the block.

        Parameters
        ----------
        var : relax.Var
            The variable.
        op_name : str
            The operator of the described calls.
        describe : Callable
            Takes this object, a variable and the call that it is bound to. Returns a key and the
            variables that a residual kernel with this key can replace; None if there are no such
            variables.
        wanted : Hashable
            The key.
        may_precede : bool
            Also take variables that are computed before the variable and used only after it.
        """
        candidates = self._index(op_name, describe, may_precede).get(wanted, ())
        while candidates:
            first, variables = candidates.popleft()
            if first > self._places[var] and self._taken.isdisjoint(variables):
                self._taken.update(variables)
                return variables
        return None

    def _index(self, op_name: str, describe: Describe, by_use: bool) -> dict[Hashable, deque]:
        """Return the variables that calls of an operator describe, by key, ordered by the first
        variable.

        If ``by_use``, a variable has the place of its first use.
        """
        key = op_name, describe, by_use
        if key in self._indices:
            return self._indices[key]
        places = self._first_uses if by_use else self._places
        groups: dict[Hashable, list] = {}
        for var in self._of_operator.get(op_name, ()):
            described = describe(self, var, self._all[var])
            if described is not None and all(variable in self._places for variable in described[1]):
                first = min(places[variable] for variable in described[1])
                groups.setdefault(described[0], []).append((first, described[1]))
        self._indices[key] = {
            wanted: deque(sorted(group, key=lambda candidate: candidate[0]))
            for wanted, group in groups.items()
        }
        return self._indices[key]

    @functools.cached_property
    def _first_uses(self) -> dict[relax.Var, float]:
        """The place of the first use of each variable; its own place if it is unused or visible
        outside the block.

        The place of a binding that is no call is between the places of the calls around it.
        """
        uses: dict[relax.Var, float] = {}
        between = -0.5
        for binding in self._bindings:
            place = self._places.get(binding.var, between)
            between = int(place) + 0.5 if place >= 0 else between
            for variable in used(binding.value):
                uses.setdefault(variable, place)
        return {
            var: uses.get(var, place) if isinstance(var, relax.DataflowVar) else place
            for var, place in self._places.items()
        }

    def _is_settled(self, var: relax.Var) -> bool:
        return self._memory.is_settled(var) and self._memory.is_settled(self._all[var])


#: Describes a call that may recompute an intermediate result of an earlier kernel.
Describe = Callable[[BlockCalls, relax.Var, relax.Call], "Description | None"]

#: Returns the residual kernel of a call, or None.
ResidualFactory = Callable[[CallSite, relax.Var, BlockCalls], "ResidualKernel | None"]

_RESIDUALS: dict[str, ResidualFactory] = {}


def residuals_for(*op_names: str) -> Callable[[ResidualFactory], ResidualFactory]:
    """Register a factory of residual kernels for operators. It returns None if no later call needs
    saved results.

    It takes the site of the call, the variable that the call is bound to, and the calls of the
    block before any replacement.
    """

    def register(make: ResidualFactory) -> ResidualFactory:
        for op_name in op_names:
            if op_name in _RESIDUALS:
                raise ValueError(
                    f"{op_name} already has a factory of residual kernels, "
                    f"{_RESIDUALS[op_name].__name__}"
                )
            _RESIDUALS[op_name] = make
        return make

    return register


def find_residuals(
    op_name: str, site: CallSite, var: relax.Var, calls: BlockCalls
) -> ResidualKernel | None:
    """Return the residual kernel of a call, if there is one."""
    make = _RESIDUALS.get(op_name)
    return None if make is None else make(site, var, calls)


def _is_of(call: relax.Call, op_name: str) -> bool:
    return isinstance(call.op, Op) and call.op.name == op_name
