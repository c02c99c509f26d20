"""Cases of the attention kernels, and their results in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from philox_numbers import expected_bits
from tvm import tirx

from relax_grad.cpu.kernel.attention.forward import Attention

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

#: Masks and scales of a case.
MASKS = [
    {},
    {"causal_mask": "TopLeft"},
    {"causal_mask": "BottomRight", "scale": 0.3},
    {"causal_mask": "TopLeft", "window_size": 5},
]

#: The sizes of a case: batch, queries, keys, heads, heads of keys, features, features of values.
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 9, 21, 4, 2, 16, 16),
    (1, 70, 133, 2, 1, 33, 17),
    (1, 133, 70, 2, 2, 8, 40),
    (2, 64, 128, 3, 3, 4, 64),
    (1, 131, 131, 1, 1, 64, 32),
]

#: The sizes as parameters: whole blocks and single elements are among the long sweeps.
SIZE_PARAMS = [
    pytest.param(size, marks=[] if i in (1, 2, 5) else [pytest.mark.slow])
    for i, size in enumerate(SIZES)
]


#: Cases with dropout: sizes, symbolic extents, axes of the bias, attributes.
DROPPED = [
    ((2, 9, 21, 4, 2, 5, 7), (), None, {"rate": 0.5}),
    ((1, 70, 192, 2, 1, 5, 7), ("queries", "keys"), (2, 3), {"rate": 0.1, **MASKS[1]}),
    ((1, 131, 70, 2, 2, 5, 7), ("batch",), None, {"rate": 0.75, **MASKS[3]}),
]


#: Cases with tensors that have the heads before the positions: also the numbers of these tensors,
#: among queries, keys, values, the result, its gradient, and the gradients of the first three.
HEADS_FIRST = [
    ((2, 9, 21, 4, 2, 16, 16), (), None, {}, range(8)),
    ((2, 70, 133, 4, 2, 5, 7), ("batch", "keys"), (1, 3), MASKS[1], (0, 3, 5, 7)),
    ((3, 131, 270, 4, 1, 8, 16), ("queries",), None, {"rate": 0.3}, (1, 2, 4, 6)),
]


#: Cases with keys and their gradient that have heads, features, then positions: after the numbers
#: of tensors with heads before positions, those of the turned ones.
TURNED = [
    ((2, 9, 21, 4, 2, 17, 16), (), None, {}, (0, 3), (1, 6)),
    ((1, 70, 133, 4, 2, 16, 7), ("batch", "keys"), (1, 3), MASKS[1], (), (1, 6)),
    ((3, 16, 16, 2, 2, 32, 5), (), None, {"rate": 0.3}, (), (1,)),
    ((2, 33, 270, 2, 1, 8, 16), (), None, {}, (6,), (1,)),
    ((1, 40, 64, 2, 2, 16, 16), ("queries",), None, MASKS[2], (1,), (6,)),
]


#: Cases with wide tiles, on processors that have them: features of more than two vectors, and keys
#: of more than three, or of two panels under a causal mask. The last two have narrow ones.
WIDE = [
    ((1, 70, 133, 2, 1, 48, 64), (), None, MASKS[1]),
    ((2, 61, 50, 2, 2, 64, 33), ("batch",), (1, 3), {}),
    ((1, 131, 300, 2, 1, 64, 100), ("queries", "keys"), None, {"rate": 0.3, **MASKS[2]}),
    ((1, 64, 257, 1, 1, 96, 36), (), None, {}),
    ((3, 129, 128, 1, 1, 33, 50), (), None, MASKS[3]),
    ((1, 66, 48, 1, 1, 64, 64), (), None, {}),
    ((1, 40, 127, 1, 1, 64, 64), (), None, MASKS[1]),
]


def in_orders(arrays, exchanged, turned=()):
    """Return arrays, of which those with these numbers get the heads before the positions, or the
    heads and the features."""

    def ordered(i, array):
        if i in turned:
            return np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        return np.ascontiguousarray(array.swapaxes(1, 2)) if i in exchanged else array

    return [ordered(i, array) for i, array in enumerate(arrays)]


def scores_of(of, query, key, bias):
    """Return the masked scores, ``(batch, heads, queries, keys)``."""
    key = key.repeat_interleave(of.heads // of.key_heads, 2)
    scores = torch.einsum("bqhf,bkhf->bhqk", query, key) * of.scale
    if bias is not None:
        scores = scores + bias
    queries, keys = scores.shape[2:]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if of.causal_mask is not None:
        seen = seen.tril(abs(queries - keys) if of.causal_mask == "BottomRight" else 0)
    if of.window_size is not None:
        seen = seen.triu(1 - of.window_size)
    return scores.masked_fill(~seen, -torch.inf)


#: The seed and the stream of dropped weights.
GENERATOR = -5, 2**33 + 1


def factors_of(of, shape):
    """Return the factors of weights of a shape after their dropout."""
    words = expected_bits(int(np.prod(shape)), *GENERATOR).reshape(shape)
    return torch.from_numpy((words < (1 - of.rate) * 2.0**32) / (1 - of.rate))


def with_generator(of, inputs, place=3):
    """Return the inputs of a kernel, with the seed and the stream if weights are dropped."""
    if of.rate is None:
        return list(inputs)
    return [*inputs[:place], *(np.array(number, "int64") for number in GENERATOR), *inputs[place:]]


def reference(of, query, key, value, bias=None):
    """Return the attention, and the numbers that its kernel saves."""
    scores = scores_of(of, query, key, bias)
    largest = scores.amax(-1)
    is_empty = torch.isneginf(largest)
    largest = largest.masked_fill(is_empty, 0)
    logarithms = (scores - largest[..., None]).logsumexp(-1).masked_fill(is_empty, torch.inf)
    weights = torch.exp(scores - largest[..., None] - logarithms[..., None])
    saved = weights if of.has_few_keys else torch.stack([largest, logarithms], -1)
    if of.rate is not None:
        weights = weights * factors_of(of, weights.shape)
    value = value.repeat_interleave(of.heads // of.key_heads, 2)
    result = torch.einsum("bhqk,bkhf->bqhf", weights, value)
    return result, saved


def sized(sizes, symbolic, bias, **attrs):
    """Return the attention of a case, whose symbolic extents are variables, and the shapes of its
    tensors."""
    names = dict(zip(("batch", "queries", "keys"), sizes, strict=False))
    batch, queries, keys = (
        tirx.Var(name, "int32") if name in symbolic else size for name, size in names.items()
    )
    heads, key_heads, features, value_features = sizes[3:]
    shape = None
    if bias is not None:
        full = (batch, heads, queries, keys)
        shape = [extent if i in bias else 1 for i, extent in enumerate(full)]
    of = Attention(
        batch,
        queries,
        keys,
        heads,
        key_heads,
        features,
        value_features,
        **{"scale": features**-0.5, "bias": shape, **attrs},
    )
    shapes = [
        [batch, queries, heads, features],
        [batch, keys, key_heads, features],
        [batch, keys, key_heads, value_features],
        *([] if shape is None else [shape]),
        [batch, queries, heads, value_features],
        of.saved,
    ]
    return of, shapes, names


@st.composite
def drawn(draw):
    batch, key_heads, group = (draw(st.integers(1, 3)) for _ in range(3))
    queries, keys = (draw(st.integers(1, 300)) for _ in range(2))
    features, value_features = (draw(st.integers(1, 70)) for _ in range(2))
    sizes = (batch, queries, keys, key_heads * group, key_heads, features, value_features)
    symbolic = draw(st.sampled_from([(), ("batch",), ("queries", "keys"), ("keys",)]))
    bias = draw(st.sampled_from([None, None, (0, 1, 2, 3), (2, 3), (1, 3)]))
    rate = draw(st.sampled_from([{}, {}, {"rate": 0.2}]))
    exchanged = draw(st.sampled_from([(), range(8), (0, 3, 5), (1, 2, 4, 6, 7)]))
    return sizes, symbolic, bias, {**draw(st.sampled_from(MASKS)), **rate}, exchanged
