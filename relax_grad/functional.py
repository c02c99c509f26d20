"""Transformations of a module that add a function's derivatives, in the style of ``jax`` and ``torch.func``.

Each takes a module and the name of a function, and returns a module with one more function. They are
built of :class:`relax_grad.transform.Gradient`, and can be applied to what they return.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ._compat import dtype_of
from ._module import relax_function, with_functions
from .activity import holds_floats
from .transform import Gradient

Wrt = "relax.Var | str | int | Sequence[relax.Var | str | int] | None"


def value_and_grad(
    mod: tvm.IRModule,
    func_name: str = "main",
    wrt: Wrt = None,
    *,
    target_index: int = 0,
    allow_zero: Sequence[str] = (),
) -> tvm.IRModule:
    """Add ``<func_name>_adjoint``, which returns a function's result and its gradients.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    func_name : str
        The function; what is differentiated has one element.
    wrt : relax.Var or str or int or Sequence, optional
        The parameters to differentiate with respect to: themselves, their names or their positions. By
        default all that hold floating-point tensors.
    target_index : int
        Which element of the result is differentiated, where the result is a tuple.
    allow_zero : Sequence[str]
        Operators that count as constants.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_adjoint(*params) -> (result, (gradients...))``.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     loss = bb.emit(relax.op.sum(relax.op.exp(x)))
    ...     _ = bb.emit_func_output(loss)
    >>> module = relax_grad.value_and_grad(bb.get(), "main", wrt="x")
    >>> [param.name for param in module["main_adjoint"].params]
    ['x']
    """
    variables = _variables(mod, func_name, wrt)
    return Gradient(func_name, variables, target_index, allow_zero=allow_zero)(mod)


def vjp(
    mod: tvm.IRModule, func_name: str = "main", wrt: Wrt = None, *, allow_zero: Sequence[str] = ()
) -> tvm.IRModule:
    """Add ``<func_name>_vjp``, the vector-Jacobian product of a function with a result of any form.

    Parameters
    ----------
    mod, func_name, wrt, allow_zero
        As for :func:`value_and_grad`.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_vjp(*params, *cotangents) -> (result, (gradients...))``. There is a cotangent for
        each floating-point tensor of the result, of its type.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     y = bb.emit(relax.op.outer(x, x))
    ...     _ = bb.emit_func_output(y)
    >>> [param.name for param in relax_grad.vjp(bb.get())["main_vjp"].params]
    ['x', 'cotangent0']
    """
    adjoint = Gradient(
        func_name,
        _variables(mod, func_name, wrt),
        target_index=None,
        cotangents=True,
        allow_zero=allow_zero,
    )(mod)
    name = f"{func_name}_adjoint"
    return with_functions(adjoint, {f"{func_name}_vjp": adjoint[name]}, without=[name])


def jvp(
    mod: tvm.IRModule, func_name: str = "main", wrt: Wrt = None, *, allow_zero: Sequence[str] = ()
) -> tvm.IRModule:
    """Add ``<func_name>_jvp``, the Jacobian-vector product of a function.

    The vector-Jacobian product is linear in its cotangents, and its own transpose is the Jacobian-vector
    product. So the operators on the way need gradients of second order, and nothing else.

    Parameters
    ----------
    mod, func_name, wrt, allow_zero
        As for :func:`value_and_grad`.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_jvp(*params, *tangents) -> (result, (tangents of the result...))``. There is a
        tangent for each parameter that is differentiated with respect to (for each tensor of a tuple),
        and one for each floating-point tensor of the result.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     y = bb.emit(relax.op.sin(x))
    ...     _ = bb.emit_func_output(y)
    >>> [param.name for param in relax_grad.jvp(bb.get())["main_jvp"].params]
    ['x', 'x_tangent']
    """
    count = len(relax_function(mod, func_name).params)
    transposed = vjp(mod, func_name, wrt, allow_zero=allow_zero)
    name = f"{func_name}_vjp"
    cotangents = list(transposed[name].params[count:])
    twice = Gradient(name, cotangents, target_index=1, cotangents=True, allow_zero=allow_zero)
    found = twice(transposed)
    function = _without_params(found[f"{name}_adjoint"], count, len(cotangents))
    function = _with_names(
        function, _tangent_names(mod, func_name, wrt, len(function.params) - count)
    )
    return with_functions(found, {f"{func_name}_jvp": function}, without=[name, f"{name}_adjoint"])


def hvp(
    mod: tvm.IRModule,
    func_name: str = "main",
    wrt: Wrt = None,
    *,
    target_index: int = 0,
    allow_zero: Sequence[str] = (),
) -> tvm.IRModule:
    """Add ``<func_name>_hvp``, the product of a function's Hessian with a vector.

    Parameters
    ----------
    mod, func_name, wrt, target_index, allow_zero
        As for :func:`value_and_grad`.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_hvp(*params, *vectors) -> ((result, (gradients...)), (products...))``. There is a
        vector for each tensor that is differentiated with respect to.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     loss = bb.emit(relax.op.sum(relax.op.exp(x)))
    ...     _ = bb.emit_func_output(loss)
    >>> len(relax_grad.hvp(bb.get())["main_hvp"].params)
    2
    """
    positions = _positions(mod, func_name, wrt)
    first = value_and_grad(mod, func_name, wrt, target_index=target_index, allow_zero=allow_zero)
    name = f"{func_name}_adjoint"
    params = first[name].params
    wanted = None if positions is None else [params[i] for i in positions]
    second = Gradient(name, wanted, target_index=1, cotangents=True, allow_zero=allow_zero)(first)
    function = second[f"{name}_adjoint"]
    return with_functions(second, {f"{func_name}_hvp": function}, without=[name, f"{name}_adjoint"])


def _variables(mod: tvm.IRModule, func_name: str, wrt: Wrt) -> list[relax.Var] | None:
    positions = _positions(mod, func_name, wrt)
    if positions is None:
        return None
    params = relax_function(mod, func_name).params
    return [params[i] for i in positions]


def _positions(mod: tvm.IRModule, func_name: str, wrt: Wrt) -> list[int] | None:
    """Return the positions of the named parameters; None for all."""
    params = list(relax_function(mod, func_name).params)
    if wrt is None:
        return None
    names = [param.name for param in params]
    positions = []
    for item in wrt if isinstance(wrt, (list, tuple)) else [wrt]:
        if isinstance(item, str) and names.count(item) == 1:
            positions.append(names.index(item))
        elif isinstance(item, int) and 0 <= item < len(params):
            positions.append(item)
        elif isinstance(item, relax.Var) and item in params:
            positions.append(params.index(item))
        else:
            raise ValueError(
                f"wrt: {item!r} is no parameter of {func_name}, whose parameters are {', '.join(names)}"
            )
    return positions


def _without_params(function: relax.Function, start: int, count: int) -> relax.Function:
    """Return a transposed function without the parameters that it is linear in.

    Its value does not depend on theirs, so that zeros of their shape do where one is left. Of
    ``((result, gradients), products)`` the gradients go.
    """
    params = list(function.params)
    dropped = params[start : start + count]
    kept = params[:start] + params[start + count :]
    (result, _), products = function.body.body.fields[0].fields, function.body.body.fields[1]
    body = relax.SeqExpr(function.body.blocks, relax.Tuple([result, products]))
    slim = relax.analysis.remove_all_unused(
        relax.Function(params, _normalized(params, body), is_pure=function.is_pure)
    )
    used = set(relax.analysis.free_vars(slim.body))
    zeros = relax.BindingBlock(
        [relax.VarBinding(param, _zeros(param)) for param in dropped if param in used]
    )
    blocks = [zeros, *slim.body.blocks] if zeros.bindings else list(slim.body.blocks)
    body = _normalized(kept, relax.SeqExpr(blocks, slim.body.body))
    return relax.Function(kept, body, is_pure=function.is_pure)


def _tangent_names(mod: tvm.IRModule, func_name: str, wrt: Wrt, count: int) -> list[str]:
    """Return a name for each tangent."""
    params = relax_function(mod, func_name).params
    positions = _positions(mod, func_name, wrt)
    named = [p for p in params if holds_floats(p.ty)] if positions is None else None
    named = [params[i] for i in positions] if named is None else named
    if len(named) == count:
        return [f"{param.name}_tangent" for param in named]
    return [f"tangent{i}" for i in range(count)]  # of the tensors of tuples


def _with_names(function: relax.Function, names: Sequence[str]) -> relax.Function:
    """Return a function whose last parameters have these names."""
    first = len(function.params) - len(names)
    renamed = [
        relax.Var(name, param.ty)
        for name, param in zip(names, function.params[first:], strict=True)
    ]
    params = [*function.params[:first], *renamed]
    aliases = relax.BindingBlock(
        [
            relax.VarBinding(param, new)
            for param, new in zip(function.params[first:], renamed, strict=True)
        ]
    )
    body = relax.SeqExpr([aliases, *function.body.blocks], function.body.body)
    return relax.Function(params, _normalized(params, body), is_pure=function.is_pure)


def _zeros(param: relax.Var) -> relax.Expr:
    bb = relax.BlockBuilder()
    return bb.normalize(relax.op.zeros(param.ty.shape, dtype_of(param.ty)))


def _normalized(params: Sequence[relax.Var], body: relax.Expr) -> relax.Expr:
    bb = relax.BlockBuilder()
    bb.begin_scope(list(params))
    body = bb.normalize(body)
    bb.end_scope()
    return body
