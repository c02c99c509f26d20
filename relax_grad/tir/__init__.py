"""Gradients of tensor functions (TIR), without Relax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx

from .._validation import check_integer, is_integer
from ..ir.module import is_buffer
from .program import parse
from .reverse import Adjoint, adjoint
from .statements import has_gradient

__all__ = ["vjp"]


def vjp(
    function: tirx.PrimFunc,
    wrt: int | str | Sequence[int | str] | None = None,
    *,
    num_outputs: int | None = None,
) -> tirx.PrimFunc:
    """Return the vector-Jacobian product of a tensor function, as a tensor function.

    The function consists of loops, blocks, conditionals, bindings and stores, before schedules bind
    its loops to threads. Where each element of an argument is read by iterations that can be
    computed from its index, its gradient is a gather, whose loops can run in parallel. Otherwise it
    is a sum in the order of the loops. Values that the function overwrites are saved by a second
    run of its statements. Half precision is accumulated in float32.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function.
    wrt : int or str or Sequence, optional
        The arguments to differentiate with respect to, as positions or names; by default all
        buffers of floating-point numbers.
    num_outputs : int, optional
        The number of results, which are the last buffers; by default the buffers that the function
        writes to.

    Returns
    -------
    adjoint : tirx.PrimFunc
        Its parameters are the arguments of the function in order, its results, a cotangent for each
        result of floating-point numbers, of its shape and dtype, and a gradient for each argument
        of ``wrt``, of its shape and dtype. It writes to the gradients only. A number that the
        function takes stays a number.

    Raises
    ------
    TypeError
        If ``function`` is no tensor function, ``wrt`` names no argument by position or name, or
        ``num_outputs`` is no integer.
    ValueError
        If an argument of ``wrt`` does not exist, is given twice or has no gradient, or the function
        has no argument or no result of floating-point numbers.
    GradientError
        If a statement has no derivative: a while loop, a call with effects, a loop that is bound to
        threads, an aliased buffer. The error names the block.

    Notes
    -----
    Reverse accumulation is as in Griewank and Walther, Evaluating Derivatives (2008), chapter 3;
    loops that depend on data of earlier iterations save these values, as in chapter 4.

    Examples
    --------
    >>> import tvm
    >>> from tvm import te
    >>> import relax_grad
    >>> x = te.placeholder((3,), "float32", "x")
    >>> y = te.compute((3,), lambda i: x[i] * x[i], "y")
    >>> adjoint = relax_grad.tir.vjp(te.create_prim_func([x, y]))
    >>> [param.name for param in adjoint.params]
    ['x', 'y', 'y_grad', 'x_grad']
    """
    if not isinstance(function, tirx.PrimFunc):
        raise TypeError(
            "function must be a tensor function (tirx.PrimFunc), but its type is "
            f"{type(function).__name__}; for a function of a module, relax_grad.vjp "
            "differentiates calls of tensor functions too"
        )
    buffers = sum(map(is_buffer, function.params))
    if num_outputs is not None:
        num_outputs = check_integer("num_outputs", num_outputs, 1, buffers, also="None")
    program = parse(function, num_outputs)
    for kind, buffers_of_kind in (("argument", program.inputs), ("result", program.outputs)):
        if not any(map(has_gradient, buffers_of_kind)):
            names = ", ".join(buffer.name for buffer in buffers_of_kind) or "none"
            raise ValueError(
                f"the function has no {kind} of floating-point numbers and no gradient; its "
                f"{kind}s: {names}"
            )
    made = adjoint(function, _positions(program.inputs, wrt), num_outputs, keep_all=True).function
    name = (function.attrs or {}).get("global_symbol", "main")
    return made.with_attr("global_symbol", f"{name}_vjp")


def _positions(
    inputs: Sequence[tirx.Var], wrt: int | str | Sequence[int | str] | None
) -> list[int] | None:
    """Return the positions of arguments, or raise an error that names the choices."""
    if wrt is None:
        return None
    names = [buffer.name for buffer in inputs]
    positions: list[int] = []
    if isinstance(wrt, bytes) or not isinstance(wrt, (int, str, Iterable)):
        raise TypeError(f"wrt must be positions or names of arguments, but it is {wrt!r}")
    for item in [wrt] if isinstance(wrt, (int, str)) else wrt:
        if not isinstance(item, str) and not is_integer(item):
            raise TypeError(f"wrt must be positions or names of arguments, but it has {item!r}")
        known = item in names if isinstance(item, str) else 0 <= item < len(inputs)
        if not known:
            raise ValueError(f"wrt: {item!r} is no argument of the function, which takes {names}")
        place = names.index(item) if isinstance(item, str) else item
        if place in positions:
            raise ValueError(f"wrt: {names[place]} appears more than once")
        if not has_gradient(inputs[place]):
            raise ValueError(
                f"wrt: {names[place]} holds no floating-point numbers and has no gradient"
            )
        positions.append(place)
    if not positions:
        raise ValueError("wrt must name at least one argument")
    return positions
