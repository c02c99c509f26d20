"""Transformations of a module that add a function's derivatives, in the style of ``jax`` and
``torch.func``.

Each takes a module and the name of a function, and returns a module with one more function. They
are built on :class:`relax_grad.transform.Gradient`, and can be applied to their own results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import tvm
from tvm import relax

from ._validation import check_integer
from .activity import has_gradient
from .autodiff.gradient import Gradient, add_adjoint
from .ir.bindings import without_unused
from .ir.choices import Choices
from .ir.compat import dtype_of
from .ir.module import normalized, relax_function, unused, with_functions

Wrt: TypeAlias = "relax.Var | str | int | Sequence[relax.Var | str | int] | None"


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
        The function; its differentiated result has one element.
    wrt : relax.Var or str or int or Sequence, optional
        The parameters to differentiate with respect to: as variables, names or positions. By
        default all parameters that hold floating-point tensors.
    target_index : int
        The index of the differentiated element, where the result is a tuple.
    allow_zero : Sequence[str]
        Operators that count as constants.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_adjoint(*params) -> (result, (gradients...))``. A gradient has the shape
        and the dtype of its parameter, and the gradients are in the order of ``wrt``.

    Raises
    ------
    TypeError
        If ``mod`` is no module, or ``func_name`` names no Relax function.
    ValueError
        If the function or a parameter does not exist, a parameter holds no floating-point tensors,
        or the module has a function ``<func_name>_adjoint`` already.
    GradientError
        If the result has several elements, or a binding on the path has no gradient. The message
        lists these bindings.

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
        With ``<func_name>_vjp(*params, *cotangents) -> (result, (gradients...))``. Each
        floating-point tensor of the result has a cotangent of the same type.

    Raises
    ------
    TypeError, ValueError, GradientError
        As for :func:`value_and_grad`, except that the result may have any form.

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
    return _transposed(mod, f"{func_name}_vjp", func_name, wrt, allow_zero)


def jvp(
    mod: tvm.IRModule, func_name: str = "main", wrt: Wrt = None, *, allow_zero: Sequence[str] = ()
) -> tvm.IRModule:
    """Add ``<func_name>_jvp``, the Jacobian-vector product of a function.

    The vector-Jacobian product is linear in its cotangents, and its transpose is the
    Jacobian-vector product. The differentiated operators therefore need gradients of second order,
    but no forward rules.

    Parameters
    ----------
    mod, func_name, wrt, allow_zero
        As for :func:`value_and_grad`.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_jvp(*params, *tangents) -> (result, (tangents of the
        result...))``. It takes a tangent for each parameter in ``wrt`` (for each tensor of a
        tuple), and returns one for each floating-point tensor of the result.

    Raises
    ------
    TypeError, ValueError, GradientError
        As for :func:`value_and_grad`, except that the result may have any form.

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
    params = list(relax_function(mod, func_name).params)
    count = len(params)
    name = unused(f"{func_name}_vjp", _names(mod))
    transposed = _transposed(mod, name, func_name, wrt, allow_zero)
    twice = Gradient(
        name,
        list(transposed[name].params[count:]),
        target_index=1,
        cotangents=_leaf_names(_differentiated(mod, func_name, wrt), "tangent", params),
        allow_zero=allow_zero,
    )
    second = unused(f"{name}_adjoint", _names(transposed))
    adjoints = add_adjoint(transposed, twice, second)
    function = _without_params(adjoints[second], count, len(transposed[name].params) - count)
    return _extended(mod, adjoints, f"{func_name}_jvp", function)


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
        With ``<func_name>_hvp(*params, *vectors) -> ((result, (gradients...)),
        (products...))``. It takes a vector for each tensor of ``wrt``.

    Raises
    ------
    TypeError, ValueError, GradientError
        As for :func:`value_and_grad`.

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
    products, name = _repeated(mod, func_name, 2, wrt, target_index, allow_zero=allow_zero)
    return _extended(mod, products, f"{func_name}_hvp", products[name])


