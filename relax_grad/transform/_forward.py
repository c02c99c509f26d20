"""The forward program in the form that is walked backwards: a list of bindings, calls written out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tvm import relax, tirx
from tvm.ir import GlobalVar

from ..activity import used
from ..errors import GradientError


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
        self._callers: list[str] = []

    def emit(self, seq: relax.SeqExpr) -> None:
        """Emit the bindings of a sequence."""
        for block in seq.blocks:
            for binding in block.bindings:
                self._emit_binding(binding)

    def _emit_binding(self, binding: relax.Binding) -> None:
        variable, value = binding.var, binding.value
        if isinstance(value, relax.Function):
            self._local[variable] = value
        reached = any(v in self._reached for v in self._inputs(value))
        if reached:
            self._reached.add(variable)
            function = self._callee(value)
            if function is not None:
                self._write_out(variable, value, function)
                return
            if isinstance(value, relax.If) and _has_calls(value, self._callee):
                branches = [self._branch(b) for b in (value.true_branch, value.false_branch)]
                value = self.bb.normalize(relax.If(value.cond, *branches, value.span))
                binding = relax.VarBinding(variable, value)
        self._append(binding)

    def _inputs(self, value: relax.Expr) -> Iterator[relax.Var]:
        """Yield what goes into a value; of a local function also what it takes from outside."""
        if isinstance(value, (relax.If, relax.Function)):
            inputs = relax.analysis.free_vars(value)
        else:
            inputs = [*used(value), *([value.op] if _is_call_of_variable(value) else [])]
        for variable in inputs:
            yield variable
            if variable in self._local:
                yield from self._inputs(self._local[variable])

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

    def _callee(self, value: relax.Expr) -> relax.Function | None:
        """Return the Relax function that a value calls."""
        if not isinstance(value, relax.Call):
            return None
        if isinstance(value.op, GlobalVar) and value.op in self._module.functions:
            function = self._module[value.op]
            return function if isinstance(function, relax.Function) else None
        return self._local.get(value.op) if isinstance(value.op, relax.Var) else None

    def _write_out(self, variable: relax.Var, call: relax.Call, function: relax.Function) -> None:
        name = call.op.name_hint if isinstance(call.op, GlobalVar) else call.op.name
        if name in self._callers:
            path = " calls ".join([*self._callers[self._callers.index(name) :], name])
            raise GradientError(
                f"binding {variable.name!r}: recursion cannot be differentiated: {path}; write the steps "
                "out, as a loop whose number of iterations is known when the module is built"
            )
        function = with_shapes(function, call.args)
        self._callers.append(name)
        for param, argument in zip(function.params, call.args, strict=True):
            if any(v in self._reached for v in used(argument)):
                self._reached.add(param)
            self._append(relax.VarBinding(param, argument))
        self.emit(function.body)
        self._callers.pop()
        self._append(relax.VarBinding(variable, function.body.body))


def _is_call_of_variable(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, relax.Var)


def _has_calls(value: relax.If, callee) -> bool:
    """Tell whether a branch calls a Relax function."""
    return any(
        callee(binding.value) is not None
        or (isinstance(binding.value, relax.If) and _has_calls(binding.value, callee))
        for branch in (value.true_branch, value.false_branch)
        for block in branch.blocks
        for binding in block.bindings
    )


def with_shapes(function: relax.Function, arguments: Sequence[relax.Expr]) -> relax.Function:
    """Return a copy of a function whose symbolic extents are those of its (first) arguments."""
    copied = relax.utils.copy_with_new_vars(function)
    known: dict[tirx.Var, tirx.PrimExpr] = {}
    for param, argument in zip(copied.params, arguments, strict=False):
        _match(param.ty, argument.ty, known)
    if not known:
        return copied
    # A function must define its symbolic variables: a parameter does that for those of the arguments.
    outer = relax.analysis.free_symbolic_vars(relax.ShapeExpr(list(known.values())))
    extents = relax.Var("extents", relax.ShapeType(list(outer)))
    whole = relax.Function(
        [extents, *copied.params], copied.body, copied.ret_ty, is_pure=copied.is_pure
    )
    bound = whole.bind_symbolic_vars(known)
    return relax.Function(bound.params[1:], bound.body, bound.ret_ty, is_pure=bound.is_pure)


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
