"""Checkpointing: what the backward pass computes again instead of keeping.

``relax.grad.start_checkpoint`` and ``end_checkpoint`` mark the inputs and the outputs of a stretch whose
intermediate results are not kept. The semantics are those of ``relax.transform.Gradient``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax
from tvm.ir import Op

from ..ir.bindings import substitute, used, with_value

_START, _END = (Op.get(f"relax.grad.{end}_checkpoint") for end in ("start", "end"))


def has_markers(bindings: Iterable[relax.Binding]) -> bool:
    """Tell whether a marker stands among the bindings."""
    return any(is_marker(binding.value) for binding in bindings)


class Checkpoints:
    """Which variables are kept, and how to compute the others again.

    A variable is kept if it is a parameter, goes into a stretch, or depends on nothing within one. What a
    conditional takes and returns is kept as well, as is what a local function captures, and what an impure
    call returns, which may return something else when it is called again.

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
                # The result of the block keeps its name.
                self._append(relax.VarBinding(variable, original))
        self._kept |= whole

    def original(self, variable: relax.Var) -> relax.Var:
        """Return the variable that a marked one stands for."""
        return self._marked.get(variable, variable)

    def recomputed(
        self, bb: relax.BlockBuilder, variable: relax.Var, call: relax.Call
    ) -> tuple[relax.Var, relax.Call]:
        """Return a call and the variable of its result as the backward pass has them."""
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
        """Replace what is not kept by what is computed again."""
        return substitute(value, {v: self._known(bb, v) for v in used(value)})

    def _known(self, bb: relax.BlockBuilder, variable: relax.Var) -> relax.Var:
        if variable in self._kept or variable not in self._bindings:
            return variable
        # Not by recursion: a stretch may be longer than Python's stack is deep.
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
    """Tell whether a value is the beginning or the end of a stretch."""
    return isinstance(value, relax.Call) and value.op in (_START, _END)
