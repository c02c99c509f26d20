"""Reverse-mode automatic differentiation of Relax functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tvm
from tvm import relax
from tvm.ir import GlobalVar

from .._compat import dtype_of
from .._module import relax_function
from ..activity import bindings_of, expanded, holds_floats, used, varied
from ..coverage import obstacles
from ..errors import GradientError
from ._branches import lift_branches
from ._checkpoint import Checkpoints, has_markers, with_value
from ._forward import Forward
from ._reverse import Reverse
from ._simplify import simplify


@tvm.transform.module_pass(opt_level=0, name="relax_grad.Gradient")
class Gradient:
    """Add to a module the function that returns a function's result and its gradients.

    The arguments and the result are those of ``relax.transform.Gradient``: the new function is named
    ``<func_name>_adjoint``, takes the same parameters, and returns ``(original result, (gradients...))``.
    It takes what that pass refuses: symbolic shapes anywhere, ``match_cast``, several blocks, ``if``,
    calls of other functions of the module and of local functions, tuples, results that are no scalars
    (with ``cotangents``), bfloat16, and parameters of integers, shapes and objects.

    Parameters
    ----------
    func_name : str
        The function to differentiate.
    require_grads : relax.Var or Sequence[relax.Var], optional
        The parameters or intermediate variables of the function to differentiate with respect to; by
        default every parameter that holds floating-point tensors.
    target_index : int or Sequence[int] or None
        Which element of the result is differentiated, where the result is a tuple; several integers lead
        into nested tuples, and None stands for the whole result.
    cotangents : bool
        False differentiates a scalar, or a tensor of one element. True adds a parameter to the new
        function for each floating-point tensor of the target: what its gradient is multiplied with, as in
        a vector-Jacobian product.
    allow_zero : Sequence[str]
        Operators that count as constants, whatever their gradients are.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax, tirx
    >>> n = tirx.Var("n", "int64")
    >>> x = relax.Var("x", relax.TensorType((n, 4), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     rows = bb.emit(relax.op.reshape(x, (n * 2, 2)))
    ...     loss = bb.emit(relax.op.sum(relax.op.exp(rows)))
    ...     _ = bb.emit_func_output(loss)
    >>> module = relax_grad.transform.Gradient("main")(bb.get())
    >>> module["main_adjoint"].ret_ty.fields[1].fields[0]
    R.Tensor((n, 4), dtype="float32")
    """

    def __init__(
        self,
        func_name: str,
        require_grads: relax.Var | Sequence[relax.Var] | None = None,
        target_index: int | Sequence[int] | None = 0,
        *,
        cotangents: bool = False,
        allow_zero: Sequence[str] = (),
    ):
        if isinstance(require_grads, relax.Var):
            require_grads = [require_grads]
        self.func_name = func_name
        self.require_grads = None if require_grads is None else list(require_grads)
        self.target_index = (target_index,) if isinstance(target_index, int) else target_index
        self.cotangents = cotangents
        self.allow_zero = frozenset(allow_zero)

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Differentiation(self, mod).module()


class _Differentiation:
    """One function on its way to its adjoint function."""

    def __init__(self, settings: Gradient, mod: tvm.IRModule):
        self._settings = settings
        self._mod = mod
        function = relax_function(mod, settings.func_name)
        # One dataflow block stays one. What is more than that is put in order afterwards.
        self._is_plain = _is_plain(function)
        if self._is_plain:
            self._function, renamed = function, {}
        else:
            self._function, renamed = _without_dataflow(mod, settings.func_name)
        self._wrt = self._check_require_grads(function, renamed)

    def module(self) -> tvm.IRModule:
        """Return the module with the adjoint function."""
        settings, function = self._settings, self._function
        bindings = self._forward_bindings()
        checkpoints = None
        wrt = self._wrt
        if has_markers(bindings):
            checkpoints = Checkpoints(bindings, function.params)
            bindings = checkpoints.bindings
            wrt = [checkpoints.original(variable) for variable in wrt]
        result = function.body.body
        target = _target(result, bindings, settings, wrt)
        everything = list(expanded(bindings))
        active = varied(everything, wrt, settings.allow_zero)
        _check_gradients(everything, active, target, settings)

        bb = relax.BlockBuilder(self._mod)
        seeds, cotangents = _seeds(target, settings)
        bb.begin_scope([*function.params, *cotangents])
        bb._begin_dataflow_block() if self._is_plain else bb._begin_binding_block()
        for binding in bindings:
            bb.emit_normalized(with_value(binding, bb.normalize(binding.value)))
        reverse = Reverse(bb, active, checkpoints, settings.allow_zero)
        for expr, seed in seeds:
            if any(variable in active for variable in used(expr)):
                reverse.add(expr, seed)
        reverse.walk(bindings)
        gradients = [self._output(bb, reverse, variable) for variable in wrt]
        block = bb._end_block()
        body = relax.SeqExpr([block], relax.Tuple([result, relax.Tuple(gradients)]))
        adjoint = relax.Function(
            [*function.params, *cotangents],
            bb.normalize(body),
            is_pure=function.is_pure,
            attrs=function.attrs,
        )
        bb.end_scope()
        return self._finish(bb, adjoint)

    def _forward_bindings(self) -> list[relax.Binding]:
        """Return the bindings of the function, the calls of functions written out."""
        body = self._function.body
        if self._is_plain:
            return list(body.blocks[0].bindings)
        scratch = relax.BlockBuilder(self._mod)
        scratch.begin_scope(list(self._function.params))
        scratch._begin_binding_block()
        forward = Forward(scratch, _to_nondataflow(self._mod), self._wrt)
        forward.emit(body)
        scratch._end_block()
        scratch.end_scope()
        return forward.bindings

    def _check_require_grads(self, function: relax.Function, renamed: dict) -> list[relax.Var]:
        """Return the variables to differentiate with respect to, as the flattened function has them."""
        wanted = self._settings.require_grads
        if wanted is None:
            return [param for param in self._function.params if _has_gradient(param.ty)]
        name = self._settings.func_name
        known = {*function.params, *(b.var for b in _own_bindings(function))}
        for i, variable in enumerate(wanted):
            if not isinstance(variable, relax.Var) or variable not in known:
                raise ValueError(f"require_grads: {variable} is no variable of {name}")
            if variable in wanted[:i]:
                raise ValueError(f"require_grads: {variable.name} appears more than once")
            if not _has_gradient(variable.ty):
                raise ValueError(
                    f"require_grads: only tensors of floating-point numbers and tuples of them have "
                    f"gradients, but the type of {variable.name} is {variable.ty}"
                )
        return [renamed.get(variable, variable) for variable in wanted]

    def _output(self, bb: relax.BlockBuilder, reverse: Reverse, variable: relax.Var) -> relax.Expr:
        adjoint = reverse.adjoint(variable)
        total = adjoint.total(bb, f"{variable.name}_adjoint")
        total = adjoint.zeros(bb) if total is None else total
        name = f"{variable.name}_adjoint_out"
        return bb.emit_output(total, name) if self._is_plain else bb.emit(total, name)

    def _finish(self, bb: relax.BlockBuilder, adjoint: relax.Function) -> tvm.IRModule:
        name = f"{self._settings.func_name}_adjoint"
        adjoint = simplify(adjoint)
        if not self._is_plain:
            adjoint = lift_branches(bb, adjoint, name)
            alone = tvm.IRModule({GlobalVar("adjoint"): adjoint})
            # The elements of known tuples are replaced first: done by ConvertToDataflow itself, what
            # replaces them is no output of its block.
            alone = relax.transform.CanonicalizeBindings()(alone)
            adjoint = relax.transform.ConvertToDataflow(1)(alone)["adjoint"]
            adjoint = relax.analysis.remove_all_unused(adjoint)
        adjoint = relax.utils.copy_with_new_vars(adjoint)
        bb.add_func(adjoint.with_attr("global_symbol", name), name)
        return bb.get()


def _has_gradient(kind: relax.Type) -> bool:
    """Tell whether a variable can be differentiated with respect to: an object cannot."""
    return holds_floats(kind) and not isinstance(kind, relax.ObjectType)


def _own_bindings(function: relax.Function) -> list[relax.Binding]:
    """Return the bindings of a function but those within branches."""
    return [binding for block in function.body.blocks for binding in block.bindings]


def _is_plain(function: relax.Function) -> bool:
    """Tell whether a function is one dataflow block without calls of other Relax functions."""
    blocks = function.body.blocks
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return False
    return not any(
        isinstance(binding.value, relax.Function)
        or (
            isinstance(binding.value, relax.Call)
            and isinstance(binding.value.op, (GlobalVar, relax.Var))
        )
        for binding in blocks[0].bindings
    )


def _to_nondataflow(mod: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.ToNonDataflow()(mod)


def _without_dataflow(mod: tvm.IRModule, name: str) -> tuple[relax.Function, dict]:
    """Return a function without dataflow blocks, and its variables by those that they stand for."""
    before, after = mod[name], _to_nondataflow(mod)[name]
    renamed = {}
    copies = bindings_of(after.body)
    for old in bindings_of(before.body):
        new = next(copies)
        while isinstance(old, relax.MatchCast) and not isinstance(new, relax.MatchCast):
            new = next(copies)  # before it, what it casts has been bound
        renamed[old.var] = new.var
    renamed.update(zip(before.params, after.params, strict=True))
    return after, renamed


def _target(
    result: relax.Expr,
    bindings: Sequence[relax.Binding],
    settings: Gradient,
    wrt: Collection[relax.Var],
) -> relax.Expr:
    """Return what is differentiated, by what it stands for up to the variables of ``wrt``."""
    path = settings.target_index or ()
    if path == (0,) and not isinstance(result.ty, relax.TupleType):
        return result
    bound = {binding.var: binding.value for binding in bindings}
    target = result
    for index in path:
        kind = _type(target)
        count = len(kind.fields) if isinstance(kind, relax.TupleType) else 0
        if not 0 <= index < count:
            found = f"a tuple of {count} elements" if count else "one value"
            raise ValueError(
                f"target_index: {index} is no element of what {settings.func_name} returns there, "
                f"{found} of type {kind}"
            )
        while target not in wrt and isinstance(bound.get(target), (relax.Var, relax.Tuple)):
            target = bound[target]
        is_tuple = isinstance(target, relax.Tuple)
        target = target.fields[index] if is_tuple else relax.TupleGetItem(target, index)
    return target


def _seeds(
    target: relax.Expr, settings: Gradient
) -> tuple[list[tuple[relax.Expr, relax.Expr]], list[relax.Var]]:
    """Return what the adjoints of the target begin with, and the parameters added for that."""
    if settings.cotangents:
        seeds = [
            (leaf, relax.Var(f"cotangent{i}", _type(leaf)))
            for i, leaf in enumerate(_float_leaves(target))
        ]
        if not seeds:
            raise GradientError(
                f"the target must hold floating-point tensors, but it is {_type(target)}"
            )
        return seeds, [variable for _, variable in seeds]
    kind = _type(target)
    if not isinstance(kind, relax.TensorType) or not holds_floats(kind):
        raise GradientError(
            f"the target must be one floating-point tensor, but its type is {kind}; choose one with "
            "target_index, or pass cotangents=True to differentiate several"
        )
    shape = kind.shape
    is_one = isinstance(shape, relax.ShapeExpr) and all(
        isinstance(dim, tvm.tirx.IntImm) and int(dim) == 1 for dim in shape.values
    )
    if not is_one:
        raise GradientError(
            f"the target must be a scalar or have one element, but its type is {kind}; reduce it, for "
            "example by relax.op.sum, or pass cotangents=True for a vector-Jacobian product"
        )
    return [(target, relax.op.ones(shape, dtype_of(kind)))], []


def _float_leaves(expr: relax.Expr) -> list[relax.Expr]:
    """Return each floating-point tensor of a (nested) expression."""
    kind = _type(expr)
    if isinstance(kind, relax.TupleType):
        fields = (
            expr.fields
            if isinstance(expr, relax.Tuple)
            else [relax.TupleGetItem(expr, i) for i in range(len(kind.fields))]
        )
        return [leaf for field in fields for leaf in _float_leaves(field)]
    return [expr] if isinstance(kind, relax.TensorType) and holds_floats(kind) else []


def _type(expr: relax.Expr) -> relax.Type:
    if isinstance(expr, relax.TupleGetItem):
        return _type(expr.tuple_value).fields[expr.index]
    return expr.ty


def _check_gradients(
    bindings: Sequence[relax.Binding],
    active: Collection[relax.Var],
    target: relax.Expr,
    settings: Gradient,
) -> None:
    """Refuse a function that has no gradient somewhere on the way, and say where it has none."""
    missing = obstacles(bindings, active, target, settings.allow_zero)
    if missing:
        raise GradientError(
            f"{settings.func_name} cannot be differentiated, as {len(missing)} of its bindings have no "
            "gradient:\n"
            + "\n".join(f"- {each}" for each in missing)
            + "\nRegister a rule with relax_grad.register_gradient, or name operators in allow_zero to "
            "treat them as constants."
        )
