"""The replacement of an attention that is written out by one operator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar, Op
from tvm.relax import op

from ....ir.aliases import may_write, writing_functions
from ....ir.bindings import bindings_of, used
from ....ir.dataflow import with_changed_blocks
from ....ir.module import ModulePass
from ....op.attention_dropout import attention_dropout
from ._dropouts import dropout_of
from ._groups import ATTENTIONS, without_repeats
from ._masks import value_of
from ._moves import is_move, source_of, with_extents
from ._shapes import (
    are_equal_shapes,
    are_faster_as_products,
    are_supported,
    batch_of,
    extents_of,
    fit,
    is_one,
    number_of,
)
from ._terms import MASKED, Term, causal_mask_of, guarded, spans, with_four_axes

_MATMUL, _SOFTMAX = Op.get("relax.matmul"), Op.get("relax.nn.softmax")
_PERMUTE, _WHERE = Op.get("relax.permute_dims"), Op.get("relax.where")
_NOT = Op.get("relax.logical_not")
_ADD, _SUBTRACT = Op.get("relax.add"), Op.get("relax.subtract")
_MULTIPLY, _DIVIDE = Op.get("relax.multiply"), Op.get("relax.divide")

#: The operators between the two products, besides the softmax.
_STEPS = _WHERE, _ADD, _SUBTRACT, _MULTIPLY, _DIVIDE


@tvm.transform.module_pass(opt_level=0, name="relax_grad.FuseAttention")
class FuseAttention(ModulePass):
    """Replace attentions that are written out by ``relax.nn.attention`` or ``attention_bias``.

    An attention is ``matmul(softmax(scores, -1), values)``. Its scores are
    ``matmul(queries, keys^T)``, perhaps with factors of one element, biases, and masks:
    ``where(mask, scores, number)`` with a number below -1e4, or the other way round. The weights of
    masked scores may be replaced by zero after the softmax. A mask that
    constants determine and that lets each query see the keys up to its own becomes the attribute
    ``causal_mask``. The operator has kernels for CPUs whose memory grows with the number of keys,
    not with the number of scores; its gradient computes the scores again. Run the pass before
    differentiation. The imports of PyTorch and ONNX models, and ``train_step``, run it.

    Tensors have three or four axes and the dtype float32, all batch axes are equal, and the head
    and the features have static extents. An attention whose scores or weights have other uses
    stays. So does one without masks, biases and dropout whose products take less time than the
    operator: of at most 32 positions and one and a half times as many features, whose factors are
    not permuted, and of more than 256 keys and 64 features, if it has at most 2**21 scores. Dropout
    of the weights by ``relax_grad.frontend.random.dropout`` becomes part of the operator
    ``relax.grad.attention_dropout``, which computes the same mask block by block. If keys and
    values are repeated for heads of queries that share them, the operator reads them before.

    Results differ by rounding. A query whose keys are all masked has the result of the original:
    NaN for minus infinity, and the mean of the values for a finite number.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> q, k, v = (relax.Var(n, relax.TensorType((2, 4, 64, 16), "float32")) for n in "qkv")
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [q, k, v]):
    ...     with bb.dataflow():
    ...         turned = bb.emit(relax.op.permute_dims(k, [0, 1, 3, 2]))
    ...         scores = bb.emit(relax.op.matmul(q, turned))
    ...         weights = bb.emit(relax.op.nn.softmax(scores, -1))
    ...         y = bb.emit_output(relax.op.matmul(weights, v))
    ...     _ = bb.emit_func_output(y)
    >>> text = transform.FuseAttention()(bb.get()).script()
    >>> text.count("R.nn.attention"), text.count("R.matmul")
    (1, 0)
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        writers = writing_functions(mod)
        return with_changed_blocks(
            mod,
            lambda function: _has_attention(function, writers),
            lambda function, _memory: _fused_in(function, mod),
        )


