"""The forward and the backward pass of a training step, and the calls of the forward pass that can
be repeated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tvm
from tvm import relax

from ....ir.aliases import Memory, is_name, leaves, named_by, writing_functions
from ....ir.bindings import renamed, substitute, used, with_value
from ..reorder import Tensors, has_place, in_arguments, reordered
from ..storage import Lifetime, storages_of
from ._costs import Cost, cost_of
from .forward import forward_pass


class Residuals:
    """A function whose first result is a loss, as a graph of calls and tensors.

    The forward pass consists of the bindings that the loss depends on, and of those that compute
    small tensors from their results alone, such as new running statistics. All other bindings are
    the backward pass. Fusion leaves both in any order; here the forward pass comes first, unless a
    block must keep its order. Then the forward pass ends with its last binding. A tensor of the
    forward pass that the backward pass uses is kept in between. Instead, the backward pass can
    repeat the call that makes the tensor, before the first use.

    Parameters
    ----------
    function : relax.Function
        The function.
    mod : tvm.IRModule
        The module.

    Attributes
    ----------
    tensors : Tensors
        The tensors and the calls that make and take them.
    end : int
        The number of bindings of the forward pass.
    costs : dict[int, Cost]
        The calls of the forward pass that can be repeated, by their numbers.
    wanted : set[int]
        The tensors of the forward pass that the backward pass uses, and that the function does not
        return.
    """

    def __init__(self, function: relax.Function, mod: tvm.IRModule):
        self._function = function
        self._in_arguments = in_arguments(function)
        self._blocks = [list(block.bindings[:]) for block in function.body.blocks[:]]
        self._bindings = [binding for block in self._blocks for binding in block]
        writers = writing_functions(mod)
        # The bindings of a single block are reordered by a later pass.
        blocks = function.body.blocks[:]
        self._may_move = (
            len(blocks) == 1
            and isinstance(blocks[0], relax.DataflowBlock)
            and not any(has_place(binding, writers) for binding in self._bindings)
        )
        self._unchanged = self._blocks
        self.tensors = self._tensors(self._bindings)
        self.maker = {t: i for i, made in enumerate(self.tensors.makes) for t in made}
        forward = self._forward()
        self.end = max(forward, default=-1) + 1
        if self._may_move:
            backward = [i for i in range(len(self._bindings)) if i not in forward]
            self._bindings = [self._bindings[i] for i in [*sorted(forward), *backward]]
            self._blocks, self.end = [self._bindings], len(forward)
            self.tensors = self._tensors(self._bindings)
            self.maker = {t: i for i, made in enumerate(self.tensors.makes) for t in made}
        memory = Memory(function, writers)
        self.costs: dict[int, Cost] = {}
        for i, binding in enumerate(self._bindings[: self.end]):
            cost = cost_of(binding.value, mod)
            if cost is not None and memory.is_settled(relax.Tuple([binding.var, binding.value])):
                self.costs[i] = cost
        for binding in self._bindings:
            if _has_body(binding.value):  # its variables are not replaced
                for variable in relax.analysis.free_vars(binding.value):
                    for tensor in leaves(self.tensors.named.get(variable)):
                        self.costs.pop(self.maker[tensor], None)
        first = sum(len(made) for made in self.tensors.makes[: self.end])
        taken = {t for takes in self.tensors.takes[self.end :] for t in takes}
        self.wanted = {t for t in taken - self.tensors.kept if t < first}

    def call(self, number: int) -> relax.Call:
        """Return a call by its number."""
        return self._bindings[number].value

    def _tensors(self, bindings: list[relax.Binding]) -> Tensors:
        """Return the tensors of bindings instead of the function's."""
        tensors = Tensors(bindings, self._in_arguments)
        tensors.kept = set(leaves(named_by(self._function.body.body, tensors.named)))
        return tensors

    def _forward(self) -> set[int]:
        """Return the numbers of the bindings of the forward pass; none if no binding computes the
        loss."""
        tensors = self.tensors
        named = named_by(self._function.body.body, tensors.named)
        first = leaves(named[0] if isinstance(named, list) and named else named)
        return forward_pass(tensors, first)

    def repeated(self, calls: Collection[int]) -> list[list[relax.Binding]]:
        """Return the bindings of each block, in which the backward pass repeats calls of the
        forward pass."""
        if not calls:
            return self._unchanged
        repetition = _Repetition(self._bindings[: self.end], calls)
        blocks, at = [], 0
        for block, bindings in zip(self._function.body.blocks[:], self._blocks, strict=True):
            before = min(max(self.end - at, 0), len(bindings))
            changed = bindings[:before]
            variable = relax.DataflowVar if isinstance(block, relax.DataflowBlock) else relax.Var
            for binding in bindings[before:]:
                changed += repetition.added(binding, variable)
            blocks.append(changed)
            at += len(bindings)
        return blocks if len(blocks) == 1 else _visible(blocks)

    def peak(self, calls: Collection[int]) -> int:
        """Return the bytes of the storages that are planned if the backward pass repeats calls."""
        bindings = [binding for block in self.repeated(calls) for binding in block]
        tensors = self._tensors(bindings)
        order = (reordered(tensors) if self._may_move else None) or range(len(bindings))
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, i in enumerate(order):
            for tensor in tensors.makes[i]:
                first[tensor] = last[tensor] = place
            for tensor in tensors.takes[i]:
                last[tensor] = place
        sizes = tensors.sizes
        lifetimes = {
            tensor: Lifetime(begin, last[tensor], sizes[tensor])
            for tensor, begin in first.items()
            if sizes[tensor] and tensor not in tensors.kept
        }
        shared = dict(storages_of(lifetimes).values())
        return sum(shared.values()) + sum(sizes[tensor] for tensor in tensors.kept)

    def body(self, calls: Collection[int]) -> relax.SeqExpr:
        """Return the body of the function in which the backward pass repeats calls."""
        old = self._function.body.blocks[:]
        blocks = [type(a)(b) for a, b in zip(old, self.repeated(calls), strict=True)]
        return relax.SeqExpr(blocks, self._function.body.body)