def derivatives(
    mod: tvm.IRModule,
    func_name: str = "main",
    order: int = 2,
    wrt: Wrt = None,
    *,
    target_index: int = 0,
    allow_zero: Sequence[str] = (),
) -> tvm.IRModule:
    """Add ``<func_name>_order<order>``, which returns a function's derivatives up to an order.

    The derivative of order k is a tensor with k axes over the parameters in ``wrt``. All axes
    except one are contracted with vectors. Order 1 gives the gradients. Order 2 gives the products
    of the Hessian with the first vector. Order 3 gives the gradients of the inner product of order
    2 with the second vector, and so on. Every differentiated operator needs gradients of that
    order.

    Parameters
    ----------
    mod, func_name, wrt, target_index, allow_zero
        As for :func:`value_and_grad`.
    order : int
        The highest order.

    Returns
    -------
    module : tvm.IRModule
        With ``<func_name>_order<n>(*params, *vectors of order 2, ..., *vectors of order n) ->
        (result, (gradients...), (products of order 2...), ..., (products of order
        n...))``. Each order from 2 on takes a vector for each tensor of ``wrt``, named
        ``<param>_vector`` at order 2 and ``<param>_vector<k - 1>`` at a higher order k.

    Raises
    ------
    ValueError
        If the order is not a positive integer.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     loss = bb.emit(relax.op.sum(relax.op.exp(x)))
    ...     _ = bb.emit_func_output(loss)
    >>> module = relax_grad.derivatives(bb.get(), order=3)
    >>> [param.name for param in module["main_order3"].params]
    ['x', 'x_vector', 'x_vector2']
    """
    order = check_integer("order", order, 1)
    repeated, name = _repeated(mod, func_name, order, wrt, target_index, allow_zero=allow_zero)
    function = repeated[name]
    result: relax.Expr = function.body.body
    orders: list[relax.Expr] = []
    for _ in range(order):
        result, products = result.fields
        orders.insert(0, products)
    body = relax.SeqExpr(function.body.blocks, relax.Tuple([result, *orders]))
    params = list(function.params)
    flat = relax.Function(
        params, normalized(params, body), is_pure=function.is_pure, attrs=function.attrs
    )
    return _extended(mod, repeated, f"{func_name}_order{order}", flat)


def _repeated(
    mod: tvm.IRModule,
    func_name: str,
    order: int,
    wrt: Wrt,
    target_index: int,
    allow_zero: Sequence[str],
) -> tuple[tvm.IRModule, str]:
    """Add the adjoint of a function, the adjoint of that adjoint along vectors, and so on up to
    ``order``.

    Returns the module and the name of the last function, whose result is
    ``(((result, gradients), products of order 2), ...)``.
    """
    variables = _differentiated(mod, func_name, wrt)
    params = list(relax_function(mod, func_name).params)
    positions = [params.index(variable) for variable in variables]
    name = unused(f"{func_name}_adjoint", _names(mod))
    first = Gradient(func_name, variables, target_index, allow_zero=allow_zero)
    module = add_adjoint(mod, first, name)
    for step in range(1, order):
        again = Gradient(
            name,
            [module[name].params[i] for i in positions],
            target_index=1,
            cotangents=_leaf_names(
                variables, f"vector{step if step > 1 else ''}", module[name].params
            ),
            allow_zero=allow_zero,
        )
        name = unused(f"{name}_adjoint", _names(module))
        module = add_adjoint(module, again, name)
    return module, name


def _transposed(
    mod: tvm.IRModule, name: str, func_name: str, wrt: Wrt, allow_zero: Sequence[str]
) -> tvm.IRModule:
    """Add the vector-Jacobian product of a function under the name ``name``."""
    variables = _variables(mod, func_name, wrt)
    settings = Gradient(
        func_name, variables, target_index=None, cotangents=True, allow_zero=allow_zero
    )
    return add_adjoint(mod, settings, name)


def _differentiated(mod: tvm.IRModule, func_name: str, wrt: Wrt) -> list[relax.Var]:
    """Return the parameters to differentiate with respect to."""
    variables = _variables(mod, func_name, wrt)
    if variables is None:
        params = relax_function(mod, func_name).params
        variables = [param for param in params if has_gradient(param.ty)]
    if not variables:
        raise ValueError(f"wrt: {func_name} has no parameter to differentiate with respect to")
    return variables


