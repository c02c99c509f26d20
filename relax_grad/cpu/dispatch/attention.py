"""Kernels of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tvm import relax, tirx
from tvm.ir import Op

from ...op.attention import check_masks
from ...op.attention_dropout import (
    ATTENTION_DROPOUT,
    ATTENTION_DROPOUT_BACKWARD,
    is_of_part,
    rate_of,
)
from ..kernel.attention import forward as kernels
from ..kernel.attention.backward import attention_backward
from .registry import CallSite, Kernel, Shape, decompose, kernel_for
from .residuals import BlockCalls, Description, Replacement, ResidualKernel, residuals_for

_FORWARD = "relax.nn.attention", "relax.nn.attention_bias", ATTENTION_DROPOUT
_BACKWARD = "relax.grad.attention_backward"
_WITH_DROPOUT = ATTENTION_DROPOUT, ATTENTION_DROPOUT_BACKWARD

#: The largest window. A longer one has no effect on tensors that kernels take.
_LARGEST_WINDOW = 2**30

#: The most numbers that a kernel saves: int32 counts them.
_MOST_SAVED = 2**31 - 1

#: The most positions of a head, times the features padded to a multiple of :data:`_PADDING`: int32
#: counts the copies.
_LARGEST, _PADDING = 2**30, 64


@kernel_for(*_FORWARD)
def attention(site: CallSite) -> Kernel | None:
    """Return the kernel of attention, without or with a bias and dropout."""
    call = site.call
    check_masks(call)
    operands, generator = _operands(call, 3)
    shapes = site.shapes(*operands, call)
    if shapes is None or (of := _attention(site, shapes[:-1])) is None:
        return None
    arguments = [*operands[:3], *generator, *operands[3:]]
    make = partial(kernels.attention, of, shapes, site.cpu)
    return Kernel(make, arguments, exchangeable=_exchangeable(3, arguments, 1), turnable=[1])


@residuals_for(*_FORWARD)
def attention_with_sums(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return attention that also saves the sums of the exponentials of its scores, for its
    gradient."""
    forward, kernel = calls.original(var), attention(site)
    if forward is None or kernel is None:
        return None
    of, shapes, _ = kernel.generator.args

    backward = ATTENTION_DROPOUT_BACKWARD if of.rate is not None else _BACKWARD

    def gradient(call: relax.Call, saved: Sequence[relax.Expr]) -> Kernel:
        taken = [shapes[-1], shapes[-1], *shapes[:-1]]
        generator = partial(attention_backward, of, taken, site.cpu, takes_sums=True)
        operands = [operand for operand in call.args if isinstance(operand.ty, relax.TensorType)]
        arguments = [*operands, *saved]
        return _backward_kernel(generator, arguments)

    uses: dict[relax.Var, Replacement] = {}
    while (
        replaced := calls.take(var, backward, _of_same_operands, _key(forward.args, forward))
    ) is not None:
        uses[replaced[0]] = gradient
    if not uses:
        return None
    generator = partial(kernels.attention, of, shapes, site.cpu, saves_sums=True)
    query = site.call.args[0].ty.shape.values
    extents = [query[0], query[2], query[1], of.saved[3]]
    if all(isinstance(n, tirx.IntImm) for n in extents[:3]) and math.prod(extents) > _MOST_SAVED:
        return None
    kind = relax.TensorType(extents, "float32")
    return ResidualKernel(replace(kernel, generator=generator), [kind], uses)


def _of_same_operands(_calls: BlockCalls, var: relax.Var, call: relax.Call) -> Description:
    """Describe a gradient by the operands and the attributes of the attention."""
    return _key(call.args[2:], call), (var,)


def _key(operands: Sequence[relax.Expr], call: relax.Call) -> tuple:
    attrs = call.attrs
    others = (attrs.scale, float), (attrs.causal_mask, str), (attrs.window_size, int)
    operands = [
        float(operand.value) if isinstance(operand, tirx.FloatImm) else operand
        for operand in operands
    ]
    return tuple(operands), tuple(None if attr is None else kind(attr) for attr, kind in others)