def _has_attention(function: relax.Function, writers: Collection[GlobalVar]) -> bool:
    """Tell whether a function has a softmax and two products, or an attention, and no call that
    writes to memory."""
    values = [binding.value for binding in bindings_of(function.body)]
    operators = Counter(
        value.op
        for value in values
        if isinstance(value, relax.Call) and value.op in (_SOFTMAX, _MATMUL, *ATTENTIONS)
    )
    is_written_out = operators[_SOFTMAX] and operators[_MATMUL] >= 2
    if not is_written_out and not any(operators[operator] for operator in ATTENTIONS):
        return False
    return not any(may_write(value, writers) for value in values)


def _fused_in(function: relax.Function, mod: tvm.IRModule) -> Callable:
    counts = Counter(
        variable for binding in bindings_of(function.body) for variable in used(binding.value)
    )
    counts.update(relax.analysis.free_vars(function.body.body))

    def changed(block: relax.DataflowBlock) -> relax.DataflowBlock:
        matcher = _Matcher(block, counts, mod)
        bindings = [matcher.shared(matcher.fused(binding)) for binding in block.bindings[:]]
        if all(new is old for new, old in zip(bindings, block.bindings[:], strict=True)):
            return block
        return relax.DataflowBlock(bindings, block.span)

    return changed


class _Selection(NamedTuple):
    """The selection of data or another number.

    Attributes
    ----------
    condition : relax.Expr
        The condition.
    keeps : bool
        Whether it holds for the data that stay.
    tensor : relax.Expr
        The data.
    """

    condition: relax.Expr
    keeps: bool
    tensor: relax.Expr


