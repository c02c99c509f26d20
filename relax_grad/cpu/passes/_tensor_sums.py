"""Sums of many tensors in dataflow blocks, of which groups of terms are computed at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import tvm
from tvm import relax
from tvm.ir import Op

from ...ir.aliases import Memory
from ...ir.bindings import bindings_of, used
from ...ir.compat import constant_value
from ...ir.dataflow import with_changed_blocks
from ._slices import Lookup, is_same_tensor

_ADD = Op.get("relax.add")

#: Emits an expression and returns its variable.
Emit = Callable[[relax.Expr], relax.Var]


class Term(Protocol):
    """A term of a sum.

    Attributes
    ----------
    variables : Sequence[relax.Var]
        The bindings that compute the term, the term itself first.
    """

    @property
    def variables(self) -> Sequence[relax.Var]: ...


#: The kind of the terms that a rewriting joins.
_Joined = TypeVar("_Joined", bound=Term)


class Group(NamedTuple):
    """Terms of a sum that are computed at once.

    Attributes
    ----------
    terms : Sequence[Term]
        The terms.
    emitted : Callable
        Emits the operands of the sum of the terms, and returns the call that computes it.
    """

    terms: Sequence[Term]
    emitted: Callable[[Emit], relax.Call]


@dataclass(frozen=True)
class JoinTerms(Generic[_Joined]):
    """A rewriting of sums.

    A sum is rewritten only if each partial sum is used once, in the same dataflow block, and the
    shapes are static. Terms that a call may overwrite before the whole sum is computed are added as
    before.

    Attributes
    ----------
    operators : Iterable[tvm.ir.Op]
        A function is searched if it has additions and calls of one of these operators.
    find : Callable
        Returns the term that an operand of a sum is, or None. Its second argument returns the value
        of a variable if the variable may be removed together with its only use, else its argument.
    grouped : Callable
        Returns the groups of the terms of a sum of a type.
    """

    operators: Iterable[Op]
    find: Callable[[relax.Var, Lookup], _Joined | None]
    grouped: Callable[[Sequence[_Joined], relax.TensorType], Sequence[Group]]

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        return with_changed_blocks(mod, self._is_candidate, self._changed)

    def _is_candidate(self, function: relax.Function) -> bool:
        calls = {b.value.op for b in bindings_of(function.body) if isinstance(b.value, relax.Call)}
        return _ADD in calls and not calls.isdisjoint(self.operators)

    def _changed(
        self, function: relax.Function, memory: Memory
    ) -> Callable[[relax.DataflowBlock], relax.DataflowBlock]:
        """Return the function that joins the sums of a dataflow block."""
        uses = Counter(used(function.body.body))
        for binding in bindings_of(function.body):
            uses.update(used(binding.value))
        return lambda block: _Sums(self, block, uses, memory).joined()


class _Sums:
    """The sums of a dataflow block.

    Parameters
    ----------
    joining : JoinTerms
        The rewriting.
    block : relax.DataflowBlock
        The block.
    uses : Counter
        The number of uses of each variable of the function.
    memory : Memory
        The memory that calls of the function write to.
    """

    def __init__(
        self, joining: JoinTerms, block: relax.DataflowBlock, uses: Counter, memory: Memory
    ):
        self._joining = joining
        self._block, self._uses, self._memory = block, uses, memory
        self._values = {
            b.var: b.value for b in block.bindings[:] if isinstance(b, relax.VarBinding)
        }
        #: Additions of tensors of one static type, in the order of the block.
        self._sums = {
            variable: list(value.args)
            for variable, value in self._values.items()
            if isinstance(value, relax.Call) and value.op == _ADD
            if all(is_same_tensor(variable.ty, argument.ty) for argument in value.args[:])
        }

    def joined(self) -> relax.DataflowBlock:
        """Return the block with groups instead of additions; the same block if nothing
        changes."""
        partial = {
            operand
            for operands in self._sums.values()
            for operand in operands
            if operand in self._sums and self._is_own(operand)
        }
        changes: dict[relax.Var, list[relax.Binding]] = {}
        for variable in self._sums:
            if variable not in partial:
                self._join(variable, partial, changes)
        if not changes:
            return self._block
        bindings = [new for old in self._block.bindings[:] for new in changes.get(old.var, [old])]
        return relax.DataflowBlock(bindings, self._block.span)

    def _is_own(self, variable: relax.Expr) -> bool:
        """Tell whether a variable has exactly one use, and none outside its block."""
        return isinstance(variable, relax.DataflowVar) and self._uses[variable] == 1

    def _lookup(self, expr: relax.Expr) -> relax.Expr:
        """Return the value of a variable that is removable or a constant, else the expression
        itself."""
        value = self._values.get(expr, expr)
        if self._is_own(expr):
            return value
        is_constant = constant_value(value) is not None and self._memory.is_settled(expr)
        return value if is_constant else expr

    def _join(self, total: relax.Var, partial: set, changes: dict) -> None:
        """Add the replacements of the bindings of a sum to ``changes``."""
        sums, terms = self._parts(total, partial)
        groups = self._joining.grouped(terms, total.ty)
        rest: dict[relax.Expr, relax.Expr | None] = {
            term.variables[0]: None for group in groups for term in group.terms
        }
        if not rest:
            return
        for variable in reversed(sums):  # the operands of a sum come before the sum
            operands = [rest.get(operand, operand) for operand in self._sums[variable]]
            left = [operand for operand in operands if operand is not None]
            if variable is total:
                changes[variable] = _emitted(total, left, groups)
                return
            if len(left) == 2:
                rest[variable] = variable
                changes[variable] = [relax.VarBinding(variable, relax.op.add(*left))]
            else:
                rest[variable] = left[0] if left else None
                changes[variable] = []

    def _parts(self, total: relax.Var, partial: set) -> tuple[list[relax.Var], list[Term]]:
        """Return the partial sums of a sum, each before its operands, and the terms that may be
        joined."""
        sums, terms, pending = [], [], [total]
        while pending:
            variable = pending.pop()
            sums.append(variable)
            for operand in self._sums[variable]:
                if operand in partial:
                    pending.append(operand)
                    continue
                term = self._joining.find(operand, self._lookup)
                if term is not None and self._holds(term.variables, total):
                    terms.append(term)
        return sums, terms

    def _holds(self, variables: Sequence[relax.Var], at: relax.Var) -> bool:
        """Tell whether the computation of variables can move to a later binding."""
        return all(
            self._memory.holds(variable, self._values[variable], at) for variable in variables
        )


def _emitted(
    total: relax.Var, rest: Sequence[relax.Expr], groups: Sequence[Group]
) -> list[relax.Binding]:
    """Return the bindings that compute a sum of tensors and groups."""
    builder = relax.BlockBuilder()
    bindings: list[relax.Binding] = []

    def emit(value: relax.Expr) -> relax.Var:
        value = builder.normalize(value)
        variable = relax.DataflowVar("joined", value.ty)
        bindings.append(relax.VarBinding(variable, value))
        return variable

    terms = [*rest, *(group.emitted(emit) for group in groups)]
    for i, term in enumerate(terms[1:], start=1):
        terms[i] = relax.op.add(terms[i - 1], emit(term) if isinstance(term, relax.Call) else term)
        if i < len(terms) - 1:
            terms[i] = emit(terms[i])
    return [*bindings, relax.VarBinding(total, terms[-1])]
