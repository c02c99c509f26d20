"""The calls of attention whose kernels tests compile and run."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax

from relax_grad.op.attention import attention_backward
from relax_grad.op.attention_dropout import attention_dropout, attention_dropout_backward

from .case import KernelCase, N


def attention_cases() -> Iterator[KernelCase]:
    """Yield the calls of attention."""
    nn = relax.op.nn
    shapes = [(N, 9, 4, 19), (N, 37, 2, 19), (N, 37, 2, 5)]
    for mask in (None, "TopLeft"):
        yield KernelCase(
            "relax.nn.attention",
            shapes,
            lambda _, q, k, v, mask=mask: nn.attention(q, k, v, causal_mask=mask),
            detail=str(mask),
        )
    yield KernelCase(
        "relax.nn.attention",
        [(2, N, 2, 7)] * 3,
        lambda _, q, k, v: nn.attention(q, k, v, causal_mask="BottomRight", window_size=4),
        detail="a window",
    )
    for bias in ((N, 1, 9, 37), (1, 4, 1, 37)):
        yield KernelCase(
            "relax.nn.attention_bias",
            [*shapes, bias],
            lambda _, *tensors: nn.attention_bias(*tensors),
            detail=str(bias),
        )
    result = (N, 9, 4, 5)
    for mask in (None, "TopLeft"):
        yield KernelCase(
            "relax.grad.attention_backward",
            [result, result, *shapes],
            lambda _, *tensors, mask=mask: attention_backward(*tensors, causal_mask=mask),
            detail=str(mask),
        )
    yield KernelCase(
        "relax.grad.attention_backward",
        [result, result, *shapes, (1, 4, 1, 37)],
        lambda _, *tensors: attention_backward(*tensors),
        detail="a bias",
    )
    scalars = [(), ()]
    for bias in ([], [(1, 4, 1, 37)]):
        attrs = {"causal_mask": None if bias else "TopLeft"}
        yield KernelCase(
            "relax.grad.attention_dropout",
            [*shapes, *scalars, *bias],
            lambda _, *tensors, attrs=attrs: attention_dropout(
                *tensors[:5], 0.25, *tensors[5:], **attrs
            ),
            {3: "int64", 4: "int64"},
            detail=f"{len(bias)} biases",
        )
        yield KernelCase(
            "relax.grad.attention_dropout_backward",
            [result, result, *shapes, *scalars, *bias],
            lambda _, *tensors, attrs=attrs: attention_dropout_backward(
                *tensors[:7], 0.25, *tensors[7:], **attrs
            ),
            {5: "int64", 6: "int64"},
            detail=f"{len(bias)} biases",
        )
    # Tensors with the heads before the positions.
    heads_first = [(N, 4, 9, 19), (N, 2, 37, 19), (N, 2, 37, 5)]
    yield KernelCase(
        "relax.nn.attention",
        heads_first,
        lambda _, *tensors: _exchanged(nn.attention(*map(_exchanged, tensors))),
        detail="heads first",
    )
    for index, mask in enumerate((None, "TopLeft", None)):
        yield KernelCase(
            "relax.grad.attention_backward",
            [(N, 4, 9, 5), (N, 4, 9, 5), *heads_first],
            lambda _, *tensors, mask=mask, index=index: _exchanged(
                relax.TupleGetItem(
                    attention_backward(*map(_exchanged, tensors), causal_mask=mask), index
                )
            ),
            detail=f"heads first, gradient {index}",
        )
    # Keys, and their gradient, that have the features before the positions.
    turned = [shapes[0], (N, 2, 19, 37), shapes[2]]
    yield KernelCase(
        "relax.nn.attention",
        turned,
        lambda _, q, k, v: nn.attention(q, relax.op.permute_dims(k, [0, 3, 1, 2]), v),
        detail="features first",
    )

    def gradient_of_turned(_, grad, result, query, key, value) -> relax.Call:
        key = relax.op.permute_dims(key, [0, 3, 1, 2])
        grads = attention_backward(grad, result, query, key, value, causal_mask="TopLeft")
        return relax.op.permute_dims(relax.TupleGetItem(grads, 1), [0, 2, 3, 1])

    yield KernelCase(
        "relax.grad.attention_backward",
        [result, result, *turned],
        gradient_of_turned,
        detail="features first",
    )
    # A block of 60 queries from 120 on (of AVX2 and SSE) ends before the block of keys from 128 on.
    result, key = (N, 125, 1, 3), (N, 140, 1, 3)
    yield KernelCase(
        "relax.grad.attention_backward",
        [result, result, result, key, key, (1, 1, 125, 140)],
        lambda _, *tensors: attention_backward(*tensors, causal_mask="TopLeft"),
        detail="keys after the last query",
    )
    yield KernelCase(
        "relax.grad.attention_backward",
        [(2, N, 2, 7)] * 5,
        lambda _, *tensors: attention_backward(*tensors, causal_mask="BottomRight", window_size=4),
        detail="a window",
    )
    # Rows of whole vectors, of elements and of their pairs.
    whole = (N, 33, 2, 32)
    yield KernelCase(
        "relax.nn.attention",
        [whole] * 3,
        lambda _, *tensors: nn.attention(*tensors, causal_mask="TopLeft"),
        detail="whole vectors",
    )
    yield KernelCase(
        "relax.grad.attention_backward",
        [whole] * 5,
        lambda _, *tensors: attention_backward(*tensors, causal_mask="TopLeft"),
        detail="whole vectors",
    )
    # Tiles of four vectors, on processors that have them.
    wide = [(N, 61, 2, 48), (N, 133, 1, 48), (N, 133, 1, 36)]
    result = (N, 61, 2, 36)
    yield KernelCase(
        "relax.nn.attention",
        wide,
        lambda _, *tensors: nn.attention(*tensors, causal_mask="TopLeft"),
        detail="wide tiles",
    )
    yield KernelCase(
        "relax.grad.attention_backward",
        [result, result, *wide],
        lambda _, *tensors: attention_backward(*tensors, causal_mask="TopLeft"),
        detail="wide tiles",
    )


def _exchanged(tensor: relax.Expr) -> relax.Call:
    return relax.op.permute_dims(tensor, [0, 2, 1, 3])
