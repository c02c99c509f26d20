"""Clean-up after differentiation: transposes of products, ones and zeros, and unused bindings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

from tvm import relax, tirx
from tvm.ir import Op
from tvm_ffi import structural_equal

from ..ir.bindings import substitute, used, with_value, without_unused
from ..ir.compat import constant_value, dtype_of
from ..ir.module import normalized

_PERMUTE, _MATMUL = Op.get("relax.permute_dims"), Op.get("relax.matmul")
_BROADCAST = Op.get("relax.broadcast_to")
_ONES = [Op.get("relax.ones"), Op.get("relax.ones_like")]
_ZEROS = [Op.get("relax.zeros"), Op.get("relax.zeros_like")]
#: The neutral operands of operators and their positions: either side of a sum or product, the right
#: of the others.
_NEUTRAL = {
    Op.get("relax.add"): (_ZEROS, (0, 1)),
    Op.get("relax.multiply"): (_ONES, (0, 1)),
    Op.get("relax.subtract"): (_ZEROS, (1,)),
    Op.get("relax.divide"): (_ONES, (1,)),
}
_WHERE, _SOFTMAX_BACKWARD = Op.get("relax.where"), "relax.grad.softmax_backward"
_FULL = [Op.get("relax.full"), Op.get("relax.full_like")]
_ONE = tirx.IntImm("int64", 1)
_CALL_TIR, _WITH_GRAD = Op.get("relax.call_tir"), Op.get("relax.call_tir_with_grad")


def simplify(function: relax.Function, has_writes: bool = False) -> relax.Function:
    """Return an equivalent function with fewer bindings.

    - The gradient of a matrix product contains transposes of its operands. If an operand is itself
      a transpose, the gradient of its source is a transposed product. With ``T`` for the transpose
      of the last two axes, ``T(T(a))`` becomes ``a``, and ``T(a @ b)`` becomes ``T(b) @ T(a)``
      where this undoes a transpose of ``a`` or ``b``.
    - Broadcast ones and zeros are created in their final shape. A sum, difference, product or
      quotient with a neutral operand becomes its other operand.
    - Matrix products take their operands without a broadcast of stacks that they do themselves.
    - The gradient of a softmax with masked rows, whose output gradient has the same mask, reads the
      masked result. That is live anyway, so the unmasked result need not be kept.
    - ``call_tir_with_grad`` becomes ``call_tir``.

    With calls that write to their arguments, only the last rewrite is done: an alias instead
    of a copy would change with the original.
    """
    function = without_unused(function)
    bindings = [binding for block in function.body.blocks[:] for binding in block.bindings[:]]
    has_branches = any(isinstance(binding.value, relax.If) for binding in bindings)
    if has_writes or has_branches:
        function = _without_gradients(function)
        bindings = [binding for block in function.body.blocks[:] for binding in block.bindings[:]]
    if has_writes:
        return function
    filled = {binding.var for binding in bindings if _is_call(binding.value, [*_ONES, *_ZEROS])}
    broadcast = {binding.var for binding in bindings if _is_call(binding.value, [_BROADCAST])}
    if not any(_is_candidate(binding, filled, broadcast) for binding in bindings):
        return function
    (block,) = function.body.blocks
    bb = relax.BlockBuilder()
    bb.begin_scope(list(function.params))
    is_dataflow = isinstance(block, relax.DataflowBlock)
    bb._begin_dataflow_block() if is_dataflow else bb._begin_binding_block()
    _Simplifier(bb, function.body).emit(block)
    body = bb.normalize(relax.SeqExpr([bb._end_block()], function.body.body))
    bb.end_scope()
    return without_unused(
        relax.Function(function.params, body, is_pure=function.is_pure, attrs=function.attrs)
    )


def _without_gradients(function: relax.Function) -> relax.Function:
    """Return a function with ``call_tir`` instead of ``call_tir_with_grad``."""
    body = normalized(function.params, _without_gradients_of(function.body))
    return relax.Function(function.params, body, is_pure=function.is_pure, attrs=function.attrs)


def _without_gradients_of(body: relax.SeqExpr) -> relax.SeqExpr:
    blocks = [
        type(block)(
            [with_value(binding, _without_gradient(binding.value)) for binding in block.bindings]
        )
        for block in body.blocks
    ]
    return relax.SeqExpr(blocks, body.body)


def _without_gradient(value: relax.Expr) -> relax.Expr:
    if isinstance(value, relax.If):
        branches = map(_without_gradients_of, (value.true_branch, value.false_branch))
        return relax.If(value.cond, *branches, value.span)
    if not _is_call(value, [_WITH_GRAD]):
        return value
    return relax.Call(_CALL_TIR, value.args, None, value.ty_args, value.span)


class _Simplifier:
    def __init__(self, bb: relax.BlockBuilder, body: relax.SeqExpr):
        self._bb = bb
        self._values: dict[relax.Var, relax.Expr] = {}
        self._same: dict[relax.Var, relax.Expr] = {}
        self._masked: dict[tuple[relax.Var, relax.Var], relax.Var] = {}
        self._uses = Counter(used(body.body))
        for block in body.blocks[:]:
            for binding in block.bindings[:]:
                self._uses.update(used(binding.value))

    def emit(self, block: relax.BindingBlock) -> None:
        for binding in block.bindings[:]:
            value = substitute(binding.value, self._same)
            if isinstance(value, relax.Call):
                value = self._simplified(value, binding.var.ty)
            if not value.same_as(binding.value):
                value = self._bb.normalize(value)
            is_name = isinstance(binding, relax.VarBinding) and isinstance(value, relax.Var)
            if is_name and isinstance(binding.var, relax.DataflowVar):
                self._same[binding.var] = value
                continue
            self._values[binding.var] = value
            if _is_call(value, [_WHERE]) and self._is_zero(value.args[1]):
                self._masked[value.args[0], value.args[2]] = binding.var
            self._bb.emit_normalized(with_value(binding, value))

    def _simplified(self, call: relax.Call, kind: relax.Type) -> relax.Expr:
        if call.op == _WITH_GRAD:
            return _without_gradient(call)
        if call.op == _MATMUL:
            return self._product(call, kind)
        if call.op == Op.get(_SOFTMAX_BACKWARD):
            return self._masked_softmax(call)
        if not _is_transpose(call):
            return self._folded(call, kind)
        (operand,) = call.args
        value = self._values.get(operand)
        if value is None:
            return call
        if _is_transpose(value):
            return value.args[0]
        source = _broadcast_matrices(value, operand)
        if source is not None:
            return relax.op.broadcast_to(self._transposed(source), kind.shape)
        if _is_product(value) and self._uses[operand] == 1:
            a, b = value.args
            undone = [self._values.get(x) for x in (a, b)]
            if any(x is not None and _is_transpose(x) for x in undone):
                arguments = [self._transposed(x) for x in (b, a)]
                return relax.Call(_MATMUL, arguments, value.attrs, value.ty_args, value.span)
        return call

    def _product(self, call: relax.Call, kind: relax.Type) -> relax.Call:
        """Return a matrix product without explicit broadcasts of stacks that it does itself."""
        for place, operand in enumerate(call.args):
            source = _broadcast_matrices(self._values.get(operand), operand)
            if source is None:
                continue
            arguments = [*call.args[:place], source, *call.args[place + 1 :]]
            changed = relax.Call(_MATMUL, arguments, call.attrs, call.ty_args, call.span)
            changed = self._bb.normalize(changed)
            if structural_equal(changed.ty, kind):
                call = changed
        return call

    def _masked_softmax(self, call: relax.Call) -> relax.Call:
        """Return a softmax gradient that reads the masked result, if result and gradient have the
        same mask."""
        output_grad, result = call.args
        value = self._values.get(output_grad)
        if not (_is_call(value, [_WHERE]) and self._is_zero(value.args[1])):
            return call
        mask = value.args[0]
        masked = self._masked.get((mask, result))
        shape, axis = getattr(mask.ty, "shape", None), int(call.attrs.axis)
        if masked is None or not isinstance(shape, relax.ShapeExpr):
            return call
        if len(shape) != result.ty.ndim or not structural_equal(shape[axis], _ONE):
            return call
        return relax.Call(call.op, [output_grad, masked], call.attrs, call.ty_args, call.span)

    def _is_zero(self, expr: relax.Expr) -> bool:
        """Tell whether all elements of a tensor are known to be 0."""
        value = self._values.get(expr, expr)
        if _is_call(value, _ZEROS):
            return True
        if _is_call(value, _FULL):
            return self._is_zero(value.args[1])
        constant = constant_value(value)
        return constant is not None and not constant.any()

    def _folded(self, call: relax.Call, kind: relax.Type) -> relax.Expr:
        """Return a call of type ``kind``, simplified by neutral operands and by broadcasts of ones
        and zeros."""
        if call.op == _BROADCAST and structural_equal(call.args[0].ty, kind):
            return call.args[0]
        if call.op == _BROADCAST and isinstance(call.args[1], relax.ShapeExpr):
            value = self._values.get(call.args[0])
            dtype = dtype_of(call.args[0].ty) if call.args[0].ty.dtype is not None else None
            if dtype is not None and _is_call(value, _ONES):
                return relax.op.ones(call.args[1], dtype)
            if dtype is not None and _is_call(value, _ZEROS):
                return relax.op.zeros(call.args[1], dtype)
        filled, places = _NEUTRAL.get(call.op, ((), ()))
        for place in places:
            other = call.args[1 - place]
            is_vain = _is_call(self._values.get(call.args[place]), filled)
            if is_vain and structural_equal(other.ty, kind):
                return other
        return call

    def _transposed(self, operand: relax.Expr) -> relax.Expr:
        value = self._values.get(operand)
        if value is not None and _is_transpose(value):
            return value.args[0]
        ndim = operand.ty.ndim
        axes = [*range(ndim - 2), ndim - 1, ndim - 2]
        return self._bb.emit(relax.op.permute_dims(operand, axes))


def _is_candidate(binding: relax.Binding, filled: set[relax.Var], broadcast: set) -> bool:
    """Tell whether a binding may simplify, given the variables of ones, zeros
    and broadcasts."""
    value = binding.value
    if not isinstance(value, relax.Call):
        return False
    if value.op in (_WITH_GRAD, Op.get(_SOFTMAX_BACKWARD)) or _is_transpose(value):
        return True
    if value.op == _MATMUL:
        return any(argument in broadcast for argument in value.args[:])
    if value.op == _BROADCAST and structural_equal(value.args[0].ty, binding.var.ty):
        return True
    is_folded = value.op == _BROADCAST or value.op in _NEUTRAL
    return is_folded and any(argument in filled for argument in value.args[:])


def _broadcast_matrices(value: relax.Expr | None, operand: relax.Expr) -> relax.Expr | None:
    """Return the source of a broadcast to a stack of matrices of the same size; None for any other
    operand."""
    if not _is_call(value, [_BROADCAST]):
        return None
    (source, _), kinds = value.args, (value.args[0].ty, operand.ty)
    if not all(isinstance(kind.shape, relax.ShapeExpr) and kind.ndim >= 2 for kind in kinds):
        return None
    sizes = [list(kind.shape.values)[-2:] for kind in kinds]
    return source if structural_equal(*sizes) else None


def _is_call(value: relax.Expr | None, operators: Sequence[Op]) -> TypeGuard[relax.Call]:
    return isinstance(value, relax.Call) and value.op in operators


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
        and all(argument.ty.ndim >= 2 for argument in value.args[:])
    )