def _leaf_names(
    variables: Sequence[relax.Var], suffix: str, params: Sequence[relax.Var]
) -> list[str]:
    """Return a new name, distinct from the names of ``params``, for each floating-point tensor in
    variables."""
    taken = {param.name for param in params}
    names = []

    def collect(name: str, kind: relax.Type) -> None:
        if isinstance(kind, relax.TupleType):
            for i, field in enumerate(kind.fields):
                collect(f"{name}_{i}", field)
        elif has_gradient(kind):
            names.append(unused(f"{name}_{suffix}", taken))
            taken.add(names[-1])

    for variable in variables:
        collect(variable.name, variable.ty)
    return names


def _variables(mod: tvm.IRModule, func_name: str, wrt: Wrt) -> list[relax.Var] | None:
    """Return the parameters that ``wrt`` gives as variables, names or positions; None for all."""
    params = list(relax_function(mod, func_name).params)
    if wrt is None:
        return None
    candidates = [(param.name, param) for param in params]
    # TVM's own lists, such as the parameters of a function, are sequences too. A string is also a
    # sequence.
    several = isinstance(wrt, Sequence) and not isinstance(wrt, str)
    selected = Choices(func_name, "parameter", candidates, by_position=True).select(
        "wrt", cast(Sequence, wrt if several else [wrt])
    )
    for param in selected:
        if not has_gradient(param.ty):
            floats = ", ".join(param.name for param in params if has_gradient(param.ty))
            raise ValueError(
                "wrt: only tensors of floating-point numbers and tuples of them have gradients, "
                f"but the type of {param.name} is {param.ty}; there are {floats or 'none'}"
            )
    return selected


def _names(mod: tvm.IRModule) -> set[str]:
    return {variable.name_hint for variable in mod.get_global_vars()}


def _extended(
    mod: tvm.IRModule, source: tvm.IRModule, name: str, function: relax.Function
) -> tvm.IRModule:
    """Return ``mod`` with a new function and its callees, which are taken from ``found``."""
    if name in _names(mod):
        raise ValueError(f"the module has a function {name} already; rename or remove it")
    kept = {variable: source[variable] for variable in source.get_global_vars()}
    kept = {
        variable: callee for variable, callee in kept.items() if variable.name_hint in _names(mod)
    }
    pending = [function]
    while pending:
        for variable in relax.analysis.all_global_vars(pending.pop()):
            if variable not in kept and variable in source.functions:
                kept[variable] = source[variable]
                if isinstance(kept[variable], relax.Function):  # a tensor function calls no other
                    pending.append(kept[variable])
    only = tvm.IRModule(kept, attrs=source.attrs, global_infos=source.global_infos)
    return with_functions(only, {name: function})


def _without_params(function: relax.Function, start: int, count: int) -> relax.Function:
    """Return a transposed function without its ``count`` linear parameters from ``start`` on.

    The result does not depend on their values, so zeros replace the remaining uses. The gradients
    are dropped from the result ``((result, gradients), products)``.
    """
    params = list(function.params)
    dropped = params[start : start + count]
    kept = params[:start] + params[start + count :]
    (result, _), products = function.body.body.fields[0].fields, function.body.body.fields[1]
    body = relax.SeqExpr(function.body.blocks, relax.Tuple([result, products]))
    slim = without_unused(
        relax.Function(params, normalized(params, body), is_pure=function.is_pure)
    )
    blocks = [_zeros_for_casts(block, dropped) for block in slim.body.blocks]
    slim = relax.SeqExpr(blocks, slim.body.body)
    used = set(relax.analysis.free_vars(slim))
    zeros = relax.BindingBlock(
        [relax.VarBinding(param, _zeros(param)) for param in dropped if param in used]
    )
    blocks = [zeros, *blocks] if zeros.bindings else blocks
    body = normalized(kept, relax.SeqExpr(blocks, slim.body))
    return relax.Function(kept, body, is_pure=function.is_pure, attrs=function.attrs)


def _zeros_for_casts(block: relax.BindingBlock, dropped: Sequence[relax.Var]) -> relax.BindingBlock:
    """Return a block in which zeros replace each match_cast of a dropped parameter."""
    bindings = [
        relax.VarBinding(binding.var, _zeros(binding.var))
        if isinstance(binding, relax.MatchCast) and binding.value in dropped
        else binding
        for binding in block.bindings
    ]
    return type(block)(bindings)


def _zeros(param: relax.Var) -> relax.Expr:
    bb = relax.BlockBuilder()
    return bb.normalize(relax.op.zeros(param.ty.shape, dtype_of(param.ty)))
