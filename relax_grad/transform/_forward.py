"""The forward program in the form that is walked backwards: a list of bindings, calls written out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import relax, tirx
from tvm.ir import GlobalVar

from .._compat import shapes_agree
from ..activity import used
from ..errors import GradientError
from ._branches import copy_function


class Forward:
    """Emits the forward bindings, and remembers them.

    Calls of other Relax functions that something varied goes into are written out: a gradient can be
    taken of what they do, not of a call.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Where to emit, within a block.
    module : tvm.IRModule
        Where other functions are looked up.
    sources : Collection[relax.Var]
        What is differentiated with respect to.
    """

    def __init__(self, bb: relax.BlockBuilder, module, sources: Collection[relax.Var]):
        self.bb = bb
        self.bindings: list[relax.Binding] = []
        self._module = module
        self._reached = set(sources)
        self._local: dict[relax.Var, relax.Function] = {}
        self._callers: list[tuple[relax.Function, str]] = []

    def emit(self, seq: relax.SeqExpr) -> None:
        """Emit the bindings of a sequence."""
        for block in seq.blocks:
            for binding in block.bindings:
                self._emit_binding(binding)

    def _emit_binding(self, binding: relax.Binding) -> None:
        variable, value = binding.var, binding.value
        self._remember(variable, value)
        reached = any(v in self._reached for v in _inputs(value))
        if reached:
            self._reached.add(variable)
            function = self._callee(value)
            if function is not None:
                self._write_out(variable, value, function)
                return
            if isinstance(value, relax.If) and _has_calls(value):
                branches = [self._branch(b) for b in (value.true_branch, value.false_branch)]
                value = self.bb.normalize(relax.If(value.cond, *branches, value.span))
                binding = relax.VarBinding(variable, value)
        self._append(binding)

    def _append(self, binding: relax.Binding) -> None:
        self.bb.emit_normalized(binding)
        self.bindings.append(binding)

    def _branch(self, seq: relax.SeqExpr) -> relax.SeqExpr:
        """Return a branch with its calls written out."""
        outer, self.bindings = self.bindings, []
        self.bb._begin_binding_block()
        self.emit(seq)
        block = self.bb._end_block()
        self.bindings = outer
        return relax.SeqExpr([block], seq.body)

    def _remember(self, variable: relax.Var, value: relax.Expr) -> None:
        """Take down which function a variable stands for."""
        function = self._function(value)
        if function is not None:
            self._local[variable] = function

    def _function(self, value: relax.Expr) -> relax.Function | None:
        """Return the Relax function that a value is."""
        if isinstance(value, relax.Var):
            return self._local.get(value)
        if isinstance(value, GlobalVar) and value in self._module.functions:
            value = self._module[value]
        return value if isinstance(value, relax.Function) else None

    def _callee(self, value: relax.Expr) -> relax.Function | None:
        """Return the Relax function that a value calls."""
        return self._function(value.op) if isinstance(value, relax.Call) else None

    def _write_out(self, variable: relax.Var, call: relax.Call, function: relax.Function) -> None:
        name = call.op.name_hint if isinstance(call.op, GlobalVar) else call.op.name
        known = [caller.same_as(function) for caller, _ in self._callers]
        if any(known):
            path = " calls ".join([*(name for _, name in self._callers[known.index(True) :]), name])
            raise GradientError(
                f"binding {variable.name!r}: recursion cannot be differentiated: {path}; write the steps "
                "out, as a loop whose number of iterations is known when the module is built"
            )
        self._callers.append((function, name))
        function = with_shapes(function, call.args)
        for param, argument in zip(function.params, call.args, strict=True):
            if any(v in self._reached for v in used(argument)):
                self._reached.add(param)
            self._remember(param, argument)
            self._append(relax.VarBinding(param, self._passed(argument, param)))
        self.emit(function.body)
        self._callers.pop()
        self._remember(variable, function.body.body)
        self._append(relax.VarBinding(variable, function.body.body))

    def _passed(self, argument: relax.Expr, param: relax.Var) -> relax.Expr:
        """Return an argument as what a parameter's type says, which may be more than is known of it."""
        check = relax.analysis.type_base_check(param.ty, argument.ty)
        if check == relax.analysis.BaseCheckResult.PASS:
            return argument
        if isinstance(param.ty, relax.TupleType):
            fields = [relax.Var(param.name, kind) for kind in param.ty.fields]
            elements = [self._element(argument, i) for i in range(len(fields))]
            whole = relax.Tuple(
                [self._passed(*pair) for pair in zip(elements, fields, strict=True)]
            )
            return self.bb.normalize(whole)
        known = relax.Var(param.name, param.ty)
        self._append(relax.MatchCast(known, argument, param.ty))
        return known

    def _element(self, value: relax.Expr, index: int) -> relax.Expr:
        if isinstance(value, relax.Tuple):
            return value.fields[index]
        return self.bb.normalize(relax.TupleGetItem(value, index))


def _inputs(value: relax.Expr) -> list[relax.Var]:
    return relax.analysis.free_vars(value) if isinstance(value, relax.If) else used(value)


def _has_calls(value: relax.If) -> bool:
    """Tell whether a branch calls a function that may be a Relax function."""
    return any(
        (isinstance(each, relax.Call) and isinstance(each.op, (GlobalVar, relax.Var)))
        or (isinstance(each, relax.If) and _has_calls(each))
        for branch in (value.true_branch, value.false_branch)
        for block in branch.blocks
        for each in (binding.value for binding in block.bindings)
    )


def with_shapes(function: relax.Function, arguments: Sequence[relax.Expr]) -> relax.Function:
    """Return a copy of a function whose symbolic extents are those of its (first) arguments."""
    # The copy comes first: it would give the extents of the arguments new names too.
    function = copy_function(function)
    known: dict[tirx.Var, tirx.PrimExpr] = {}
    for param, argument in zip(function.params, arguments, strict=False):
        _match(param.ty, argument.ty, known)
    if not known:
        return function
    # As a function of extents that are variables outside of it: TVM binds none that it knows not.
    dims = relax.Function([], relax.ShapeExpr(list(known.values())))
    extents = relax.Var("extents", relax.ShapeType(list(relax.analysis.free_symbolic_vars(dims))))
    widened = relax.Function(
        [extents, *function.params], function.body, function.ret_ty, function.is_pure
    )
    bound = widened.bind_symbolic_vars(known)
    return relax.Function(
        bound.params[1:], bound.body, bound.ret_ty, function.is_pure, function.attrs
    )


def bind_param(param: relax.Var, argument: relax.Expr) -> relax.Binding:
    """Return the binding of a parameter to its argument, whose extents may be less well known."""
    shape = getattr(param.ty, "shape", None)
    if isinstance(shape, relax.ShapeExpr) and not shapes_agree(param.ty, argument.ty):
        return relax.MatchCast(param, argument, param.ty)
    return relax.VarBinding(param, argument)


def _match(param, argument, known: dict) -> None:
    """Find what the symbolic extents of a parameter's type are in the type of an argument."""
    if isinstance(param, relax.TupleType) and isinstance(argument, relax.TupleType):
        for pair in zip(param.fields, argument.fields, strict=True):
            _match(*pair, known)
        return
    dims = [_dims(ty) for ty in (param, argument)]
    if None in dims or len(dims[0]) != len(dims[1]):
        return
    for dim, found in zip(*dims, strict=True):
        if isinstance(dim, tirx.Var):
            known.setdefault(dim, found)


def _dims(ty) -> list | None:
    if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        return list(ty.shape.values)
    if isinstance(ty, relax.ShapeType) and ty.values is not None:
        return list(ty.values)
    return None
