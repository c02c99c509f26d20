"""Constant folding of calls of tensor functions."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ...ir.aliases import kept_copies
from ...ir.bindings import substitute, with_function_body, with_value, without_unused
from ...ir.compat import constant_value, dtype_of, structural_walk
from ...ir.divisions import with_checked_divisions
from ...ir.loops import with_canonical_loops
from ...ir.module import IS_SCHEDULED, normalized
from ...ir.shapes import static_extents

_CALL_TIR = Op.get("relax.call_tir")

#: The most elements of the result of a folded call without arguments. Larger ones are computed at
#: run time.
_MOST_ELEMENTS = 1024

#: The target of the functions that run here. Each runs once, so that its optimization would take
#: longer than the run.
_TARGET = {"kind": "llvm", "opt-level": 0}

#: Dtypes whose numbers NumPy rounds as LLVM does.
_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.FoldConstants")
class FoldConstants:
    """Replace calls of tensor functions on constants by their results.

    ``relax.transform.FoldConstant`` does the same, but builds the function of each call separately,
    even if functions are equal. For a network with many normalisations this takes as long as the
    compilation of the network itself. Here all functions are built together. A result that a later
    call writes to is not folded, because a constant must not be overwritten.

    Examples
    --------
    >>> import numpy as np
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         one = bb.emit(relax.op.exp(relax.const(np.zeros(3, "float32"))))
    ...         y = bb.emit_output(relax.op.add(x, one))
    ...     _ = bb.emit_func_output(y)
    >>> module = relax.transform.LegalizeOps()(bb.get())
    >>> module.script().count("R.call_tir")
    2
    >>> transform.FoldConstants()(module).script().count("R.call_tir")
    1
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        kept = kept_copies(mod)
        calls = {
            variable: _constant_calls(function, functions, kept.get(variable))
            for variable, function in functions.items()
            if isinstance(function, relax.Function)
        }
        called = {call.args[0] for foldable in calls.values() for call in foldable.values()}
        if not called:
            return mod
        results = _Results({variable: functions[variable] for variable in called})
        for variable, foldable in calls.items():
            if foldable:
                functions[variable] = _folded(functions[variable], foldable, results)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _constant_calls(
    function: relax.Function,
    functions: dict[GlobalVar, tvm.ir.BaseFunc],
    is_kept: Callable[[relax.Binding], bool] | None,
) -> dict[relax.Var, relax.Call]:
    """Return the calls that depend on constants alone, by the variables that they are bound to."""
    calls: dict[relax.Var, relax.Call] = {}
    constants: set[relax.Var] = set()
    for block in function.body.blocks[:]:
        for binding in block.bindings[:]:
            value = binding.value
            if not isinstance(binding, relax.VarBinding) or (is_kept and is_kept(binding)):
                continue
            if constant_value(value) is not None:
                constants.add(binding.var)
            elif _is_foldable(value, functions) and all(
                argument in constants or constant_value(argument) is not None
                for argument in value.args[1].fields
            ):
                calls[binding.var] = value
                constants.add(binding.var)
    return calls


def _is_foldable(value: relax.Expr, functions: dict[GlobalVar, tvm.ir.BaseFunc]) -> bool:
    """Tell whether a value calls a tensor function that is no kernel and has a result of known
    shape.

    A call without arguments is foldable only if the result is small.
    """
    if not (isinstance(value, relax.Call) and value.op == _CALL_TIR and len(value.args) == 2):
        return False
    called, kind = functions[value.args[0]], value.ty
    if not isinstance(called, tirx.PrimFunc) or IS_SCHEDULED in (called.attrs or {}):
        return False
    extents = static_extents(kind)
    if extents is None:
        return False
    return prod(extents) <= _MOST_ELEMENTS or len(value.args[1].fields) > 0


def _folded(function: relax.Function, calls: dict, results: _Results) -> relax.Function:
    """Return a function in which the results of calls replace the calls."""
    known: dict[relax.Var, relax.Expr] = {}
    blocks = []
    for block in function.body.blocks[:]:
        bindings = []
        for binding in block.bindings[:]:
            value = binding.value
            if binding.var in calls:
                value = results.of(substitute(value, known), binding.var.ty)
            elif isinstance(binding, relax.VarBinding):
                value = substitute(value, known)
            if constant_value(value) is not None:
                known[binding.var] = value
            bindings.append(binding if value is binding.value else with_value(binding, value))
        blocks.append(type(block)(bindings))
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return without_unused(with_function_body(function, body))


class _Results:
    """The results of tensor functions for constants.

    Parameters
    ----------
    functions : dict[GlobalVar, tirx.PrimFunc]
        The functions.
    """

    def __init__(self, functions: dict[GlobalVar, tirx.PrimFunc]):
        values = {variable: _filled(function) for variable, function in functions.items()}
        self._values = {variable: value for variable, value in values.items() if value is not None}
        others = {
            variable: with_checked_divisions(
                with_canonical_loops(function), variable.name_hint
            ).with_attr("global_symbol", variable.name_hint)
            for variable, function in functions.items()
            if variable not in self._values
        }
        library = tvm.tirx.build(tvm.IRModule(others), target=_TARGET) if others else {}
        # The lookup of a function takes longer than most calls.
        self._functions = {variable: library[variable.name_hint] for variable in others}

    def of(self, call: relax.Call, kind: relax.TensorType) -> relax.Expr:
        """Return the constant of the given type that a call computes, or the call if it raises an
        error, as for a division by 0, or depends on such a call."""
        callee, shape, dtype = call.args[0], [int(n) for n in kind.shape.values], dtype_of(kind)
        if callee in self._values:
            filled = self._values[callee]
            if (list(filled.shape), str(filled.dtype)) != (shape, dtype):
                raise ValueError(
                    f"{callee.name_hint} fills a tensor of shape {filled.shape} and dtype "
                    f"{filled.dtype}, but its call returns one of shape {tuple(shape)} and dtype "
                    f"{dtype}"
                )
            return relax.const(filled, dtype)
        values = [constant_value(argument) for argument in call.args[1].fields]
        if any(value is None for value in values):
            return call
        result = tvm.runtime.empty(shape, dtype)
        try:
            self._functions[callee](*map(tvm.runtime.tensor, values), result)
        except ValueError:
            return call
        return relax.const(result, dtype)


def _filled(function: tirx.PrimFunc) -> np.ndarray | None:
    """Return the result of a function that fills its only parameter with one number; None for other
    functions."""
    if len(function.params) != 1:
        return None
    stores: list[tirx.BufferStore] = []
    others: list[tirx.Stmt] = []
    rules = [
        (tirx.BufferStore, stores.append),
        ((tirx.AssertStmt, tirx.Evaluate, tirx.IfThenElse), others.append),
    ]
    structural_walk(function.body, rules)
    if others or len(stores) != 1 or not isinstance(stores[0].value, (tirx.IntImm, tirx.FloatImm)):
        return None
    if not stores[0].buffer.same_as(function.params[0]):
        return None
    shape, dtype = stores[0].buffer.shape, dtype_of(stores[0].value.ty)
    if dtype not in _DTYPES or not all(isinstance(extent, tirx.IntImm) for extent in shape):
        return None
    return np.full([int(extent) for extent in shape], stores[0].value.value, dtype)
