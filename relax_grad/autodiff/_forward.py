"""The forward program as a flat list of bindings with calls inlined, the form of the backward
walk."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import tvm
from tvm import relax
from tvm.ir import GlobalVar

from ..errors import GradientError
from ..ir.arguments import bind_param, with_shapes
from ..ir.bindings import bindings_of, used


class Forward:
    """Emits the forward bindings and records them.

    Calls of other Relax functions with varied operands are inlined: the body of a callee has a
    gradient, a call has none.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder to emit into; a block must be open.
    module : tvm.IRModule
        The module that holds the callees.
    sources : Collection[relax.Var]
        The variables to differentiate with respect to.
    """

    def __init__(
        self, bb: relax.BlockBuilder, module: tvm.IRModule, sources: Collection[relax.Var]
    ):
        self.bb = bb
        self.bindings: list[relax.Binding] = []
        self._module = module
        self._reached = set(sources)
        self._local: dict[relax.Var, relax.Function] = {}
        self._callers: list[tuple[relax.Function, str]] = []

    def emit(self, seq: relax.SeqExpr) -> None:
        """Emit the bindings of a sequence."""
        # An explicit stack instead of recursion: calls may nest deeper than Python's recursion
        # limit.
        pending = [self._emit_bindings(seq)]
        while pending:
            body = next(pending[-1], None)
            if body is None:
                pending.pop()
            else:
                pending.append(self._emit_bindings(body))

    def _emit_bindings(self, seq: relax.SeqExpr) -> Iterator[relax.SeqExpr]:
        """Emit the bindings of a sequence; yield the bodies of callees, which the caller emits in
        between."""
        for block in seq.blocks[:]:
            for binding in block.bindings[:]:
                yield from self._emit_binding(binding)

    def _emit_binding(self, binding: relax.Binding) -> Iterator[relax.SeqExpr]:
        variable, value = binding.var, binding.value
        self._remember(variable, value)
        reached = any(v in self._reached for v in _inputs(value))
        if reached:
            self._reached.add(variable)
            function = self._callee(value)
            if function is not None:
                yield from self._write_out(variable, value, function)
                return
            if isinstance(value, relax.If) and may_call(value):
                branches = [self._branch(b) for b in (value.true_branch, value.false_branch)]
                value = self.bb.normalize(relax.If(value.cond, *branches, value.span))
                binding = relax.VarBinding(variable, value)
        self._append(binding)

    def _append(self, binding: relax.Binding) -> None:
        self.bb.emit_normalized(binding)
        self.bindings.append(binding)

    def _branch(self, seq: relax.SeqExpr) -> relax.SeqExpr:
        """Return a branch with its calls inlined."""
        outer, self.bindings = self.bindings, []
        self.bb._begin_binding_block()
        self.emit(seq)
        block = self.bb._end_block()
        self.bindings = outer
        return relax.SeqExpr([block], seq.body)

    def _remember(self, variable: relax.Var, value: relax.Expr) -> None:
        """Record the function that a variable refers to, if any."""
        function = self._function(value)
        if function is not None:
            self._local[variable] = function

    def _function(self, value: relax.Expr) -> relax.Function | None:
        """Return the Relax function that a value refers to, or None."""
        if isinstance(value, relax.Var):
            return self._local.get(value)
        if isinstance(value, GlobalVar) and value in self._module.functions:
            value = self._module[value]
        return value if isinstance(value, relax.Function) else None

    def _callee(self, value: relax.Expr) -> relax.Function | None:
        """Return the Relax function that a value calls, or None."""
        return self._function(value.op) if isinstance(value, relax.Call) else None

    def _write_out(
        self, variable: relax.Var, call: relax.Call, function: relax.Function
    ) -> Iterator[relax.SeqExpr]:
        name = call.op.name_hint if isinstance(call.op, GlobalVar) else call.op.name
        known = [caller.same_as(function) for caller, _ in self._callers]
        if any(known):
            path = " calls ".join([*(name for _, name in self._callers[known.index(True) :]), name])
            raise GradientError(
                f"binding {variable.name!r}: recursion cannot be differentiated: {path}; unroll it "
                "into a number of steps that is known when the module is built"
            )
        self._callers.append((function, name))
        function = with_shapes(function, call.args)
        for param, argument in zip(function.params, call.args, strict=True):
            if any(v in self._reached for v in used(argument)):
                self._reached.add(param)
            self._remember(param, argument)
            for binding in bind_param(param, argument):
                self._append(binding)
        yield function.body
        self._callers.pop()
        self._remember(variable, function.body.body)
        self._append(relax.VarBinding(variable, function.body.body))


def _inputs(value: relax.Expr) -> list[relax.Var]:
    return relax.analysis.free_vars(value) if isinstance(value, relax.If) else used(value)


def may_call(value: relax.Expr) -> bool:
    """Tell whether a value may call a Relax function, itself or in a branch."""
    if isinstance(value, relax.If):
        branches = (value.true_branch, value.false_branch)
        return any(
            may_call(binding.value) for branch in branches for binding in bindings_of(branch)
        )
    return isinstance(value, relax.Call) and isinstance(value.op, (GlobalVar, relax.Var))