@kernel_for(_BACKWARD, ATTENTION_DROPOUT_BACKWARD)
def backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of attention."""
    call = site.call
    operands, generator = _operands(call, 5)
    check_masks(relax.Call(Op.get("relax.nn.attention"), operands[2:5], call.attrs))
    shapes = site.shapes(*operands)
    if shapes is None or (of := _attention(site, shapes[2:])) is None:
        return None
    arguments = [*operands[:5], *generator, *operands[5:]]
    make = partial(attention_backward, of, shapes, site.cpu)
    return _backward_kernel(make, arguments)


def _backward_kernel(generator: partial[tirx.PrimFunc], arguments: Sequence[relax.Expr]) -> Kernel:
    """Return the kernel of a gradient, whose keys and their gradient may be turned.

    Each gradient is a separate tensor. Where queries, keys and values are parts of one product, a
    call joins their gradients, in 1.5 % of the time of a ViT's step and 0.7 % of a GPT's.
    A kernel that wrote all three into one tensor would need a distance of its rows, and a dispatch
    that matches the permutations, the views and the following join.
    """
    return Kernel(
        generator,
        arguments,
        exchangeable=_exchangeable(5, arguments, 3),
        turnable=[3, len(arguments) + 1],
    )


def _exchangeable(operands: int, arguments: Sequence[relax.Expr], results: int) -> tuple[int, ...]:
    """Return the indices of the first arguments, and of the first results."""
    return *range(operands), *range(len(arguments), len(arguments) + results)


decompose(_BACKWARD, ATTENTION_DROPOUT, ATTENTION_DROPOUT_BACKWARD)


def _operands(call: relax.Call, place: int) -> tuple[list[relax.Expr], list[relax.Expr]]:
    """Return the floating-point tensors of a call, and the seed and the stream from a place on."""
    if call.op.name not in _WITH_DROPOUT:
        return list(call.args), []
    return [*call.args[:place], *call.args[place + 3 :]], list(call.args[place : place + 2])


def _attention(site: CallSite, shapes: Sequence[Shape]) -> kernels.Attention | None:
    """Return the sizes and masks of an attention call, given the shapes of the query, the key, the
    value, and the bias if there is one; None if no kernel supports it."""
    attrs = site.call.attrs
    query, key, value, *bias = shapes
    fixed = (*query[2:], *key[2:], *value[2:])
    if not all(isinstance(extent, int) for extent in fixed):
        return None
    batch, queries, heads, features = query
    if key[:3] != value[:3] or key[0] != batch or key[3] != features or heads % key[2]:
        return None
    full = [batch, heads, queries, key[1]]
    if bias and any(own not in (1, all_) for own, all_ in zip(bias[0], full, strict=True)):
        return None
    padded = max(features, value[3]) + _PADDING
    lengths = [extent for extent in (queries, key[1]) if isinstance(extent, int)]
    if any((length + _PADDING) * padded > _LARGEST for length in lengths):
        return None
    window = None if attrs.window_size is None else int(attrs.window_size)
    if window is not None:
        window = max(0, min(window, _LARGEST_WINDOW))
    drops = site.call.op.name in _WITH_DROPOUT
    return kernels.Attention(
        batch,
        queries,
        key[1],
        heads=heads,
        key_heads=key[2],
        features=features,
        value_features=value[3],
        scale=1 / math.sqrt(features) if attrs.scale is None else float(attrs.scale),
        causal_mask=None if attrs.causal_mask is None else str(attrs.causal_mask),
        window_size=window,
        bias=tuple(bias[0]) if bias else None,
        rate=rate_of(site.call) if drops else None,
        is_part=drops and is_of_part(site.call),
    )
