"""Transformers of PyTorch itself."""

from __future__ import annotations

import torch
from torch import nn

from .parts import (
    BATCH,
    LENGTH,
    Model,
    model,
    padding,
)


class Sum(nn.Module):
    """The squares of the first result of a module, with weights."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        weights = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).cos()
        return (output.square() * weights).mean(), output


def sequence(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (BATCH, LENGTH, 8)), dtype=torch.float64)


@model("plain")
def transformer():
    module = nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True, norm_first=True)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(4).double(),
        "tgt_is_causal": True,
        "src_key_padding_mask": padding() == 0,
        "memory_key_padding_mask": padding() == 0,
    }
    return Model(Sum(module).double(), (sequence(), sequence(BATCH, 4, 8)), masks)


@model("plain", ("relu", "relu", False), ("gelu-first", "gelu", True))
def encoder_layer(activation, first):
    """Without gradients, and only then, PyTorch would take another path."""
    module = nn.TransformerEncoderLayer(
        8, 2, 12, 0.0, activation, batch_first=True, norm_first=first
    )
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH).double()
    bias = torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(padding() == 0, -1e4)
    kwargs = {"src_mask": causal, "src_key_padding_mask": bias, "is_causal": True}
    return Model(Sum(module).double(), (sequence(),), kwargs)


@model("plain")
def encoder_with_empty_places():
    """The encoder would gather the places that are not padded, in evaluation mode."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Model(Sum(module).double(), (sequence(),), {"src_key_padding_mask": padding() == 0})


_MASKS = {
    "none": {},
    "weights": {"need_weights": True, "average_attn_weights": False},
    "boolean": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)},
    "heads": {"attn_mask": torch.linspace(-1, 1, BATCH * 2 * 36).double().reshape(-1, 6, 6)},
    "padding": {"key_padding_mask": padding() == 0},
    "both": {"key_padding_mask": padding() == 0, "attn_mask": torch.eye(6, dtype=torch.bool)},
}


@model("plain", *((name, masks) for name, masks in _MASKS.items()))
def attention(masks):
    module = nn.MultiheadAttention(8, 2, batch_first=True, bias=True)
    return Model(Sum(module).double(), (sequence(),) * 3, {"need_weights": False, **masks})


@model("plain")
def attention_with_bias():
    """Keys and values of other widths, with learned and zero rows."""
    module = nn.MultiheadAttention(
        8, 2, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=5, batch_first=True
    )
    data = (sequence(), sequence(BATCH, 4, 6), sequence(BATCH, 4, 5))
    return Model(Sum(module).double(), data)
