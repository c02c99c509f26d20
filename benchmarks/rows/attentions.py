"""Attention without and with its gradients, for several lengths and sizes of heads, plain, causal,
grouped, and with dropout of the weights."""

from __future__ import annotations

from torch.nn import functional as F
from tvm import relax

from relax_grad.op.attention_dropout import attention_dropout

from ._form import Row, with_gradients

#: The batch, the length, the number of heads and their size.
_SIZES = [
    (8, 128, 12, 64),
    (4, 256, 12, 64),
    (2, 512, 12, 64),
    (1, 1024, 12, 64),
    (1, 2048, 4, 64),
    (1, 4096, 2, 64),
    (2, 512, 12, 32),
    (2, 512, 8, 128),
    (1, 2048, 4, 128),
]

#: Sizes with a number of heads of the keys and values, which the heads of the queries share.
_GROUPED = [((1, 1024, 12, 64), 4), ((1, 1024, 8, 128), 1)]

#: Sizes with dropout of a tenth of the weights.
_DROPPED = [(8, 128, 12, 64), (1, 1024, 12, 64)]


def rows(
    sizes: tuple[int, int, int, int],
    is_causal: bool,
    key_heads: int | None = None,
    rate: float | None = None,
) -> list[Row]:
    """Return attention, and attention with its gradients."""
    mask = "TopLeft" if is_causal else None
    batch, length, heads, features = sizes
    keys = (batch, length, heads if key_heads is None else key_heads, features)

    def in_relax(_bb, q, k, v):
        if rate is None:
            return relax.op.nn.attention(q, k, v, causal_mask=mask)
        seed, stream = (relax.const(number, "int64") for number in (7, 3))
        return attention_dropout(q, k, v, seed, stream, rate, causal_mask=mask)

    def in_torch(*tensors):
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=rate or 0.0, is_causal=is_causal, enable_gqa=key_heads is not None
        )
        return attended.transpose(1, 2)

    name = f"attention{', causal' if is_causal else ''}"
    name += "" if rate is None else f", dropout {rate}"
    size = "x".join(map(str, sizes)) + ("" if key_heads is None else f", {key_heads} of keys")
    return [
        Row(
            "matmul",
            f"{name} {size}",
            [sizes, keys, keys],
            in_relax,
            in_torch,
            is_random=bool(rate),
        ),
        Row(
            "matmul",
            f"{name} and gradients {size}",
            [sizes, keys, keys, sizes],
            in_relax,
            with_gradients(in_torch, 0, 1, 2),
            wrt=(0, 1, 2),
            keeps_result=True,
            is_random=bool(rate),
        ),
    ]


ROWS = [
    *(row for sizes in _SIZES for is_causal in (False, True) for row in rows(sizes, is_causal)),
    *(row for sizes, key_heads in _GROUPED for row in rows(sizes, True, key_heads)),
    *(row for sizes in _DROPPED for row in rows(sizes, True, rate=0.1)),
]
