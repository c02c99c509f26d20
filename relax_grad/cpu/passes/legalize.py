"""Legalization of operators that is cached for all calls with equal operand types and attributes.

The legalization of a call creates a function from a tensor expression, then searches the module for
an equal function. In a training step most calls are of a few operators, and hundreds of them become
calls of a few functions.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ...ir.compat import constant_value, dtype_of
from ...ir.shapes import static_extents

_CALL_TIR = Op.get("relax.call_tir")

#: Operators whose functions depend only on the types of the operands, on the values of shapes and
#: of scalar constants, and on the attributes.
_OPERATORS = (
    *("add", "divide", "multiply", "subtract", "maximum", "minimum", "where"),
    *("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"),
    *("exp", "erf", "log", "negative", "rsqrt", "sigmoid", "sqrt", "square", "tanh", "nn.gelu"),
    *("collapse_sum_to", "permute_dims", "reshape", "split"),
)

#: Their legalizations. If another legalization is registered later, it is used for each call.
_KNOWN = {name: Op.get(name).get_attr("FLegalize") for name in map("relax.{}".format, _OPERATORS)}


@tvm.transform.module_pass(opt_level=0, name="relax_grad.LegalizeOps")
def legalize_ops(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Legalize operators as ``relax.transform.LegalizeOps`` does."""
    shared = {
        name: _Shared(known)
        for name, known in _KNOWN.items()
        if known is not None and known.same_as(Op.get(name).get_attr("FLegalize"))
    }
    return relax.transform.LegalizeOps(shared)(mod)


class _Shared:
    """The cached legalization of an operator, which runs once for operands of equal types.

    Parameters
    ----------
    legalize : tvm_ffi.Function
        Takes a block builder and a call; returns the replacement of the call.
    """

    def __init__(self, legalize: Callable[[relax.BlockBuilder, relax.Call], relax.Expr]):
        self._legalize = legalize
        self._known: dict[tuple, relax.Call] = {}

    def __call__(self, bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        operands = call.args[:]
        keys = [_key(operand) for operand in operands]
        if None in keys:
            return self._legalize(bb, call)
        tensors = relax.Tuple([operand for operand in operands if isinstance(operand, relax.Var)])
        attributes = None if call.attrs is None else tvm_ffi.StructuralKey(call.attrs)
        key = attributes, *keys
        known = self._known.get(key)
        if known is not None:
            return relax.Call(known.op, [known.args[0], tensors], known.attrs, known.ty_args)
        made = self._legalize(bb, call)
        if _is_call_of_all(made, tensors):
            self._known[key] = made
        return made


def _key(operand: relax.Expr) -> tuple | None:
    """Return a key of an operand for legalization: a type, or the value of a shape or a scalar;
    None if it may not suffice."""
    if isinstance(operand, relax.ShapeExpr):
        extents = operand.values[:]
        is_static = all(type(extent) is tirx.IntImm for extent in extents)
        return ("shape", *(extent.value for extent in extents)) if is_static else None
    if not isinstance(operand, relax.Var):
        value = constant_value(operand)
        if value is None or value.ndim:
            return None
        return "scalar", str(value.dtype), value.tobytes()
    kind = operand.ty
    extents = static_extents(kind)
    if extents is None or kind.vdevice is not None or kind.dtype is None:
        return None
    return dtype_of(kind), tuple(extents)


def _is_call_of_all(made: relax.Expr, tensors: relax.Tuple) -> bool:
    """Tell whether an expression calls a tensor function of the module with exactly these tensors
    in this order."""
    return (
        isinstance(made, relax.Call)
        and made.op == _CALL_TIR
        and len(made.args) == 2
        and isinstance(made.args[0], GlobalVar)
        and tvm_ffi.structural_equal(made.args[1], tensors)
    )
