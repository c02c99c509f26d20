"""Legalization that makes the tensor function of equal calls once.

The programs of a check repeat calls: a program of an order contains that of the order below, and the forward function is
part of its own adjoint function. TVM's pass makes a tensor function for each of these calls, and then finds that it is
known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import Op
from tvm_ffi import StructuralKey, convert

_CALL_TIR = Op.get("relax.call_tir")

#: The passes before legalization in TVM's default pipeline.
BEFORE = (relax.backend.DispatchSampling, relax.backend.DispatchSortScan)


def legalized(module: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return the module as TVM's default pipeline has it after ``LegalizeOps``.

    A call is converted like an earlier one if both have the same operator, attributes, argument types and result type,
    all of them static.
    """
    with target:
        module = tvm.transform.Sequential([each() for each in BEFORE])(module)
        known: dict = {}
        rules = {
            op.name: _remembering(op.get_attr("FLegalize"), known) for op in _operators(module)
        }
        return relax.transform.LegalizeOps(rules)(module)


def _operators(module: tvm.IRModule) -> set[Op]:
    """Return the operators of a module that have a legalization."""
    found: set[Op] = set()

    def visit(value: relax.Expr) -> None:
        if isinstance(value, relax.Call) and isinstance(value.op, Op):
            found.add(value.op)

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return {op for op in found if op.get_attr("FLegalize") is not None}


def _remembering(legalize: Callable, known: dict) -> Callable:
    """Return a legalization that calls the known function of a call that equals an earlier one."""

    def rule(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        key = _key(call)
        if key is None:
            return legalize(bb, call)
        if key in known:
            callee, positions, types = known[key]
            arguments = relax.Tuple([call.args[position] for position in positions])
            return relax.Call(_CALL_TIR, [callee, arguments], None, types)
        result = legalize(bb, call)
        if isinstance(result, relax.Call) and result.op == _CALL_TIR and len(result.args) == 2:
            positions = [_position(each, call.args) for each in result.args[1].fields]
            if None not in positions:
                known[key] = result.args[0], positions, list(result.ty_args)
        return result

    return rule


def _key(call: relax.Call) -> StructuralKey | None:
    """Return the key that equal calls share, or None for a call that is not remembered.

    Legalizations read the values of constants and of scalars, and the producers of tuples and shapes: calls with such
    arguments are not remembered, nor those with symbolic extents, whose functions take the symbols of their call.
    """
    parts = [_static(argument) for argument in call.args]
    if not _is_static(call.ty) or any(part is None for part in parts):
        return None
    # A tensor that is passed twice is one parameter of the function.
    same = [_position(argument, call.args) for argument in call.args]
    return StructuralKey(convert([call.op, call.attrs, call.ty, list(call.ty_args), parts, same]))


def _static(argument: relax.Expr) -> relax.Type | relax.Expr | None:
    """Return the type of a tensor variable, or a shape, if the extents are numbers; None for other arguments."""
    if isinstance(argument, relax.Var) and isinstance(argument.ty, relax.TensorType):
        return argument.ty if _is_static(argument.ty) else None
    return argument if _has_numbers(argument) else None


def _is_static(kind: relax.Type) -> bool:
    """Return whether a type is that of a tensor, or of a tuple of tensors, whose extents are numbers."""
    if isinstance(kind, relax.TupleType):
        return all(map(_is_static, kind.fields))
    return isinstance(kind, relax.TensorType) and _has_numbers(kind.shape)


def _has_numbers(shape: relax.Expr | None) -> bool:
    """Return whether an expression is a shape whose extents are numbers."""
    return isinstance(shape, relax.ShapeExpr) and all(
        isinstance(extent, tirx.IntImm) for extent in shape.values
    )


def _position(value: relax.Expr, among: Sequence[relax.Expr]) -> int | None:
    return next((i for i, each in enumerate(among) if each.same_as(value)), None)
