"""The specialization of a callee to its arguments: their extents, and the bindings of parameters to
arguments."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from .bindings import element
from .compat import MAPS_FUNCTIONS
from .dataflow import hide_checks, show_checks
from .module import copy_with_new_vars, is_known


def with_shapes(
    function: relax.Function, arguments: Sequence[relax.Expr], *, copied: bool = True
) -> relax.Function:
    """Return a copy of a function with the extents of its (first) arguments instead of its
    symbolic extents.

    If ``copied`` is False, a function without symbolic extents in the types of its parameters is
    returned itself.
    """
    if not copied and not any(map(relax.analysis.tir_vars_in_type, _types(function))):
        return function
    # The copy comes first, because it would also replace the variables in the extents of the
    # arguments.
    function = copy_function(function)
    known: dict[tirx.Var, tirx.PrimExpr] = {}
    for param, argument in zip(function.params, arguments, strict=False):
        _match(param.ty, argument.ty, known)
    if not known:
        return function
    # TVM replaces an extent only by an expression of extents that the function knows.
    dims = relax.Function([], relax.ShapeExpr(list(known.values())))
    widened = hide_checks(_of_extents(function, relax.analysis.free_symbolic_vars(dims)))
    return _without_extents(widened.bind_symbolic_vars(known), function)


def _types(function: relax.Function) -> list[relax.Type]:
    return [param.ty for param in function.params]


def copy_function(function: relax.Function, kept: Sequence[tirx.Var] = ()) -> relax.Function:
    """Return a copy of a function with new variables. Symbolic extents from outside stay the same.

    The extents in ``kept``, which the function seems to define, also stay the same.
    """
    hidden = [*relax.analysis.free_symbolic_vars(function), *kept]
    if MAPS_FUNCTIONS or not hidden:
        return copy_with_new_vars(function, hidden)
    copied = copy_with_new_vars(hide_checks(_of_extents(function, hidden)))
    renamed = dict(zip(copied.params[0].ty.values, hidden, strict=True))
    return _without_extents(copied.bind_symbolic_vars(renamed), function)


def bind_param(param: relax.Var, argument: relax.Expr) -> list[relax.Binding]:
    """Return the bindings of a parameter to its argument.

    If the argument is not known to have the type of the parameter, casts check this at run time.
    """
    if is_known(argument.ty, param.ty):
        return [relax.VarBinding(param, argument)]
    if not isinstance(param.ty, relax.TupleType):
        return [relax.MatchCast(param, argument, param.ty)]
    fields = [relax.Var(param.name, kind) for kind in param.ty.fields]
    bindings = [
        binding
        for i, field in enumerate(fields)
        for binding in bind_param(field, element(argument, i))
    ]
    return [*bindings, relax.VarBinding(param, relax.Tuple(fields))]


def _of_extents(function: relax.Function, extents: Sequence[tirx.Var]) -> relax.Function:
    """Return a function with a new first parameter that holds extents from outside."""
    params = [relax.Var("extents", relax.ShapeType(list(extents))), *function.params]
    return relax.Function(params, function.body, function.ret_ty, function.is_pure)


def _without_extents(function: relax.Function, original: relax.Function) -> relax.Function:
    function = show_checks(function)
    return relax.Function(
        function.params[1:], function.body, function.ret_ty, original.is_pure, original.attrs
    )


def _match(param: relax.Type, argument: relax.Type, known: dict[tirx.Var, tirx.PrimExpr]) -> None:
    """Add to ``known`` the extents of an argument's type that match the symbolic extents of a
    parameter's type."""
    if isinstance(param, relax.TupleType) and isinstance(argument, relax.TupleType):
        for pair in zip(param.fields, argument.fields, strict=True):
            _match(*pair, known)
        return
    dims, extents = _dims(param), _dims(argument)
    if dims is None or extents is None or len(dims) != len(extents):
        return
    for dim, extent in zip(dims, extents, strict=True):
        if isinstance(dim, tirx.Var):
            known.setdefault(dim, extent)


def _dims(ty: relax.Type) -> list[tirx.PrimExpr] | None:
    if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        return list(ty.shape.values)
    if isinstance(ty, relax.ShapeType) and ty.values is not None:
        return list(ty.values)
    return None
