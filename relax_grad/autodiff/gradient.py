"""Reverse-mode automatic differentiation of Relax functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

import tvm
from tvm import relax
from tvm.ir import GlobalVar

from ..activity import has_gradient, holds_floats, varied
from ..errors import GradientError
from ..ir.aliases import may_write, writing_functions
from ..ir.bindings import bindings_of, element, expanded, used, with_value, without_unused
from ..ir.branches import lift_branches
from ..ir.choices import Choices
from ..ir.compat import dtype_of
from ..ir.dataflow import in_dataflow, without_cast
from ..ir.loops import canonicalize_loops
from ..ir.module import (
    ModulePass,
    adjoint_name,
    check_defined,
    copy_with_new_vars,
    ending_blocks,
    relax_function,
)
from ..ir.shared_values import share_values
from ..registry import is_operator
from ..tir.call import TensorFunctions
from ..tir.recognise import with_operators
from ._checkpoint import Checkpoints, has_markers
from ._checks import check_closed, check_gradients, check_unchanged
from ._cotangents import Cotangents, seeds
from ._forward import Forward, may_call
from ._reverse import Reverse
from ._simplify import simplify
from .obstacles import MissingGradient, obstacles


@tvm.transform.module_pass(opt_level=0, name="relax_grad.Gradient")
class Gradient(ModulePass):
    """A pass that adds the adjoint of a function, which returns its result and gradients.

    The arguments and the result are as in ``relax.transform.Gradient``: the new function is
    named ``<func_name>_adjoint``, takes the same parameters, and returns
    ``(original result, (gradients...))``. This pass also accepts programs that TVM's pass rejects:
    symbolic shapes anywhere, ``match_cast``, several blocks, ``if``, calls of other functions of
    the module and of local functions, tuples, non-scalar results (with ``cotangents``), bfloat16,
    and parameters of integers, shapes and objects.

    Parameters
    ----------
    func_name : str
        The function to differentiate.
    require_grads : relax.Var or str or Sequence[relax.Var or str], optional
        The parameters or intermediate variables of the function to differentiate with respect to,
        as variables or names; by default every parameter that holds floating-point tensors.
    target_index : int or Sequence[int] or None
        The index of the differentiated element, where the result is a tuple. Several integers index
        nested tuples; None stands for the whole result.
    cotangents : bool or str or float or array or relax.Expr or (nested) sequence of them
        False differentiates a scalar, or a tensor of one element. Any other value gives a cotangent
        to each floating-point tensor of the target, as the vector of a vector-Jacobian product.
        True adds a parameter to the new function for each cotangent, and a string adds one
        parameter of that name. A number stands for a tensor filled with it. An array, a constant or
        a variable of the function must have the type of the tensor.
    allow_zero : str or Collection[str]
        Operators that count as constants, even if they have gradients.

    Raises
    ------
    TypeError
        If ``target_index`` holds values other than integers, ``require_grads`` values other than
        variables and names, or ``func_name`` is not a Relax function.
    ValueError
        If the module has no such function, has its adjoint already, or an argument names something
        unknown.
    GradientError
        If the target has more than one element and there are no cotangents, or if a gradient is
        missing.

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
        require_grads: relax.Var | str | Sequence[relax.Var | str] | None = None,
        target_index: int | Sequence[int] | None = 0,
        *,
        cotangents: Cotangents = False,
        allow_zero: str | Collection[str] = (),
    ):
        self.func_name = func_name
        self.require_grads = as_variables(require_grads, "require_grads")
        self.target_index = _path(target_index)
        self.cotangents = cotangents
        self.allow_zero = _operators(allow_zero)

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return add_adjoint(mod, self, f"{self.func_name}_adjoint")


def add_adjoint(mod: tvm.IRModule, settings: Gradient, name: str) -> tvm.IRModule:
    """Return the module with the adjoint function that ``settings`` describe, under the name
    ``name``."""
    differentiation = _Differentiation(settings, mod)
    if name in (variable.name_hint for variable in mod.get_global_vars()):
        raise ValueError(
            f"the module has a function {name} already; rename or remove it, as this is the name "
            f"of the adjoint function of {settings.func_name}"
        )
    return differentiation.module(name)


def missing(mod: tvm.IRModule, settings: Gradient, argument: str) -> list[MissingGradient]:
    """Return each binding that lacks a gradient needed for the adjoint function.

    ``argument`` is the name of ``require_grads`` in errors.
    """
    return _Differentiation(settings, mod, argument).missing