class _Repetition:
    """The repeated calls of a backward pass, each before its first use.

    Parameters
    ----------
    forward : Sequence[relax.Binding]
        The bindings of the forward pass.
    calls : Collection[int]
        The numbers of those that are repeated.
    """

    def __init__(self, forward: Sequence[relax.Binding], calls: Collection[int]):
        self._bound = {binding.var: binding for binding in forward}
        self._again: dict[relax.Var, relax.Var] = {}
        #: The results of repeated calls, and their names.
        self._repeated: set[relax.Var] = set()
        for i, binding in enumerate(forward):
            names = isinstance(binding, relax.VarBinding) and is_name(binding.value)
            if i in calls or (names and not self._repeated.isdisjoint(used(binding.value))):
                self._repeated.add(binding.var)

    def added(self, binding: relax.Binding, variable: type[relax.Var]) -> list[relax.Binding]:
        """Return a binding of the backward pass that uses repeated results, and before it the calls
        that it needs.

        ``variable`` is the class of the new variables.
        """
        calls: list[relax.Binding] = []
        # An explicit stack instead of recursion: a chain may be longer than Python's recursion
        # limit.
        pending = self._missing(binding.value)
        while pending:
            current = pending[-1]
            value = self._bound[current].value
            missing = [] if current in self._again else self._missing(value)
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self._again:
                self._again[current] = variable(f"{current.name}_again", current.ty)
                calls.append(relax.VarBinding(self._again[current], substitute(value, self._again)))
        return [*calls, with_value(binding, substitute(binding.value, self._again))]

    def _missing(self, value: relax.Expr) -> list[relax.Var]:
        return [v for v in used(value) if v in self._repeated and v not in self._again]


def _has_body(value: relax.Expr) -> bool:
    return isinstance(value, (relax.If, relax.Function))


def _visible(blocks: Sequence[Sequence[relax.Binding]]) -> list[list[relax.Binding]]:
    """Return bindings in which no dataflow variable is used outside of its block."""
    made_in = {binding.var: i for i, block in enumerate(blocks) for binding in block}
    outer = {
        variable: relax.Var(variable.name, variable.ty)
        for i, block in enumerate(blocks)
        for binding in block
        for variable in used(binding.value)
        if isinstance(variable, relax.DataflowVar) and made_in[variable] != i
    }
    return [[renamed(binding, outer) for binding in block] for block in blocks]