class _Matcher:
    """The search for attentions in a dataflow block."""

    def __init__(self, block: relax.DataflowBlock, counts: Counter, mod: tvm.IRModule):
        self._values = {
            binding.var: binding.value
            for binding in block.bindings[:]
            if isinstance(binding, relax.VarBinding)
        }
        self._counts, self._mod = counts, mod
        self._constants: dict[relax.Var, np.ndarray | None] = {}

    def shared(self, binding: relax.Binding) -> relax.Binding:
        """Return the binding of an attention without repeated keys and values, or the same
        binding."""

        def changed(value: relax.Expr) -> relax.Expr:
            if not isinstance(value, relax.Call):
                return value
            if value.op in ATTENTIONS:
                return without_repeats(value, self._values)
            if not is_move(value):  # of the result of an attention that was written out
                return value
            data = value.args[0]
            new = changed(data)
            return (
                value if new is data else relax.Call(value.op, [new, *value.args[1:]], value.attrs)
            )

        new = binding.value if not isinstance(binding, relax.VarBinding) else changed(binding.value)
        return binding if new is binding.value else relax.VarBinding(binding.var, new, binding.span)

    def fused(self, binding: relax.Binding) -> relax.Binding:
        """Return the binding of an operator that replaces an attention's last product, or
        the same binding."""
        product = binding.value
        if not isinstance(binding, relax.VarBinding) or not _calls(product, _MATMUL):
            return binding
        weights = source_of(product.args[0], self._used_once)
        dropout = dropout_of(weights, self._values, self._used_once, self._mod)
        if dropout is not None:
            weights = source_of(dropout.data, self._used_once)
        zeroed = self._zeroed(weights)
        if zeroed is not None:
            weights = self._used_once(zeroed.tensor)
        if not _calls(weights, _SOFTMAX) or (rank := weights.ty.ndim) not in (3, 4):
            return binding
        if int(weights.attrs.axis) not in (-1, rank - 1):
            return binding
        scale = 1.0
        factors: list[relax.Expr] = []
        terms: list[Term] = []
        scores = self._before(weights.args[0])
        while scores is not None and not _calls(scores, _MATMUL):
            step = self._step(scores)
            if step is None:
                return binding
            inner, change = step
            if isinstance(change, Term):
                term = None if factors else change.times(scale)  # of the bias too
                if term is None:
                    return binding
                terms.insert(0, term)
            elif isinstance(change, float):
                scale *= change
            else:
                factors.append(change)
            scores = self._before(inner)
        operands = None if scores is None else self._operands(scores, weights, product)
        if scores is None or operands is None:
            return binding
        if not math.isfinite(scale) or not all(spans(term, weights) for term in terms):
            return binding
        if zeroed is not None:
            masked = self._with_zeros(terms, zeroed)
            if masked is None:
                return binding
            terms = masked
        # The operator saves permutations of the factors.
        moved = [is_move(self._bound(factor)) for factor in (scores.args[0], product.args[1])]
        query, turned = scores.args
        if dropout is None and are_faster_as_products(query, turned, any(moved), bool(terms)):
            return binding
        result = self._attention(operands, rank, scale, factors, terms, dropout=dropout)
        if result is None:
            return binding
        if not are_equal_shapes(batch_of(product), batch_of(weights)):
            result = op.reshape(result, product.ty.shape)
        return relax.VarBinding(binding.var, result, binding.span)

    def _zeroed(self, weights: relax.Call | None) -> _Selection | None:
        """Return the selection of weights or zero, if it follows the softmax."""
        if not _calls(weights, _WHERE):
            return None
        condition, left, right = weights.args
        for data, other, keeps in ((left, right, True), (right, left, False)):
            if self._number(other) == 0.0 and are_equal_shapes(
                extents_of(data), extents_of(weights)
            ):
                return _Selection(condition, keeps, data)
        return None

    def _with_zeros(self, terms: list[Term], zeroed: _Selection) -> list[Term] | None:
        """Return terms whose mask also selects zero after the softmax; None if the operator does
        not compute the same: it divides by the sum of the weights that stay."""
        masks = [term for term in terms if term.number is not None]
        if len(masks) != 1 or any(term.may_add_a_mask for term in terms):
            return None
        own = self._without_not(masks[0].tensor, masks[0].keeps)
        other = self._without_not(zeroed.condition, zeroed.keeps)
        if own[1] != other[1] or not self._are_same(own[0], other[0]):
            return None
        masked = replace(masks[0], is_zeroed=True)
        return [masked if term is masks[0] else term for term in terms]

    def _without_not(self, condition: relax.Expr, keeps: bool) -> tuple[relax.Expr, bool]:
        """Return a condition before negations, and whether it holds for the elements that stay."""
        while _calls(value := self._bound(condition), _NOT):
            condition, keeps = value.args[0], not keeps
        return condition, keeps

    def _are_same(self, expr: relax.Expr, other: relax.Expr) -> bool:
        """Tell whether two expressions are computed in the same way."""
        if isinstance(expr, relax.Var) and expr.same_as(other):
            return True
        value, others = self._bound(expr), self._bound(other)
        if not isinstance(value, relax.Call) or not isinstance(others, relax.Call):
            return value is not None and tvm_ffi.structural_equal(value, others)
        return (
            value.op == others.op
            and isinstance(value.op, Op)
            and len(value.args) == len(others.args)
            and tvm_ffi.structural_equal(value.attrs, others.attrs)
            and tvm_ffi.structural_equal(value.ty, others.ty)
            and all(map(self._are_same, value.args, others.args))
        )

    def _operands(
        self, scores: relax.Call, weights: relax.Expr, product: relax.Call
    ) -> tuple | None:
        """Return queries, keys with the features before the positions, and values, with the axes of
        the weights; None if the operator does not support them."""
        operands = *scores.args, product.args[1]
        tensors = *scores.args, *product.args, product
        full = extents_of(weights)
        if full is None:
            return None
        if all(are_equal_shapes(extents_of(tensor), full) for tensor in (scores, product.args[0])):
            return operands if fit(*tensors) else None
        known = map(extents_of, (scores, *tensors))
        shapes = [shape for shape in known if shape is not None and len(shape) >= 3]
        if len(shapes) < 1 + len(tensors) or len(full) < 3:
            return None
        own, query, turned, moved, value, _ = shapes
        pairs = [
            (own[:-2], query[:-2]),
            (own[:-2], turned[:-2]),
            (moved[:-2], value[:-2]),
            (own[-2:], full[-2:]),
            (moved[-2:], full[-2:]),
        ]
        if not all(are_equal_shapes(*pair) for pair in pairs):
            return None
        wanted = [[*full[:-2], *shape[-2:]] for shape in (query, turned, value)]
        if not are_supported(wanted, tensors):
            return None
        made = [
            with_extents(tensor, shape, self._values)
            for tensor, shape in zip((scores.args[0], product.args[1]), wanted[::2], strict=True)
        ]
        key, last = scores.args[1], len(full) - 1
        swapped = self._values.get(key) if isinstance(key, relax.Var) else None
        order = [*range(last - 1), last, last - 1]
        rank = key.ty.ndim
        if _calls(swapped, _PERMUTE) and _exchanges_last(swapped.attrs.axes, rank):
            shape = [*wanted[1][:-2], wanted[1][-1], wanted[1][-2]]
            key = op.permute_dims(with_extents(swapped.args[0], shape, self._values), order)
        else:
            key = with_extents(key, wanted[1], self._values)
        return made[0], key, made[1]

    def _attention(
        self,
        operands: tuple,
        rank: int,
        scale: float,
        factors: list,
        terms: list,
        dropout: tuple | None,
    ) -> relax.Expr | None:
        """Return an attention as an operator, or None if its masks have a meaning that the operator
        has not."""
        query, turned, value = operands
        for factor in factors:
            query = op.multiply(query, factor)
        query, value = (self._with_heads(expr, rank) for expr in (query, value))
        key = self._permuted(turned, [0, 2, 1] if rank == 3 else [0, 3, 1, 2])
        key = op.expand_dims(key, 2) if rank == 3 else key
        masks = [term for term in terms if term.number is not None or term.allowed is not None]
        causal = causal_mask_of(masks[0]) if len(masks) == 1 else None
        others = [term for term in terms if term not in masks]
        if causal and not any(term.may_be_infinite for term in others):
            if not others or masks[0].may_be_infinite or masks[0].is_zeroed:
                terms = others  # no query is without a key
            else:
                causal = None  # the keys of a query that the others mask would count
        else:
            causal = None
        if any(term.is_selection for term in terms) and any(term.may_add_a_mask for term in terms):
            return None
        bias = None
        for term in terms:
            bias = term.after(bias)
        if bias is not None:
            bias = with_four_axes(bias, terms, rank)
            query = guarded(query, bias, terms)
        attrs: dict[str, Any] = {"scale": scale, "causal_mask": causal}
        if dropout is not None:
            attrs["bias"] = bias
            result = attention_dropout(query, key, value, *dropout[1:], **attrs)
        elif bias is None:
            result = op.nn.attention(query, key, value, **attrs)
        else:
            result = op.nn.attention_bias(query, key, value, bias, **attrs)
        result = op.permute_dims(result, [0, 2, 1, 3])
        return op.squeeze(result, [1]) if rank == 3 else result

    def _with_heads(self, expr: relax.Expr, rank: int) -> relax.Expr:
        """Return a tensor as (batch, positions, heads, features)."""
        return op.expand_dims(expr, 2) if rank == 3 else self._permuted(expr, [0, 2, 1, 3])

    def _permuted(self, expr: relax.Expr, axes: list[int]) -> relax.Expr:
        """Return a tensor with its axes permuted, by one permutation instead of several."""
        while _calls(value := self._bound(expr), _PERMUTE):
            own = value.attrs.axes
            own = range(len(axes))[::-1] if own is None else own
            axes, expr = [int(own[axis]) % len(axes) for axis in axes], value.args[0]
        return expr if axes == sorted(axes) else op.permute_dims(expr, axes)

    def _before(self, expr: relax.Expr) -> relax.Call | None:
        """Return the call that scores are bound to, or the product before moves of its axes."""
        call = self._used_once(expr)
        if not is_move(call):
            return call
        source = source_of(expr, self._used_once)
        return source if _calls(source, _MATMUL) else None

    def _bound(self, expr: relax.Expr) -> relax.Expr | None:
        return self._values.get(expr) if isinstance(expr, relax.Var) else expr

    def _used_once(self, expr: relax.Expr) -> relax.Call | None:
        """Return the call that a variable with a single use is bound to."""
        value = self._values.get(expr) if isinstance(expr, relax.Var) else None
        is_single = isinstance(value, relax.Call) and self._counts[expr] == 1
        return value if is_single else None

    def _step(self, call: relax.Call) -> tuple[relax.Expr, Term | float | relax.Expr] | None:
        """Return scores before a call, and how it changes them: by a term, a number, or a factor of
        one element."""
        if call.op == _WHERE:
            condition, left, right = call.args
            for scores, other, keeps in ((left, right, True), (right, left, False)):
                number = self._number(other)
                if number is not None and number <= MASKED and self._are_scores(scores, call):
                    value = self._value_of(condition)
                    term = Term(condition, number, keeps, value, math.isinf(number))
                    return scores, term
            return None
        if call.op not in _STEPS:
            return None
        left, right = call.args
        operands = [(left, right)]
        if call.op in (_ADD, _MULTIPLY):
            operands.append((right, left))
        for scores, other in operands:
            if not self._are_scores(scores, call):
                continue
            if call.op in (_ADD, _SUBTRACT):
                return scores, self._bias(other, call.op == _SUBTRACT)
            number = self._number(other)
            if number is not None:
                if call.op == _MULTIPLY:
                    return scores, number
                return scores, 1 / number if number else math.inf
            extents = extents_of(other)
            if call.op == _MULTIPLY and extents is not None and all(map(is_one, extents)):
                return scores, other
        return None

    def _bias(self, bias: relax.Expr, is_subtracted: bool) -> Term:
        value = self._value_of(bias)
        infinite = self._may_be_infinite(bias) if value is None else bool(np.isinf(value).any())
        if is_subtracted:
            bias = relax.BlockBuilder().normalize(op.negative(bias))
            value = None if value is None else -value
        return Term(bias, None, True, value, infinite)

    def _are_scores(self, expr: relax.Expr, call: relax.Call) -> bool:
        """Tell whether an operand of a call, of the same shape, comes from a product by steps of an
        attention."""
        operand = self._used_once(expr)
        if operand is None or not are_equal_shapes(extents_of(expr), extents_of(call)):
            return False
        if is_move(operand) or operand.op == _MATMUL:
            return _calls(self._before(expr), _MATMUL)
        return operand.op in _STEPS and any(self._are_scores(arg, operand) for arg in operand.args)

    def _value_of(self, expr: relax.Expr) -> np.ndarray | None:
        return value_of(expr, self._values, self._constants)

    def _number(self, expr: relax.Expr) -> float | None:
        """Return the number of a tensor of one element that constants determine, or None."""
        number, extents = number_of(expr), extents_of(expr)
        if number is not None or extents is None or not all(map(is_one, extents)):
            return number
        value = self._value_of(expr)
        return None if value is None else float(value.reshape(()))

    def _may_be_infinite(self, expr: relax.Expr) -> bool:
        """Tell whether a bias may be minus infinity: not if it selects one of two finite
        numbers."""
        value = self._values.get(expr) if isinstance(expr, relax.Var) else None
        if not _calls(value, _WHERE):
            return True
        numbers = map(number_of, value.args[1:])
        return not all(number is not None and math.isfinite(number) for number in numbers)


def _calls(value: relax.Expr | None, operator: Op) -> TypeGuard[relax.Call]:
    return isinstance(value, relax.Call) and value.op == operator


def _exchanges_last(axes: Collection | None, rank: int) -> bool:
    """Tell whether a permutation exchanges the last two axes, and names the axes."""
    exchanged = [*range(rank - 2), rank - 1, rank - 2]
    return axes is not None and [int(axis) % rank for axis in axes] == exchanged
