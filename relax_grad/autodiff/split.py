"""The division of an adjoint into a forward and a backward function, with residuals between
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op, PrimType
from tvm_ffi import structural_hash

from ..errors import GradientError
from ..ir.aliases import may_write, writing_functions
from ..ir.bindings import bindings_of, used
from ..ir.compat import constant_tensor
from ..ir.dataflow import in_dataflow
from ..ir.module import copy_with_new_vars, normalized, unused, with_functions
from ._checkpoint import has_markers
from ._recomputation import ELEMENTWISE, FILLED, VIEWS, size_of


class Split(NamedTuple):
    """The result of a division.

    Attributes
    ----------
    module : tvm.IRModule
        The module with both functions.
    arguments : list[int]
        The positions of the parameters of the original function that the backward function takes
        first.
    results : list[int]
        The positions among the tensors of the result, in order, of those that it takes next.
    residuals : int
        The number of residuals. It takes them then, as one tuple, if there are any. The cotangents
        are last.
    """

    module: tvm.IRModule
    arguments: list[int]
    results: list[int]
    residuals: int


def split(mod: tvm.IRModule, name: str, cotangents: int, forward: str, backward: str) -> Split:
    """Divide a function that returns ``(result, gradients)`` and takes cotangents last.

    The residuals are values that do not depend on cotangents and that the backward function reads.
    A parameter or a tensor of the result is never a residual. The backward function computes views,
    values without operands, checkpointed sections, and element-wise values that the result does not
    need, provided that their operands take no more memory.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    name : str
        The function, which is removed.
    cotangents : int
        The number of its cotangents.
    forward, backward : str
        The names of the new functions.

    Raises
    ------
    GradientError
        If a call writes to its arguments, or a symbolic extent has no definition in the backward
        function.
    """
    return _Division(mod, name, cotangents).split(forward, backward)


def is_checkpointed(function: relax.Function) -> bool:
    """Tell whether a function has checkpointed sections, which the backward pass of its adjoint
    computes again."""
    return has_markers(bindings_of(function.body))


class _Division:
    def __init__(self, mod: tvm.IRModule, name: str, cotangents: int):
        self._mod, self._name = mod, name
        alone = tvm.IRModule({GlobalVar(name): mod[name]})
        function = relax.transform.ToNonDataflow()(alone)[name]
        count = len(function.params) - cotangents
        params = list(function.params)
        self._params, self._cotangents = params[:count], params[count:]
        self._param_set = set(self._params)
        self._bindings = [
            binding for block in function.body.blocks[:] for binding in block.bindings[:]
        ]
        self._bound = {binding.var: binding for binding in self._bindings}
        self._attrs, self._is_pure = function.attrs, function.is_pure
        writers = writing_functions(mod)
        if any(may_write(binding.value, writers) for binding in self._bindings):
            raise GradientError(
                f"{name} cannot be divided into a forward and a backward function: it has calls "
                "that write to their arguments"
            )
        self._result, self._gradients = self._fields(function.body.body)
        self._leaves = self._tensors(self._result)
        self._returned = {leaf for leaf in self._leaves if isinstance(leaf, relax.Var)}
        self._dependent = self._reached()
        self._forward = self._needed([*relax.analysis.free_vars(self._result)])
        self._checkpointed = self._sections()
        self._saved_arguments: set[relax.Var] = set()
        self._residuals: dict[relax.Var, None] = {}  # in order
        self._recomputed: set[relax.Var] = set()

    def _fields(self, value: relax.Expr) -> list[relax.Expr]:
        """Return the fields of a tuple, which may be bound to a variable."""
        while value in self._bound and isinstance(
            self._bound[value].value, (relax.Var, relax.Tuple)
        ):
            value = self._bound[value].value
        return list(value.fields)

    def _tensors(self, value: relax.Expr) -> list[relax.Expr]:
        """Return the tensors in a result in their order."""
        if not isinstance(value.ty, relax.TupleType):
            return [value]
        while isinstance(value, relax.Var) and value in self._bound:
            bound = self._bound[value].value
            if not isinstance(bound, (relax.Var, relax.Tuple)):
                break
            value = bound
        if isinstance(value, relax.Tuple):
            return [leaf for field in value.fields for leaf in self._tensors(field)]
        return [
            leaf
            for i in range(len(value.ty.fields))
            for leaf in self._tensors(relax.TupleGetItem(value, i))
        ]

    def _reached(self) -> set[relax.Var]:
        """Return the variables that depend on cotangents."""
        dependent = set(self._cotangents)
        for binding in self._bindings:
            if any(variable in dependent for variable in _operands(binding.value)):
                dependent.add(binding.var)
        return dependent

    def _needed(self, variables: list[relax.Var]) -> set[relax.Var]:
        """Return the variables that some variables are computed from."""
        live = set(variables)
        for binding in reversed(self._bindings):
            if binding.var in live:
                live.update(_operands(binding.value))
        return live

    def _sections(self) -> set[relax.Var]:
        """Return the variables of checkpointed sections: the backward pass computes a value of the
        forward pass again."""
        numbers: dict[object, int] = {}
        of: dict[relax.Var, int] = {}
        first: dict[int, relax.Var] = {}
        checkpointed = set()

        def key(value: relax.Expr) -> Any:
            if isinstance(value, relax.Var):
                return of.get(value, value)
            if isinstance(value, relax.Call):
                attrs = 0 if value.attrs is None else structural_hash(value.attrs)
                return (value.op, attrs, *map(key, value.args[:]), *map(str, value.ty_args[:]))
            if isinstance(value, relax.Tuple):
                return ("tuple", *map(key, value.fields[:]))
            if isinstance(value, relax.TupleGetItem):
                return ("item", value.index, key(value.tuple_value))
            return value

        for binding in self._bindings:
            of[binding.var] = number = numbers.setdefault(key(binding.value), len(numbers))
            is_first = first.setdefault(number, binding.var).same_as(binding.var)
            reads_repeated = any(operand in checkpointed for operand in _operands(binding.value))
            if binding.var not in self._forward and (reads_repeated or not is_first):
                checkpointed.add(binding.var)
        return checkpointed

    def split(self, forward: str, backward: str) -> Split:
        computed = [binding for binding in self._bindings if binding.var in self._dependent]
        live = self._needed(
            [leaf for gradient in self._gradients for leaf in relax.analysis.free_vars(gradient)]
        )
        computed = [binding for binding in computed if binding.var in live]
        wanted = [
            operand
            for value in [*(binding.value for binding in computed), *self._gradients]
            for operand in _operands(value)
            if operand not in self._dependent
        ]
        self._classify(wanted)
        self._define_extents(computed)
        # In the order of the forward pass, which does not depend on the backward pass.
        self._residuals = {
            binding.var: None for binding in self._bindings if binding.var in self._residuals
        }
        arguments = [i for i, param in enumerate(self._params) if param in self._saved_arguments]
        results = {
            leaf: i
            for i, leaf in reversed([*enumerate(self._leaves)])
            if leaf in self._returned & self._saved_arguments - self._param_set
        }
        in_order = sorted(results, key=lambda leaf: results[leaf])
        saved = [
            (residual, leaf) for residual in self._residuals for leaf in self._tensors(residual)
        ]
        return Split(
            self._module(forward, backward, computed, arguments, in_order, saved=saved),
            arguments,
            [results[leaf] for leaf in in_order],
            len(saved),
        )

    def _classify(self, wanted: list[relax.Var]) -> None:
        """Decide for each value that the backward function reads: argument, residual, or computed
        there."""
        candidates: dict[relax.Var, None] = {}
        pending = wanted[::-1]
        while pending:
            variable = pending.pop()
            classes = self._saved_arguments, self._residuals, self._recomputed
            if any(variable in chosen for chosen in classes):
                continue
            if variable in self._param_set or variable in self._returned:
                self._saved_arguments.add(variable)
            elif self._is_free(variable):
                self._recomputed.add(variable)
                pending += _operands(self._bound[variable].value)
            elif self._is_elementwise(variable):
                candidates[variable] = None
            else:
                self._residuals[variable] = None
        for variable in (binding.var for binding in self._bindings if binding.var in candidates):
            inner, outer = self._cone(variable)
            if sum(map(size_of, outer)) <= size_of(variable):
                self._recomputed |= inner
                self._residuals.update(dict.fromkeys(outer))
            else:
                self._residuals[variable] = None

    def _cone(self, variable: relax.Var) -> tuple[set[relax.Var], list[relax.Var]]:
        """Return the variables to compute for a variable, and those to save first."""
        inner: set[relax.Var] = set()
        outer: dict[relax.Var, None] = {}  # in order
        pending = [variable]
        while pending:
            current = pending.pop()
            if current in self._residuals or current in inner or current in outer:
                continue
            if current in self._param_set or current in self._returned:
                self._saved_arguments.add(current)
            elif self._is_free(current) or self._is_elementwise(current):
                inner.add(current)
                pending += _operands(self._bound[current].value)
            else:
                outer[current] = None
        return inner, list(outer)

    def _is_free(self, variable: relax.Var) -> bool:
        binding = self._bound[variable]
        value = binding.value
        if variable in self._checkpointed or isinstance(value, (relax.Var, relax.Tuple)):
            return not isinstance(binding, relax.MatchCast)
        if constant_tensor(value) is not None:
            return True
        if not isinstance(value, relax.Call):
            return not isinstance(variable.ty, (relax.TensorType, relax.TupleType))
        if not isinstance(value.op, Op) or isinstance(binding, relax.MatchCast):
            return False
        if value.op.name in VIEWS or not isinstance(
            variable.ty, (relax.TensorType, relax.TupleType)
        ):
            return True
        if value.op.name == "relax.permute_dims":
            return value.args[0] in self._param_set
        is_pure = not relax.analysis.contains_impure_call(value)
        return is_pure and value.op.name in FILLED and not _operands(value)

    def _is_elementwise(self, variable: relax.Var) -> bool:
        binding = self._bound[variable]
        if variable in self._forward or isinstance(binding, relax.MatchCast):
            return False
        value = binding.value
        return (
            isinstance(value, relax.Call)
            and isinstance(value.op, Op)
            and value.op.name in ELEMENTWISE
        )

    def _define_extents(self, computed: list[relax.Binding]) -> None:
        """Add arguments or residuals whose shapes define the symbolic extents that the backward
        function reads."""
        values = [
            *computed,
            *(binding for binding in self._bindings if binding.var in self._recomputed),
        ]
        seen = {extent for binding in values for extent in _extents(binding)}
        for gradient in self._gradients:
            seen.update(relax.analysis.free_symbolic_vars(gradient))
        for variable in self._inputs():
            seen.update(relax.analysis.tir_vars_in_type(variable.ty))
        known = {
            extent
            for variable in [
                *self._inputs(),
                *(b.var for b in values if isinstance(b, relax.MatchCast)),
            ]
            for extent in relax.analysis.definable_tir_vars_in_type(variable.ty)
        }
        others = [
            *(
                param
                for param in self._params
                if isinstance(param.ty, (relax.TensorType, relax.ShapeType))
            ),
            *(binding.var for binding in self._bindings if binding.var not in self._dependent),
        ]
        for extent in seen - known:
            if extent in known:
                continue
            for variable in others:
                defined = relax.analysis.definable_tir_vars_in_type(variable.ty)
                if extent in defined:
                    if variable in self._param_set:
                        self._saved_arguments.add(variable)
                    else:
                        self._residuals[variable] = None
                        self._recomputed.discard(variable)
                    known.update(defined)
                    break
            else:
                raise GradientError(
                    f"{self._name}: no value defines the symbolic extent {extent} in the "
                    "backward function"
                )

    def _inputs(self) -> list[relax.Var]:
        return [*self._saved_arguments, *self._residuals, *self._cotangents]

    def _module(
        self,
        forward: str,
        backward: str,
        computed: Sequence[relax.Var],
        arguments: Sequence[relax.Expr],
        results: Sequence[relax.Expr],
        saved: Sequence[relax.Var],
    ) -> tvm.IRModule:
        names = {param.name for param in self._params}
        roots = [*relax.analysis.free_vars(self._result), *self._residuals]
        kept = self._needed(roots)
        bindings = [binding for binding in self._bindings if binding.var in kept]
        first = self._function(
            self._params,
            bindings,
            relax.Tuple([self._result, relax.Tuple([leaf for _, leaf in saved])]),
            self._attrs,
        )
        replaced: dict[relax.Var, relax.Var] = {}

        def fresh(name: str, kind: relax.Type) -> relax.Var:
            name = unused(name, names)
            names.add(name)
            return relax.Var(name, kind)

        for i, leaf in enumerate(results):
            replaced[leaf] = fresh(f"result{i}", leaf.ty)
        params = [*(self._params[i] for i in arguments), *replaced.values()]
        rebuilt = []
        if saved:
            whole = fresh("residuals", relax.TupleType([leaf.ty for _, leaf in saved]))
            params.append(whole)
        leaves = (relax.TupleGetItem(whole, i) for i in range(len(saved)))
        for residual in self._residuals:
            if not isinstance(residual.ty, relax.TupleType):
                rebuilt.append(relax.VarBinding(residual, next(leaves)))
                continue
            parts = []
            for leaf in self._tensors(residual):
                parts.append(relax.Var("part", leaf.ty))
                rebuilt.append(relax.VarBinding(parts[-1], next(leaves)))
            rebuilt.append(relax.VarBinding(residual, _rebuilt(residual.ty, parts)))
        rebuilt += [relax.VarBinding(leaf, param) for leaf, param in replaced.items()]
        again = [binding for binding in self._bindings if binding.var in self._recomputed]
        chosen = {binding.var for binding in [*again, *computed]}
        ordered = [binding for binding in self._bindings if binding.var in chosen]
        second = self._function(
            [*params, *self._cotangents], [*rebuilt, *ordered], self._gradient, None
        )
        return with_functions(self._mod, {forward: first, backward: second}, without=[self._name])

    @property
    def _gradient(self) -> relax.Expr:
        return relax.Tuple(self._gradients)

    def _function(
        self,
        params: Sequence[relax.Var],
        bindings: Sequence[relax.Binding],
        result: relax.Expr,
        attrs: Any,
    ) -> relax.Function:
        body = relax.SeqExpr([relax.BindingBlock(bindings)], result)
        function = relax.Function(
            params, normalized(params, body), is_pure=self._is_pure, attrs=attrs
        )
        return copy_with_new_vars(in_dataflow(function))


def _operands(value: relax.Expr) -> list[relax.Var]:
    """Return the variables that a value reads, also in branches, besides symbolic extents."""
    if isinstance(value, (relax.If, relax.SeqExpr, relax.Function)):
        return list(relax.analysis.free_vars(value))
    return [variable for variable in used(value) if not isinstance(variable.ty, PrimType)]


def _extents(binding: relax.Binding) -> list[tirx.Var]:
    """Return the symbolic extents in a binding."""
    extents = list(relax.analysis.tir_vars_in_type(binding.var.ty))
    if isinstance(binding.value, relax.Call):
        for argument in binding.value.args[:]:
            if isinstance(argument, relax.ShapeExpr):
                extents += relax.analysis.tir_vars_in_type(argument.ty)
            elif isinstance(argument, relax.Tuple):  # such as the bounds of a slice
                extents += relax.analysis.free_symbolic_vars(argument)
    return extents


def _rebuilt(kind: relax.TupleType, parts: list[relax.Var]) -> relax.Tuple:
    """Return a nested tuple of tensors, which are taken from the list."""
    fields = [
        _rebuilt(field, parts) if isinstance(field, relax.TupleType) else parts.pop(0)
        for field in kind.fields
    ]
    return relax.Tuple(fields)
