"""The backward pass: a walk over the bindings from the last to the first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import tvm_ffi
from tvm import relax
from tvm.ir import Op

from ..activity import holds_floats, useful, varied
from ..errors import GradientError
from ..ir.bindings import bindings_of, element, expanded, used
from ..ir.branches import copy_branch, without_effects
from ..ir.compat import shapes_agree
from ..ir.module import adjoint_name, is_known, tuple_fields
from ..ir.partials import check_partial, failing_as, is_no_grad
from ..registry import apply_rule
from ..tir.call import TensorFunctions, float_arguments, is_call, partials
from ._adjoint import Adjoint, adjoint_type
from ._checkpoint import Checkpoints, is_marker

#: Contributions to elements of nested tuples, each with its indices.
Parts = Sequence[tuple[tuple[int, ...], relax.Expr]]

_WITH_GRAD = Op.get("relax.call_tir_with_grad")


class Reverse:
    """Accumulates adjoints and emits their computation.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder to emit into; a block must be open.
    active : Collection[relax.Var]
        The variables whose adjoints are wanted; contributions to others are dropped.
    checkpoints : Checkpoints, optional
        The checkpoints, which decide the recomputed values.
    constants : Collection[str]
        Operators that count as constants.
    functions : TensorFunctions, optional
        The tensor functions of the module; by default the functions of the builder's module.
    """

    def __init__(
        self,
        bb: relax.BlockBuilder,
        active: Collection[relax.Var],
        checkpoints: Checkpoints | None = None,
        constants: Collection[str] = (),
        functions: TensorFunctions | None = None,
    ):
        self._bb = bb
        self._functions = functions or TensorFunctions(bb.get())
        self._active = active
        self._checkpoints = checkpoints
        self._constants = constants
        self._adjoints: dict[relax.Var, Adjoint] = {}

    def adjoint(self, variable: relax.Var) -> Adjoint:
        """Return the adjoint of a variable as accumulated up to here."""
        if variable not in self._adjoints:
            self._adjoints[variable] = Adjoint(variable, variable.ty)
        return self._adjoints[variable]

    def add(self, expr: relax.Expr, partial: relax.Expr) -> None:
        """Add a contribution to the adjoint of each variable in an expression."""
        expr = _written_out(expr)
        if isinstance(expr, relax.Tuple):
            if is_no_grad(partial):
                return
            if not isinstance(partial, (relax.Tuple, relax.Var)):
                partial = self._bb.emit(partial)
            for i, field in enumerate(expr.fields):
                if self._is_wanted(field):
                    self.add(field, element(partial, i))
            return
        adjoint = self._find(expr)
        if adjoint is not None:
            adjoint.add(self._bb, partial)

    def walk(self, bindings: Sequence[relax.Binding]) -> None:
        """Propagate adjoints from the variables of bindings to the operands of their values."""
        for binding in reversed(bindings):
            variable, value = binding.var, binding.value
            if variable not in self._active or variable not in self._adjoints:
                continue
            adjoint, name = self._adjoints[variable], adjoint_name(variable)
            if is_call(value) and value.op.name not in self._constants:
                self._tensor_function(variable, value, adjoint.parts(self._bb, name))
            elif isinstance(value, relax.Call):
                total = adjoint.total(self._bb, name)
                is_constant = isinstance(value.op, Op) and value.op.name in self._constants
                if total is not None and not is_constant:
                    self._call(variable, value, total)
                continue
            parts = adjoint.parts(self._bb, name)
            if isinstance(value, relax.If):
                self._conditional(value, parts)
            else:  # match_cast, a tuple, an element of one, another variable
                self._add_parts(value, parts)

    def _add_parts(self, expr: relax.Expr, parts: Parts) -> None:
        """Add contributions to the elements of an expression."""
        for path, total in parts:
            part = _at(expr, path)
            self.add(part, self._of_type(total, part.ty))

    def _of_type(self, total: relax.Expr, wanted: relax.Type) -> relax.Expr:
        """Reshape a contribution to the extents of the forward variable, which rules expect.

        A match_cast may have given it others. A second match_cast is no substitute for the reshape:
        TVM 0.26 frees the storage of known size that a match_cast refers to.
        """
        shape = getattr(wanted, "shape", None)
        if not isinstance(shape, relax.ShapeExpr) or shapes_agree(total.ty, wanted):
            return total
        return self._bb.emit(relax.op.reshape(total, shape))

    def _find(self, expr: relax.Expr) -> Adjoint | None:
        """Return the adjoint of a variable or of an element of a tuple; None where it is not
        wanted."""
        if isinstance(expr, relax.TupleGetItem):
            whole = self._find(expr.tuple_value)
            return None if whole is None else whole.field(self._bb, expr.index)
        return self.adjoint(expr) if expr in self._active else None

    def _call(self, variable: relax.Var, call: relax.Call, total: relax.Expr) -> None:
        if not self._is_wanted(call):
            return
        if is_marker(call):  # within a branch, which is recomputed as a whole
            self.add(call.args[0], total)
            return
        rule = call.op.get_attr("FPrimalGradient") if isinstance(call.op, Op) else None
        if not isinstance(total, relax.Var):
            total = self._bb.emit(total, adjoint_name(variable))
        seen, seen_call = variable, call
        if self._checkpoints is not None:
            seen, seen_call = self._checkpoints.recomputed(self._bb, variable, call)
        if call.op == _WITH_GRAD:
            self._call_tir(seen, seen_call, call.args[1], total)
            return
        if rule is None:
            raise GradientError(f"binding {variable.name!r}: {call.op} has no gradient")
        partials = apply_rule(
            rule,
            seen,
            seen_call,
            total,
            self._bb,
            arguments=list(call.args),
            is_wanted=self._is_wanted,
        )
        for argument, partial in zip(call.args, partials, strict=True):
            self.add(argument, partial)

    def _tensor_function(self, variable: relax.Var, call: relax.Call, parts: Parts) -> None:
        """Add the gradients of the arguments of a tensor function."""
        arguments = tuple_fields(call.args[1])
        wrt = [i for i in float_arguments(call) if self._is_wanted(arguments[i])]
        if not wrt or not parts:
            return
        cotangents = {
            path[0] if path else 0: total if isinstance(total, relax.Var) else self._bb.emit(total)
            for path, total in parts
        }
        seen, seen_call = variable, call
        if self._checkpoints is not None:
            seen, seen_call = self._checkpoints.recomputed(self._bb, variable, call)
        name = call.args[0].name_hint
        with failing_as(f"gradient of {name}, binding {variable.name!r}"):
            by_argument = partials(self._functions, self._bb, seen, seen_call, cotangents, wrt=wrt)
        for i, partial in by_argument.items():
            self.add(arguments[i], partial)

    def _call_tir(
        self, variable: relax.Var, call: relax.Call, arguments: relax.Tuple, total: relax.Var
    ) -> None:
        """Add the partials of the function that was registered with register_te_gradient."""
        rule = tvm_ffi.get_global_func(
            f"tvm.relax.te_grad._register.{call.attrs.te_grad_name}", allow_missing=True
        )
        if rule is None:
            raise GradientError(
                f"binding {variable.name!r}: no gradient is registered as "
                f"{call.attrs.te_grad_name!r}; register one with "
                "tvm.relax.training.utils.register_te_gradient"
            )
        name, bb = call.attrs.te_grad_name, self._bb
        with failing_as(f"gradient of {name}, binding {variable.name!r}"):
            partials = rule(variable, call, total, bb)
            is_tuple = isinstance(getattr(partials, "ty", None), relax.TupleType)
            # For a call with one argument the rule may return a tensor instead of a tuple.
            argument = arguments if is_tuple or len(arguments) != 1 else arguments[0]
            partials = check_partial(bb, partials, argument, self._is_wanted)
        self.add(argument, partials)

    def _is_wanted(self, argument: relax.Expr) -> bool:
        return any(variable in self._active for variable in used(argument))

    def _conditional(self, value: relax.If, parts: Parts) -> None:
        """Emit a conditional that runs the adjoint of the taken branch and recomputes its forward
        bindings."""
        branches = value.true_branch, value.false_branch
        # Variables that only unused results of a branch depend on get no contribution, not even
        # zeros.
        needed = {variable for branch in branches for variable in self._needed(branch, parts)}
        inputs = [
            variable
            for variable in relax.analysis.free_vars(value)
            if variable in self._active
            and variable in needed
            and not isinstance(variable.ty, relax.FuncType)
        ]
        if not inputs:
            return
        adjoints = [self._branch(branch, inputs, parts) for branch in branches]
        gradients = self._bb.emit(relax.If(value.cond, *adjoints))
        for i, variable in enumerate(inputs):
            gradient, wanted = element(gradients, i), adjoint_type(variable.ty)
            # The type of a conditional may lack extents.
            if holds_floats(wanted) and not is_known(gradient.ty, wanted):
                gradient = self._bb.match_cast(gradient, wanted)
            self.add(variable, gradient)

    def _needed(self, branch: relax.SeqExpr, parts: Parts) -> set[relax.Var]:
        """Return the variables on which the given parts of a branch's result depend."""
        target = relax.Tuple([_at(branch.body, path) for path, _ in parts])
        return useful(list(bindings_of(branch)), target, self._constants)

    def _branch(
        self, branch: relax.SeqExpr, inputs: Sequence[relax.Var], parts: Parts
    ) -> relax.SeqExpr:
        """Return the adjoint of a branch: a branch that computes the adjoints of ``inputs``."""
        body = copy_branch(self._bb.normalize(without_effects(branch)))
        bindings = [binding for block in body.blocks[:] for binding in block.bindings[:]]
        self._bb._begin_binding_block()
        for binding in bindings:
            self._bb.emit_normalized(binding)
        reverse = Reverse(
            self._bb,
            varied(expanded(bindings), inputs, self._constants),
            constants=self._constants,
            functions=self._functions,
        )
        reverse._add_parts(body.body, parts)
        reverse.walk(bindings)
        gradients = [
            self._bb.emit(_or_zeros(reverse.adjoint(variable), self._bb)) for variable in inputs
        ]
        result = self._bb.emit(relax.Tuple(gradients))
        return relax.SeqExpr([self._bb._end_block()], result)


def _at(expr: relax.Expr, path: Iterable[int]) -> relax.Expr:
    """Return the element of nested tuples at a path of indices."""
    for index in path:
        expr = element(expr, index)
    return expr


def _written_out(expr: relax.Expr) -> relax.Expr:
    """Replace element access into a literal tuple by the element, at any depth."""
    if not isinstance(expr, relax.TupleGetItem):
        return expr
    whole = _written_out(expr.tuple_value)
    part = element(whole, expr.index)
    return _written_out(part) if isinstance(whole, relax.Tuple) else part


def _or_zeros(adjoint: Adjoint, bb: relax.BlockBuilder) -> relax.Expr:
    total = adjoint.total(bb, adjoint_name(adjoint.expr))
    if total is not None:
        return total
    if not holds_floats(adjoint.type):  # quantized: the gradient belongs to the encoded numbers
        return relax.op.zeros_like(adjoint.expr, "float32")
    return adjoint.zeros(bb)
