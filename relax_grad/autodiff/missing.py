"""The gradients that a function lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tvm
from tvm import relax

from .gradient import Gradient, missing
from .obstacles import MissingGradient

__all__ = ["MissingGradient", "missing_gradients"]


def missing_gradients(
    mod: tvm.IRModule,
    func_name: str = "main",
    require_grads: relax.Var | str | Sequence[relax.Var | str] | None = None,
    *,
    target_index: int | Sequence[int] | None = 0,
    allow_zero: str | Collection[str] = (),
) -> list[MissingGradient]:
    """Return every binding that keeps a function from being differentiated for lack of a gradient.

    Those of the functions that it calls are among them, as :class:`relax_grad.transform.Gradient` follows
    these; TVM's pass does not. Only what lies between ``require_grads`` and the target counts: a result
    of integers, a constant, or an operator that counts as a constant ends a path.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    func_name : str
        The name of the function.
    require_grads : relax.Var or str or Sequence, optional
        The variables to differentiate with respect to, themselves or by name; by default all parameters
        that hold floating-point tensors.
    target_index : int or Sequence[int] or None
        Which element of the function's result is differentiated, where the result is a tuple; several
        integers lead into nested tuples, and None stands for the whole result.
    allow_zero : str or Collection[str]
        Operators that count as constants.

    Returns
    -------
    missing : list[MissingGradient]
        In the order of the function; empty where no gradient is missing.

    Raises
    ------
    TypeError
        If ``mod`` is no module or ``func_name`` names no Relax function.
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
    return missing(mod, Gradient(func_name, require_grads, target_index, allow_zero=allow_zero))
