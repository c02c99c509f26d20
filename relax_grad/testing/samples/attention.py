"""Samples of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.op import grad as backward

from ._sample import Sample, register_samples

_Symbolic = Mapping[int, Mapping[int, str]] | None

_SEQUENCES = {0: {0: "b", 1: "s"}, 1: {0: "b", 1: "t"}, 2: {0: "b", 1: "t"}}
_SELF = {i: {0: "b", 1: "s"} for i in range(3)}

# The extents: batch, queries, keys, heads, heads of keys and values, features, features of values.
# Then attributes.
_ATTENTION: dict[str, tuple[tuple[int, ...], dict[str, Any], _Symbolic]] = {
    "plain": ((2, 2, 3, 2, 2, 2, 3), {}, _SEQUENCES),
    "top left, more keys": ((1, 2, 4, 2, 2, 2, 2), {"causal_mask": "TopLeft"}, _SEQUENCES),
    "bottom right, more keys": ((1, 2, 4, 1, 1, 2, 2), {"causal_mask": "BottomRight"}, _SEQUENCES),
    "bottom right, more queries": ((1, 4, 2, 1, 1, 1, 2), {"causal_mask": "BottomRight"}, None),
    "heads that share keys": (
        (1, 2, 2, 4, 2, 2, 2),
        {"scale": 0.3},
        {i: {0: "b"} for i in range(3)},
    ),
    "a window": ((1, 4, 4, 1, 1, 2, 2), {"causal_mask": "BottomRight", "window_size": 2}, _SELF),
    "a window that holds no keys for the last queries": (
        (1, 4, 2, 1, 1, 2, 2),
        {"causal_mask": "TopLeft", "window_size": 2},
        None,
    ),
}


@register_samples("relax.nn.attention")
def attention(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (sizes, attrs, symbolic) in _ATTENTION.items():
        yield Sample(
            _tensors(rng, *sizes),
            attrs,
            symbolic=symbolic,
            torch=_torch(**attrs),
            dtypes=Sample.dtypes if note in ("plain", "a window") else (),
            note=note,
        )
    q, k, v = _tensors(rng, 1, 2, 3, 1, 1, 2, 2)
    yield Sample(
        [np.abs(q) + 5, -np.abs(k) - 20, v],
        {"causal_mask": "TopLeft", "scale": 3.0},
        torch=_torch(causal_mask="TopLeft", scale=3.0),
        dtypes=(),
        note="scores far below 0, where the masked ones would be the largest",
    )


_BIAS: dict[str, tuple[tuple[int, ...], dict[str, Any], bool]] = {
    "of its own for every score": ((2, 2, 2, 3), {}, True),
    "for all heads": ((2, 1, 2, 3), {"scale": 0.5}, False),
    "for all samples and queries": ((1, 2, 1, 3), {}, True),
    "for all but the keys, and a mask": ((1, 1, 1, 3), {"causal_mask": "TopLeft"}, True),
}


@register_samples("relax.nn.attention_bias")
def attention_bias(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, attrs, symbolic) in _BIAS.items():
        names = {0: "b", 2: "s", 3: "t"}
        names = {axis: name for axis, name in names.items() if shape[axis] > 1}
        yield Sample(
            [
                *_tensors(rng, 2, 2, 3, 2, 1 if "scale" in attrs else 2, 2, 2),
                rng.normal(size=shape),
            ],
            attrs,
            symbolic={**_SEQUENCES, 3: names} if symbolic else None,
            torch=_torch(**attrs),
            dtypes=Sample.dtypes if note == "for all samples and queries" else (),
            note=note,
        )
    bias = rng.normal(size=(1, 1, 3, 3))
    bias[0, 0, 0, 1:] = bias[0, 0, 2] = -np.inf
    yield Sample(
        [*_tensors(rng, 1, 3, 3, 1, 1, 2, 2), bias],
        wrt=[0, 1, 2],
        torch=_torch(),
        dtypes=(),
        note="minus infinity, also for every key of a query",
    )


@register_samples("relax.nn.attention_var_len")
def attention_var_len(rng: np.random.Generator) -> Iterator[Sample]:
    starts = [np.array(places, "int32") for places in ([0, 2, 3, 3, 6], [0, 1, 4, 5, 7])]
    for note, attrs, keys in (
        ("sequences", {"scale": 0.5}, starts[1]),
        ("bottom right", {"causal_mask": "BottomRight"}, starts[1]),
        ("a window", {"causal_mask": "TopLeft", "window_size": 2}, starts[0]),
    ):
        # One query and one key belong to no sequence.
        sizes = (1, 7, keys[-1] + 1, 2, 1, 2, 2)
        limits = [np.int32(3)] * 2
        yield Sample(
            [*_tensors(rng, *sizes), starts[0], keys, *map(np.asarray, limits)],
            attrs,
            function=_var_len,
            symbolic={0: {1: "s"}, 1: {1: "t"}, 2: {1: "t"}, 3: {0: "m"}, 4: {0: "m"}},
            torch=_torch_var_len(**attrs),
            dtypes=Sample.dtypes if note == "sequences" else (),
            note=note,
        )


def _var_len(
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    seqstart_q: relax.Expr,
    seqstart_k: relax.Expr,
    max_q: relax.Expr,
    max_k: relax.Expr,
    **attrs: Any,
) -> relax.Expr:
    return relax.op.nn.attention_var_len(q, k, v, seqstart_q, max_q, seqstart_k, max_k, **attrs)


#: The sizes, the attributes and the shape of the bias of gradients.
_GRADIENTS: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, ...] | None]] = {
    "plain": ((2, 2, 3, 2, 2, 2, 3), {}, None),
    "heads that share keys, a mask": ((1, 3, 4, 2, 1, 2, 2), {"causal_mask": "TopLeft"}, None),
    "a bias": ((2, 2, 3, 2, 2, 2, 2), {"scale": 0.5}, (2, 1, 2, 3)),
}

#: The same with a rate of dropout.
_DROPPED = {
    note: (sizes, {"rate": 0.5 if "causal_mask" in attrs else 0.25, **attrs}, shape)
    for note, (sizes, attrs, shape) in _GRADIENTS.items()
}


@register_samples("relax.grad.attention_backward")
def attention_backward(rng: np.random.Generator) -> Iterator[Sample]:
    """Samples whose result, an argument here, is not the attention's."""
    for note, (sizes, attrs, shape) in _GRADIENTS.items():
        yield _gradient(rng, note, sizes, attrs, shape, torch=_torch_backward(**attrs))


