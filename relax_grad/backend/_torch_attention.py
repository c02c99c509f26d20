"""Scaled dot-product attention of the library "torch", forward and backward.

The forward function of a step also returns the log-sum-exp of the scores, with which the gradient
computes the weights again by blocks: flash attention on a CPU, memory-efficient attention on a GPU.
Where the device has neither, PyTorch's other implementation runs, and its gradient repeats the
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._torch_function import Function

__all__ = ["FUNCTIONS"]


def _attend(torch: Any, operands: Sequence, scale: float, causal: int) -> Any:
    """Return the attention of operands of shape (batch, length, heads, channels)."""
    query, key, value, *bias = operands
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=bias[0] if bias else None, is_causal=bool(causal), scale=scale
    )
    return attended.transpose(1, 2)


def _attention(torch: Any, given: Sequence, results: Sequence) -> None:
    *operands, scale, causal = given
    results[0].copy_(_attend(torch, operands, scale, causal))


def _attention_backward(torch: Any, given: Sequence, results: Sequence) -> None:
    """Attend again, and differentiate: there is no residual of the forward pass."""
    output_grad, query, key, value, *rest, scale, causal = given
    wrt = [each.detach().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        attended = _attend(torch, [*wrt, *rest], scale, causal)
    gradients = torch.autograd.grad(attended, wrt, output_grad)
    for result, gradient in zip(results, gradients, strict=True):
        result.copy_(gradient)


# With the log-sum-exp of the scores.


def _is_fused(torch: Any, query: Any, value: Any, bias: Sequence) -> bool:
    """Tell whether the device has an attention by blocks for these operands."""
    channels, own = query.shape[-1], value.shape[-1]
    if query.device.type == "cpu":
        return channels == own
    # Rows of keys, and of a bias, are read by 16 bytes.
    step = 16 // query.element_size()
    is_aligned = channels % step == own % step == 0
    if bias:
        is_aligned = is_aligned and bias[0].shape[-1] % step == 0 and bias[0].ndim == 4
    return is_aligned and query.dtype != torch.float64 and query.device.type == "cuda"


def _parts(given: Sequence, leading: int) -> tuple[list, list, list, float, int]:
    """Return the leading tensors, the operands, the bias, the scale, and the causality."""
    *tensors, scale, causal, has_bias = given
    before, operands = tensors[:leading], tensors[leading : leading + 3]
    return before, operands, tensors[leading + 3 :] if has_bias else [], scale, causal


def _mask(query: Any, key: Any, bias: Sequence) -> Any:
    """Return the bias for all heads and instances of the batch, or None."""
    if not bias:
        return None
    extents = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    return bias[0].expand(extents)


def _forward(torch: Any, given: Sequence, results: Sequence) -> None:
    _, operands, bias, scale, causal = _parts(given, 0)
    query, key, value = operands
    output, sums = results
    if not _is_fused(torch, query, value, bias):
        output.copy_(_attend(torch, [*operands, *bias], scale, causal))
        return
    mask = _mask(query, key, bias)
    if query.device.type == "cpu":
        attended, own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(each.transpose(1, 2) for each in operands),
            0.0,
            bool(causal),
            attn_mask=mask,
            scale=scale,
        )
        attended = attended.transpose(1, 2)
    else:
        attended, own, *_ = torch.ops.aten._efficient_attention_forward(
            *operands, mask, *[None] * 4, 0.0, causal, True, scale=scale
        )
    output.copy_(attended)
    sums[..., : own.shape[-1]].copy_(own)


def _backward(torch: Any, given: Sequence, results: Sequence) -> None:
    before, operands, bias, scale, causal = _parts(given, 3)
    output_grad, output, sums = before
    query, key, value = operands
    if not _is_fused(torch, query, value, bias):
        _attention_backward(torch, [output_grad, *operands, *bias, scale, causal], results)
        return
    mask = _mask(query, key, bias)
    if query.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(each.transpose(1, 2) for each in (output_grad, *operands, output)),
            sums[..., : query.shape[1]],
            0.0,
            bool(causal),
            attn_mask=mask,
            scale=scale,
        )
        gradients = [each.transpose(1, 2) for each in gradients]
    else:
        number = torch.zeros((), dtype=torch.int64)
        # One split of the keys: the sums of several have no fixed order.
        *gradients, _ = torch.ops.aten._efficient_attention_backward(
            *(output_grad, *operands, mask, output, None, None),
            *(query.shape[1], key.shape[1], sums, 0.0, number, number, causal, False),
            scale=scale,
            num_splits_key=1,
        )
    for result, gradient in zip(results, gradients, strict=True):
        result.copy_(gradient)


FUNCTIONS: dict[str, Function] = {
    "nn.attention": Function(_attention, is_product=True),
    "nn.attention_bias": Function(_attention, is_product=True),
    "grad.attention_backward": Function(_attention_backward, 3, is_product=True),
    "attention_and_log_sum_exp": Function(_forward, 2, is_product=True, kept_results=(1,)),
    "attention_gradients": Function(_backward, 3, is_product=True, kept_operands=(2,)),
}