def as_variables(
    wrt: relax.Var | str | Sequence[relax.Var | str] | None, argument: str
) -> list[relax.Var | str] | None:
    """Return variables or names of variables as a list, or raise a TypeError that names the
    argument."""
    if wrt is None:
        return None
    if isinstance(wrt, (relax.Var, str)):
        return [wrt]
    if not isinstance(wrt, Iterable):
        raise TypeError(f"{argument} must be variables or names of variables, but it is {wrt!r}")
    return list(wrt)


def _path(target_index: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return ``target_index`` as a tuple of indices into nested tuples."""
    if target_index is None:
        return ()
    is_sequence = isinstance(target_index, Sequence) and not isinstance(target_index, str)
    try:
        path = cast(Sequence[int], target_index if is_sequence else [target_index])
        if any(isinstance(index, bool) for index in path):
            raise TypeError
        return tuple(map(operator.index, path))
    except TypeError:
        raise TypeError(
            "target_index must be an integer, a sequence of integers, or None, but it is "
            f"{target_index!r}"
        ) from None


def _operators(names: str | Collection[str]) -> frozenset[str]:
    """Return the names of ``allow_zero`` as a set, or raise for an unknown operator."""
    if not isinstance(names, (str, Collection)):
        raise TypeError(f"allow_zero must be names of operators, but it is {names!r}")
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if not isinstance(name, str) or not is_operator(name)]
    if unknown:
        raise ValueError(
            f"allow_zero: this TVM has no operator named {', '.join(sorted(map(str, unknown)))}"
        )
    return frozenset(names)


class _Differentiation:
    """The differentiation of one function.

    Attributes
    ----------
    missing : list[MissingGradient]
        The bindings that prevent it for lack of a gradient.
    """

    def __init__(self, settings: Gradient, mod: tvm.IRModule, argument: str = "require_grads"):
        self._settings = settings
        self._argument = argument
        check_defined(mod, relax_function(mod, settings.func_name), settings.func_name)
        # TVM's default pipeline compiles other loops wrongly.
        self._mod = mod = share_values(canonicalize_loops(mod))
        # The other functions of the result stay as they are.
        self._source = mod = with_operators(mod)
        function = mod[settings.func_name]
        # A function of one dataflow block keeps that form. Any other is brought into it at the end.
        self._is_plain = _is_plain(function)
        self._renamed: dict[relax.Var, relax.Var] = {}
        if self._is_plain:
            self._function = function
        else:
            self._function, self._renamed = _without_dataflow(mod, settings.func_name)
        variables = [*function.params, *(binding.var for binding in _own_bindings(function))]
        candidates = [(variable.name, variable) for variable in variables]
        self._choices = Choices(settings.func_name, "variable", candidates)
        self._wrt = self._check_require_grads()
        self._bindings = [without_cast(binding) for binding in self._forward_bindings()]
        self._checkpoints = None
        self._unmarked: Callable[[relax.Var], relax.Var] = _same
        if has_markers(self._bindings):
            self._checkpoints = Checkpoints(self._bindings, self._function.params)
            self._bindings = self._checkpoints.bindings
            self._unmarked = self._checkpoints.original
            self._wrt = [self._unmarked(variable) for variable in self._wrt]
        self._target = _target(self._function.body.body, self._bindings, settings, self._wrt)
        everything = list(expanded(self._bindings))
        self._active = varied(everything, self._wrt, settings.allow_zero)
        self._functions = TensorFunctions(mod)
        self.missing = obstacles(
            everything, self._active, self._target, settings.allow_zero, self._functions
        )

    def module(self, name: str) -> tvm.IRModule:
        """Return the module with the adjoint function under the name ``name``."""
        check_gradients(self.missing, self._settings.func_name)
        bb = relax.BlockBuilder(self._mod)
        with ending_blocks(bb):
            return self._adjoint(bb, name)

    def _adjoint(self, bb: relax.BlockBuilder, name: str) -> tvm.IRModule:
        function, active = self._function, self._active
        initial, cotangents = self._seeds()
        erased = _erased(function.params, cotangents)
        cotangents = [erased.get(cotangent, cotangent) for cotangent in cotangents]
        bb.begin_scope([*function.params, *cotangents])
        bb._begin_dataflow_block() if self._is_plain else bb._begin_binding_block()
        for binding in self._bindings:
            bb.emit_normalized(with_value(binding, bb.normalize(binding.value)))
        reverse = Reverse(bb, active, self._checkpoints, self._settings.allow_zero, self._functions)
        cast = {known: bb.match_cast(param, known.ty) for known, param in erased.items()}
        for expr, seed in initial:
            if isinstance(seed, relax.Var):
                seed = cast.get(seed, seed)
            if any(variable in active for variable in used(expr)):
                reverse.add(expr, seed)
        reverse.walk(self._bindings)
        gradients = [self._output(bb, reverse, variable) for variable in self._wrt]
        block = bb._end_block()
        results = relax.Tuple([function.body.body, relax.Tuple(gradients)])
        body = relax.SeqExpr([block], results)
        adjoint = relax.Function(
            [*function.params, *cotangents],
            bb.normalize(body),
            is_pure=function.is_pure,
            attrs=function.attrs,
        )
        bb.end_scope()
        check_closed(adjoint, name)
        return self._finish(bb, adjoint, name)

    def _forward_bindings(self) -> list[relax.Binding]:
        """Return the bindings of the function with calls of other functions inlined."""
        body = self._function.body
        if self._is_plain:
            return list(body.blocks[0].bindings)
        scratch = relax.BlockBuilder(self._source)
        scratch.begin_scope(list(self._function.params))
        scratch._begin_binding_block()
        forward = Forward(scratch, _to_nondataflow(self._source), self._wrt)
        forward.emit(body)
        scratch._end_block()
        scratch.end_scope()
        return forward.bindings

    def _check_require_grads(self) -> list[relax.Var]:
        """Return the variables to differentiate with respect to, as variables of the flattened
        function."""
        wanted = self._settings.require_grads
        if wanted is None:
            return [param for param in self._function.params if has_gradient(param.ty)]
        selected = self._choices.select(self._argument, wanted)
        for variable in selected:
            if not has_gradient(variable.ty):
                raise ValueError(
                    f"{self._argument}: only tensors of floating-point numbers and tuples of "
                    f"them have gradients, but the type of {variable.name} is {variable.ty}"
                )
        return [self._renamed.get(variable, variable) for variable in selected]

    def _own(self, item: relax.Var | str, argument: str) -> relax.Var:
        """Return the variable of the flattened function for a variable, or its name, of the
        original."""
        variable = self._choices.find(argument, item)
        return self._renamed.get(variable, variable)

    def _seeds(self) -> tuple[list, list[relax.Var]]:
        """Return the initial adjoints of the target, and the parameters added for cotangents."""
        target = self._target
        if self._settings.cotangents is False:
            return [(target, _one(target))], []
        leaves = _float_leaves(target)
        if not leaves:
            raise GradientError(
                f"the target must hold floating-point tensors, but it is {target.ty}"
            )
        return seeds(
            leaves,
            [leaf.ty for leaf in leaves],
            self._settings.cotangents,
            lambda variable: self._unmarked(self._own(variable, "cotangents")),
            [param.name for param in self._function.params],
        )

    def _output(self, bb: relax.BlockBuilder, reverse: Reverse, variable: relax.Var) -> relax.Expr:
        adjoint = reverse.adjoint(variable)
        total = adjoint.total(bb, adjoint_name(variable))
        total = adjoint.zeros(bb) if total is None else total
        name = f"{adjoint_name(variable)}_out"
        return bb.emit_output(total, name) if self._is_plain else bb.emit(total, name)

    def _finish(self, bb: relax.BlockBuilder, adjoint: relax.Function, name: str) -> tvm.IRModule:
        writers: set[GlobalVar] = set()
        if any(may_write(binding.value) for binding in bindings_of(adjoint.body)):
            writers = writing_functions(self._mod)
        has_writes = any(may_write(binding.value, writers) for binding in bindings_of(adjoint.body))
        adjoint = simplify(adjoint, has_writes)
        if has_writes:
            forward = {binding.var for binding in expanded(self._bindings)}
            check_unchanged(adjoint, forward, self._active, writers, self._settings.func_name)
        if not self._is_plain:
            adjoint = in_dataflow(lift_branches(bb, adjoint, name))
            adjoint = without_unused(adjoint)
        adjoint = copy_with_new_vars(adjoint)
        bb.add_func(adjoint.with_attr("global_symbol", name), name)
        return bb.get()


def _same(variable: relax.Var) -> relax.Var:
    return variable


def _own_bindings(function: relax.Function) -> list[relax.Binding]:
    """Return the bindings of a function, except those within branches."""
    return [binding for block in function.body.blocks[:] for binding in block.bindings[:]]


def _is_plain(function: relax.Function) -> bool:
    """Tell whether a function is one dataflow block without calls of other Relax functions."""
    blocks = function.body.blocks
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return False
    values = [binding.value for binding in blocks[0].bindings]
    return not any(isinstance(value, relax.Function) or may_call(value) for value in values)


def _to_nondataflow(mod: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.ToNonDataflow()(mod)


def _without_dataflow(mod: tvm.IRModule, name: str) -> tuple[relax.Function, dict]:
    """Return a function without dataflow blocks, and the map from the original variables to the new
    ones."""
    before, after = mod[name], _to_nondataflow(mod)[name]
    renamed = {}
    copies = bindings_of(after.body)
    for old in bindings_of(before.body):
        new = next(copies)
        while isinstance(old, relax.MatchCast) and not isinstance(new, relax.MatchCast):
            new = next(copies)  # the operand of a cast may get a separate binding before it
        renamed[old.var] = new.var
    renamed.update(zip(before.params, after.params, strict=True))
    return after, renamed


def _target(
    result: relax.Expr,
    bindings: Sequence[relax.Binding],
    settings: Gradient,
    wrt: Collection[relax.Var],
) -> relax.Expr:
    """Return the differentiated element of the result, resolved through aliases up to variables of
    ``wrt``."""
    path = settings.target_index
    if path == (0,) and not isinstance(result.ty, relax.TupleType):
        return result
    bound = {binding.var: binding.value for binding in bindings}
    target = result
    for index in path:
        kind = target.ty
        count = len(kind.fields) if isinstance(kind, relax.TupleType) else 0
        if not 0 <= index < count:
            content = f"a tuple of {count} elements" if count else "one value"
            raise ValueError(
                f"target_index: {index} is out of range in the result of "
                f"{settings.func_name}: it indexes {content} of type {kind}"
            )
        while target not in wrt and isinstance(bound.get(target), (relax.Var, relax.Tuple)):
            target = bound[target]
        target = element(target, index)
    return target


def _one(target: relax.Expr) -> relax.Expr:
    """Return the initial adjoint 1 of a target of one element, or raise for any other target."""
    kind = target.ty
    if not isinstance(kind, relax.TensorType) or not holds_floats(kind):
        raise GradientError(
            f"the target must be one floating-point tensor, but its type is {kind}; choose one "
            "with target_index; relax_grad.vjp, or cotangents= of the pass Gradient, "
            "differentiates several"
        )
    shape = kind.shape
    is_one = isinstance(shape, relax.ShapeExpr) and all(
        isinstance(dim, tvm.tirx.IntImm) and int(dim) == 1 for dim in shape.values
    )
    if not is_one:
        raise GradientError(
            f"the target must be a scalar or have one element, but its type is {kind}; reduce "
            "it, for example by relax.op.sum; relax_grad.vjp, or cotangents= of the pass "
            "Gradient, gives a vector-Jacobian product"
        )
    return relax.op.ones(shape, dtype_of(kind))


def _erased(
    params: Sequence[relax.Var], cotangents: Sequence[relax.Var]
) -> dict[relax.Var, relax.Var]:
    """Return a parameter of unknown shape for each cotangent whose extents only the body
    defines."""
    defined = {
        extent
        for variable in [*params, *cotangents]
        for extent in relax.analysis.definable_tir_vars_in_type(variable.ty)
    }
    return {
        variable: relax.Var(
            variable.name,
            relax.TensorType(None, dtype_of(variable.ty), variable.ty.vdevice, variable.ty.ndim),
        )
        for variable in cotangents
        if any(extent not in defined for extent in relax.analysis.tir_vars_in_type(variable.ty))
    }


def _float_leaves(expr: relax.Expr) -> list[relax.Expr]:
    """Return each floating-point tensor of a (nested) expression."""
    kind = expr.ty
    if isinstance(kind, relax.TupleType):
        fields = [element(expr, i) for i in range(len(kind.fields))]
        return [leaf for field in fields for leaf in _float_leaves(field)]
    return [expr] if isinstance(kind, relax.TensorType) and holds_floats(kind) else []