def _gradient(
    rng: np.random.Generator,
    note: str,
    sizes: tuple[int, ...],
    attrs: dict[str, Any],
    shape: tuple[int, ...] | None,
    generator: Sequence[np.ndarray] = (),
    **others: Any,
) -> Sample:
    """Return a sample of a gradient, with the shape of its bias if it has one."""
    q, k, v = _tensors(rng, *sizes)
    result = (*q.shape[:3], v.shape[3])
    symbolic = {0: {0: "b", 1: "s"}, 1: {0: "b", 1: "s"}}
    symbolic |= {2 + i: axes for i, axes in _SEQUENCES.items()}
    return Sample(
        [
            *(rng.normal(size=result) for _ in range(2)),
            *(q, k, v),
            *generator,
            *([] if shape is None else [rng.normal(size=shape)]),
        ],
        attrs,
        tvm_order=1 if shape is None else None,
        symbolic=symbolic if shape is None else None,
        dtypes=Sample.dtypes if note == "plain" else (),
        note=note,
        **others,
    )


@register_samples("relax.grad.seeded_dropout")
def seeded_dropout(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, rate in (((2, 3, 4), 0.5), ((70,), 0.2), ((3, 2), 1.0), ((3, 2), 0.0)):
        yield Sample(
            [rng.normal(size=shape), *_generator()],
            {"rate": rate},
            function=lambda *tensors, rate: backward.seeded_dropout(*tensors, rate),
            symbolic={0: {0: "b"}},
            note=f"{shape}, rate {rate}",
        )


@register_samples("relax.grad.attention_dropout")
def attention_dropout(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (sizes, attrs, shape) in _DROPPED.items():
        yield Sample(
            [
                *_tensors(rng, *sizes),
                *_generator(),
                *([] if shape is None else [rng.normal(size=shape)]),
            ],
            attrs,
            function=_with_dropout(backward.attention_dropout, 5),
            symbolic=_SEQUENCES if shape is None else None,
            dtypes=Sample.dtypes if note == "plain" else (),
            note=note,
        )


@register_samples("relax.grad.attention_dropout_backward")
def attention_dropout_backward(rng: np.random.Generator) -> Iterator[Sample]:
    """Samples whose result, an argument here, is not the attention's."""
    function = _with_dropout(backward.attention_dropout_backward, 7)
    for note, (sizes, attrs, shape) in _DROPPED.items():
        yield _gradient(rng, note, sizes, attrs, shape, _generator(), function=function)


def _generator() -> list[np.ndarray]:
    """Return a seed and a stream."""
    return [np.asarray(np.int64(number)) for number in (7, 3)]


def _with_dropout(builder: Any, count: int) -> Callable[..., Any]:
    """Return a builder that takes the rate as an attribute, after ``count`` tensors."""

    def function(*tensors: relax.Expr, rate: float, **attrs: Any) -> relax.Expr:
        return builder(*tensors[:count], rate, *tensors[count:], **attrs)

    return function


def _torch_backward(scale: float | None = None, causal_mask: Any = None) -> Callable[..., Any]:
    def backward(
        torch: Any, output_grad: Any, output: Any, q: Any, k: Any, v: Any, bias: Any = None
    ) -> Any:
        heads, factor = q.shape[2], q.shape[3] ** -0.5 if scale is None else scale
        shared = heads // k.shape[2]
        keys, values = (tensor.repeat_interleave(shared, 2) for tensor in (k, v))
        scores = torch.einsum("bqhf,bkhf->bhqk", q, keys) * factor
        scores = scores if bias is None else scores + bias
        seen = _seen(torch, q.shape[1], k.shape[1], causal_mask, None)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        inner = (output_grad * output).sum(-1).transpose(1, 2)[..., None]
        scores_grad = torch.einsum("bqhf,bkhf->bhqk", output_grad, values) - inner
        scores_grad = scores_grad * weights * factor
        key_grad = torch.einsum("bhqk,bqhf->bkhf", scores_grad, q)
        value_grad = torch.einsum("bhqk,bqhf->bkhf", weights, output_grad)
        return (
            torch.einsum("bhqk,bkhf->bqhf", scores_grad, keys),
            *(grouped.unflatten(2, (-1, shared)).sum(3) for grouped in (key_grad, value_grad)),
        )

    return backward


@register_samples("relax.grad.attention_weights")
def attention_weights(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(torch: Any, scores: Any, *seqstarts: Any) -> Any:
        seen = _seen(torch, 3, 4, "TopLeft", 2)
        if seqstarts:
            seqstart_q, seqstart_k = seqstarts
            seen = _seen_in_sequences(torch, 3, 4, seqstart_q, seqstart_k, "TopLeft", window_size=2)
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)

    masks = {"causal_mask": "TopLeft", "window_size": 2}
    yield Sample(
        [rng.normal(size=(2, 1, 3, 4))],
        masks,
        symbolic={0: {0: "b", 2: "s", 3: "t"}},
        torch=forward,
    )
    starts = [np.int64([0, 1, 3]), np.int64([0, 1, 4])]
    yield Sample([rng.normal(size=(1, 2, 3, 4)), *starts], masks, torch=forward, note="sequences")


def _tensors(
    rng: np.random.Generator,
    batch: Any,
    queries: Any,
    keys: Any,
    heads: Any,
    shared_heads: Any,
    features: Any,
    value_features: Any,
) -> list:
    return [
        rng.normal(size=(batch, queries, heads, features)),
        rng.normal(size=(batch, keys, shared_heads, features)),
        rng.normal(size=(batch, keys, shared_heads, value_features)),
    ]


def _torch(
    scale: float | None = None, causal_mask: Any = None, window_size: Any = None
) -> Callable[..., Any]:
    def forward(torch: Any, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        seen = _seen(torch, q.shape[1], k.shape[1], causal_mask, window_size)
        mask = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
        return _attend(torch, q, k, v, mask, scale)

    return forward


def _torch_var_len(
    scale: float | None = None, causal_mask: Any = None, window_size: Any = None
) -> Callable[..., Any]:
    def forward(
        torch: Any, q: Any, k: Any, v: Any, seqstart_q: Any, seqstart_k: Any, max_q: Any, max_k: Any
    ) -> Any:
        seen = _seen_in_sequences(
            torch, q.shape[1], k.shape[1], seqstart_q, seqstart_k, causal_mask, window_size
        )
        return _attend(torch, q, k, v, seen, scale)

    return forward


def _attend(torch: Any, q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return result.transpose(1, 2)


def _seen(torch: Any, queries: Any, keys: Any, causal_mask: Any, window_size: Any) -> Any:
    """Return the mask of the keys that each query attends to."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal_mask is not None:
        seen = seen.tril(abs(queries - keys) if causal_mask == "BottomRight" else 0)
    return seen if window_size is None else seen.triu(1 - window_size)


def _seen_in_sequences(
    torch: Any,
    queries: Any,
    keys: Any,
    seqstart_q: Any,
    seqstart_k: Any,
    causal_mask: Any,
    window_size: Any,
) -> Any:
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    starts_q, starts_k = seqstart_q.tolist(), seqstart_k.tolist()
    ends = zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
    for q_begin, q_end, k_begin, k_end in ends:
        inside = _seen(torch, q_end - q_begin, k_end - k_begin, causal_mask, window_size)
        seen[q_begin:q_end, k_begin:k_end] = inside
    return seen
