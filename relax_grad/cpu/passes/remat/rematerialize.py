"""Recomputation of results of the forward pass in the backward pass of a training step."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from ....ir.bindings import with_function_body
from ....ir.module import normalized, with_functions
from ....ir.remat import AUTO, LIGHT, REMAT, from_attribute
from ._plans import automatic, by_policy, light, named_policy, within
from ._residuals import Residuals


@tvm.transform.module_pass(opt_level=0, name="relax_grad.Rematerialize")
class Rematerialize:
    """Repeat calls of the forward pass in the backward pass instead of keeping their results.

    The pass changes functions with the attribute ``relax_grad.remat``, which ``train_step`` sets
    from its argument of that name. It runs after fusion. A repeated call calls the same tensor
    function with the same operands, so that all results have the same bits. The sizes of tensors
    are known, and those within fused functions take no memory.

    Parameters
    ----------
    planned : Callable, optional
        Returns the bytes that later passes plan for a function of a module, by its name; by default
        they are estimated. The pipeline ``"relax_grad"`` passes it, so that a budget limits what it
        plans.

    Examples
    --------
    >>> import relax_grad
    >>> from relax_grad.training import SGD, train_step
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.sin(bb.emit(relax.op.matmul(x, w))))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sum(y)))
    >>> step = train_step(bb.get(), SGD(), wrt="w", remat="auto")  # sets an attribute
    >>> module = relax_grad.transform.Rematerialize()(step.module)
    >>> module["step"].params == step.module["step"].params
    True
    """

    def __init__(self, planned: Callable[[tvm.IRModule, str], int] | None = None):
        if planned is not None and not callable(planned):
            raise TypeError(f"planned must be a function or None, but it is {planned!r}")
        self._planned = planned

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            variable: _changed(variable.name_hint, function, mod, self._planned)
            if _is_marked(function)
            else function
            for variable, function in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_marked(function: tvm.ir.BaseFunc) -> bool:
    return (
        isinstance(function, relax.Function)
        and function.attrs is not None
        and REMAT in function.attrs
    )


def _changed(
    name: str,
    function: relax.Function,
    mod: tvm.IRModule,
    planned: Callable[[tvm.IRModule, str], int] | None,
) -> relax.Function:
    residuals = Residuals(function, mod)

    def repeating(calls: frozenset[int]) -> relax.Function:
        changed = function
        if calls:
            changed = with_function_body(
                function, normalized(function.params, residuals.body(calls))
            )
        return changed.without_attr(REMAT)

    def peak(calls: frozenset[int]) -> int:
        if planned is None:
            return residuals.peak(calls)
        return planned(with_functions(mod, {name: repeating(calls)}), name)

    return repeating(_chosen(residuals, from_attribute(function.attrs[REMAT]), peak))


def _chosen(
    residuals: Residuals, setting: int | str | Callable, peak: Callable[[frozenset[int]], int]
) -> frozenset[int]:
    """Return the calls to repeat for a setting; ``peak`` returns the bytes that the pipeline
    plans."""
    if isinstance(setting, int):
        return within(residuals, setting, peak)
    if setting == AUTO:
        return automatic(residuals)
    if setting == LIGHT:
        return light(residuals)
    if isinstance(setting, str):
        return named_policy(residuals, setting)
    return by_policy(residuals, lambda i: bool(setting(residuals.call(i))))
