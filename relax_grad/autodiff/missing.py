"""The missing gradients of a function."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tvm
from tvm import relax

from .gradient import Gradient, as_variables, missing
from .obstacles import MissingGradient

__all__ = ["MissingGradient", "missing_gradients"]


def missing_gradients(
    mod: tvm.IRModule,
    func_name: str = "main",
    wrt: relax.Var | str | Sequence[relax.Var | str] | None = None,
    *,
    target_index: int | Sequence[int] | None = 0,
    allow_zero: str | Collection[str] = (),
) -> list[MissingGradient]:
    """Return every binding whose missing gradient prevents the differentiation of a function.

    The result includes bindings of callees, since :class:`relax_grad.transform.Gradient`
    differentiates through calls; TVM's pass does not. Only bindings between ``wrt`` and the target
    count. An integer result, a constant, or an operator that counts as a constant ends a path.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    func_name : str
        The name of the function.
    wrt : relax.Var or str or Sequence, optional
        The variables to differentiate with respect to, as variables or names; by default all
        parameters that hold floating-point tensors.
    target_index : int or Sequence[int] or None
        The index of the differentiated element, where the function's result is a tuple. Several
        integers index nested tuples; None stands for the whole result.
    allow_zero : str or Collection[str]
        Operators that count as constants.

    Returns
    -------
    missing : list[MissingGradient]
        The bindings in the order of the function; empty if no gradient is missing.

    Raises
    ------
    TypeError
        If ``mod`` is not a module or ``func_name`` names no Relax function.
    ValueError
        If the function or a variable does not exist, or the result has no such element.
    GradientError
        If the function is recursive.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         y = bb.emit(relax.op.call_pure_packed("mystery", x, ty_args=x.ty), name_hint="y")
    ...         loss = bb.emit_output(relax.op.sum(y))
    ...     _ = bb.emit_func_output(loss)
    >>> for missing in relax_grad.missing_gradients(bb.get(), "main"):
    ...     print(missing.binding, missing.operator)
    y relax.call_pure_packed
    """
    settings = Gradient(func_name, as_variables(wrt, "wrt"), target_index, allow_zero=allow_zero)
    return missing(mod, settings, "wrt")
