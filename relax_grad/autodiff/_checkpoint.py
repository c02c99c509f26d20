"""Checkpointing: the backward pass recomputes residuals instead of keeping them.

``relax.grad.start_checkpoint`` and ``end_checkpoint`` mark the inputs and the outputs of a segment
whose intermediate results are not kept. The semantics follow ``relax.transform.Gradient``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax
from tvm.ir import Op

from ..ir.bindings import substitute, used, with_value

_START, _END = (Op.get(f"relax.grad.{end}_checkpoint") for end in ("start", "end"))


def has_markers(bindings: Iterable[relax.Binding]) -> bool:
    """Tell whether the bindings contain a checkpoint marker."""
    return any(is_marker(binding.value) for binding in bindings)


class Checkpoints:
    """The kept variables, and the recomputation of the others.

    A variable is kept if it is a parameter, an input of a segment, or computed outside of every
    segment. The operands and results of conditionals, the captures of local functions, and the
    operands and results of impure calls are kept too: a repeated impure call may return another
    result.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        The bindings with their markers.
    params : Iterable[relax.Var]
        The parameters of the function.

    Attributes
    ----------
    bindings : list[relax.Binding]
        The bindings without the markers.
    """

    def __init__(self, bindings: Iterable[relax.Binding], params: Iterable[relax.Var]):
        self.bindings: list[relax.Binding] = []
        self._kept = set(params)
        self._marked: dict[relax.Var, relax.Var] = {}
        self._bindings: dict[relax.Var, relax.Binding] = {}
        self._again: dict[relax.Var, relax.Var] = {}
        ended: set[relax.Var] = set()
        whole: set[relax.Var] = set()
        for binding in bindings:
            variable, value = binding.var, binding.value
            if not is_marker(value):
                if all(v in self._kept or v in ended for v in used(value)):
                    self._kept.add(variable)
                if isinstance(value, (relax.If, relax.Function)) or _is_impure(value):
                    whole.update([variable, *relax.analysis.free_vars(value)])
                self._append(binding)
                continue
            (marked,) = value.args
            original = self.original(marked)
            self._marked[variable] = original
            if value.op == _START:
                self._kept.add(original)
            else:
                ended.add(variable)
            if not isinstance(variable, relax.DataflowVar):
                # A variable that is visible outside the dataflow block stays bound.
                self._append(relax.VarBinding(variable, original))
        self._kept |= whole

    def original(self, variable: relax.Var) -> relax.Var:
        """Return the original of a variable that a marker binds."""
        return self._marked.get(variable, variable)

    def recomputed(
        self, bb: relax.BlockBuilder, variable: relax.Var, call: relax.Call
    ) -> tuple[relax.Var, relax.Call]:
        """Return the call and the variable of its result for use in the backward pass, recomputed
        if needed."""
        call = self._with_known(bb, call)
        if variable in self._kept:
            return variable, call
        if variable not in self._again:
            self._again[variable] = bb.emit(call, f"{variable.name}_cp")
        return self._again[variable], call

    def _append(self, binding: relax.Binding) -> None:
        binding = with_value(binding, substitute(binding.value, self._marked))
        self._bindings[binding.var] = binding
        self.bindings.append(binding)

    def _with_known(self, bb: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
        """Replace the variables that are not kept by recomputed ones."""
        return substitute(value, {v: self._known(bb, v) for v in used(value)})

    def _known(self, bb: relax.BlockBuilder, variable: relax.Var) -> relax.Var:
        if variable in self._kept or variable not in self._bindings:
            return variable
        # An explicit stack instead of recursion: a segment may be longer than Python's recursion
        # limit.
        pending = [variable]
        while pending:
            current = pending[-1]
            missing = [
                v
                for v in used(self._bindings[current].value)
                if v not in self._kept and v not in self._again and v in self._bindings
            ]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in self._again:
                self._again[current] = self._emit(bb, self._bindings[current])
        return self._again[variable]

    def _emit(self, bb: relax.BlockBuilder, binding: relax.Binding) -> relax.Var:
        value, name = substitute(binding.value, self._again), f"{binding.var.name}_cp"
        if isinstance(binding, relax.MatchCast):
            return bb.match_cast(value, binding.ty, name)
        return bb.emit(value, name)


def _is_impure(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and relax.analysis.contains_impure_call(value)


def is_marker(value: relax.Expr) -> bool:
    """Tell whether a value marks the start or the end of a segment."""
    return isinstance(value, relax.Call) and value.op in (_START, _END)
