"""What differentiation leaves to be tidied: transposes of products, and what nothing uses."""

from __future__ import annotations

from collections import Counter

from tvm import relax
from tvm.ir import Op

from ..activity import used
from ._checkpoint import substitute, with_value

_PERMUTE, _MATMUL = Op.get("relax.permute_dims"), Op.get("relax.matmul")
_CALL_TIR, _WITH_GRAD = Op.get("relax.call_tir"), Op.get("relax.call_tir_with_grad")


def simplify(function: relax.Function) -> relax.Function:
    """Return a function that does the same with fewer bindings.

    The rule of a product transposes its operands, and transposes the product where a transposed operand
    came in. With ``T`` for the transpose of the last two axes, ``T(T(a))`` is ``a``, and ``T(a @ b)`` is
    ``T(b) @ T(a)`` where one of the two undoes a transpose. ``call_tir_with_grad`` becomes ``call_tir``.
    """
    function = relax.analysis.remove_all_unused(function)
    if not any(
        _is_candidate(binding.value) for block in function.body.blocks for binding in block.bindings
    ):
        return function
    (block,) = function.body.blocks
    bb = relax.BlockBuilder()
    bb.begin_scope(list(function.params))
    is_dataflow = isinstance(block, relax.DataflowBlock)
    bb._begin_dataflow_block() if is_dataflow else bb._begin_binding_block()
    _Simplifier(bb, function.body).emit(block)
    body = bb.normalize(relax.SeqExpr([bb._end_block()], function.body.body))
    bb.end_scope()
    return relax.analysis.remove_all_unused(
        relax.Function(function.params, body, is_pure=function.is_pure, attrs=function.attrs)
    )


class _Simplifier:
    def __init__(self, bb: relax.BlockBuilder, body: relax.SeqExpr):
        self._bb = bb
        self._values: dict[relax.Var, relax.Expr] = {}
        self._same: dict[relax.Var, relax.Expr] = {}
        self._uses = Counter(used(body.body))
        for block in body.blocks:
            for binding in block.bindings:
                self._uses.update(used(binding.value))

    def emit(self, block: relax.BindingBlock) -> None:
        for binding in block.bindings:
            value = substitute(binding.value, self._same)
            if isinstance(value, relax.Call):
                value = self._simplified(value)
            if not value.same_as(binding.value):
                value = self._bb.normalize(value)
            is_name = isinstance(binding, relax.VarBinding) and isinstance(value, relax.Var)
            if is_name and isinstance(binding.var, relax.DataflowVar):
                self._same[binding.var] = value
                continue
            self._values[binding.var] = value
            self._bb.emit_normalized(with_value(binding, value))

    def _simplified(self, call: relax.Call) -> relax.Expr:
        if call.op == _WITH_GRAD:
            return relax.Call(_CALL_TIR, call.args, None, call.ty_args, call.span)
        if not _is_transpose(call):
            return call
        (operand,) = call.args
        value = self._values.get(operand)
        if value is None:
            return call
        if _is_transpose(value):
            return value.args[0]
        if _is_product(value) and self._uses[operand] == 1:
            a, b = value.args
            undone = [self._values.get(x) for x in (a, b)]
            if any(x is not None and _is_transpose(x) for x in undone):
                arguments = [self._transposed(x) for x in (b, a)]
                return relax.Call(_MATMUL, arguments, value.attrs, value.ty_args, value.span)
        return call

    def _transposed(self, operand: relax.Expr) -> relax.Expr:
        value = self._values.get(operand)
        if value is not None and _is_transpose(value):
            return value.args[0]
        ndim = operand.ty.ndim
        axes = [*range(ndim - 2), ndim - 1, ndim - 2]
        return self._bb.emit(relax.op.permute_dims(operand, axes))


def _is_candidate(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and (value.op == _WITH_GRAD or _is_transpose(value))


def _is_transpose(value: relax.Expr) -> bool:
    """Tell whether a value exchanges the last two axes of a tensor."""
    if not (isinstance(value, relax.Call) and value.op == _PERMUTE):
        return False
    ndim = value.args[0].ty.ndim
    if ndim < 2:
        return False
    axes = value.attrs.axes
    plain = [*range(ndim - 2), ndim - 1, ndim - 2]
    return ndim == 2 if axes is None else [int(axis) % ndim for axis in axes] == plain


def _is_product(value: relax.Expr) -> bool:
    return (
        isinstance(value, relax.Call)
        and value.op == _MATMUL
        and all(argument.ty.ndim >= 2 for argument in value.args)
    )
