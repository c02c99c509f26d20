"""Tensor expressions of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx

from ..ir.dtypes import accumulation_dtype
from .util import cast, is_empty, zeros

Bounds = Callable[["tirx.PrimExpr"], Sequence["tirx.PrimExpr"]]


def attention_weights(
    scores: te.Tensor,
    seqstarts: Sequence[te.Tensor] = (),
    causal_mask: str | None = None,
    window_size: int | None = None,
) -> te.Tensor:
    """Softmax over the keys that each query attends to.

    Parameters
    ----------
    scores : te.Tensor
        The scores, of shape ``(batch, heads, queries, keys)``.
    seqstarts : Sequence[te.Tensor]
        Empty, or two integer tensors of shape ``(sequences + 1,)``: the start of each sequence of
        queries, and of keys, and the end of the last one. A query then attends to the keys of its
        own sequence only.
    causal_mask : str, optional
        ``"TopLeft"``: query ``i`` of a sequence attends to the keys up to ``i``. ``"BottomRight"``:
        to those up to ``i + abs(queries - keys)``.
    window_size : int, optional
        The largest number of keys that a query attends to: those from ``i - window_size + 1`` on
        for query ``i``.

    Returns
    -------
    result : te.Tensor
        The weights, of the shape and the dtype of ``scores``; half precision is computed in
        float32. A masked key has weight 0. All keys have weight 0 if a query attends to none, or to
        none with a score above minus infinity.
    """
    if is_empty(scores.shape):
        return zeros(scores.shape, scores.dtype)
    dtype = accumulation_dtype(scores.dtype)
    keys = scores.shape[3]
    bounds = _bounds(scores, seqstarts, causal_mask, window_size)
    zero, nothing = tirx.const(0, dtype), tirx.min_value(dtype)

    def seen(
        query: tirx.PrimExpr, key: tirx.PrimExpr, value: tirx.PrimExpr, otherwise: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        if bounds is None:
            return value
        low, high = bounds(query)
        return tirx.if_then_else(tirx.all(key >= low, key < high), value, otherwise)

    def score(
        b: tirx.PrimExpr, n: tirx.PrimExpr, query: tirx.PrimExpr, key: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        return scores(b, n, query, key).astype(dtype)

    def largest(b: tirx.PrimExpr, n: tirx.PrimExpr, query: tirx.PrimExpr) -> tirx.PrimExpr:
        return te.max(seen(query, key_max, score(b, n, query, key_max), nothing), axis=key_max)

    def weight(
        b: tirx.PrimExpr, n: tirx.PrimExpr, query: tirx.PrimExpr, key: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        return seen(query, key, tirx.exp(score(b, n, query, key) - top(b, n, query)), zero)

    def normalized(
        b: tirx.PrimExpr, n: tirx.PrimExpr, query: tirx.PrimExpr, key: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        sum_ = total(b, n, query)
        return tirx.if_then_else(sum_ == zero, zero, weights(b, n, query, key) / sum_)

    rows = scores.shape[:3]
    key_max, key_sum = te.reduce_axis((0, keys), "k_max"), te.reduce_axis((0, keys), "k_sum")
    top = te.compute(rows, largest, name="attention_top")
    weights = te.compute(scores.shape, weight, name="attention_exp")
    total = te.compute(
        rows, lambda *row: te.sum(weights(*row, key_sum), axis=key_sum), name="attention_total"
    )
    return cast(te.compute(scores.shape, normalized, name="attention_weights"), scores.dtype)


def _bounds(
    scores: te.Tensor,
    seqstarts: Sequence[te.Tensor],
    causal_mask: str | None,
    window_size: int | None,
) -> Bounds | None:
    """Return a function from a query to its half-open range of keys; None if every query attends to
    all keys."""
    queries, keys = scores.shape[2:]
    if seqstarts:
        seqstart_q, seqstart_k = seqstarts
        bounds = _bounds_in_sequence(queries, seqstart_q, seqstart_k, causal_mask, window_size)
        low, high = (
            te.compute((queries,), lambda i: bounds(i)[0], name="first_key"),
            te.compute((queries,), lambda i: bounds(i)[1], name="end_key"),
        )
        return lambda query: (low(query), high(query))
    if causal_mask is None and window_size is None:
        return None
    zero = tirx.const(0, "int64")
    return lambda query: _limits(
        query, zero, queries, zero, keys, causal_mask=causal_mask, window_size=window_size
    )


def _bounds_in_sequence(
    queries: tirx.PrimExpr,
    seqstart_q: te.Tensor,
    seqstart_k: te.Tensor,
    causal_mask: str | None,
    window_size: int | None,
) -> Bounds:
    """Return a function from a query to its range of keys; the range is empty for a query in no
    sequence."""
    starts = seqstart_q.shape[0]
    start = te.reduce_axis((0, starts), "start")
    started = te.compute(
        (queries,),
        lambda i: te.sum(
            tirx.Select(
                seqstart_q[start].astype("int64") <= i.astype("int64"),
                tirx.const(1, "int64"),
                tirx.const(0, "int64"),
            ),
            axis=start,
        ),
        name="started_sequences",
    )

    def bounds(i: tirx.PrimExpr) -> list[tirx.PrimExpr]:
        count = started[i]
        inside = tirx.all(count >= 1, count < starts, count < seqstart_k.shape[0])
        ends = [
            seqstart[count + offset].astype("int64")
            for seqstart in (seqstart_q, seqstart_k)
            for offset in (-1, 0)
        ]
        limits = _limits(i.astype("int64"), *ends, causal_mask=causal_mask, window_size=window_size)
        return [tirx.if_then_else(inside, limit, tirx.const(0, "int64")) for limit in limits]

    return bounds


def _limits(
    query: tirx.PrimExpr,
    q_begin: tirx.PrimExpr,
    q_end: tirx.PrimExpr,
    k_begin: tirx.PrimExpr,
    k_end: tirx.PrimExpr,
    *,
    causal_mask: str | None,
    window_size: int | None,
) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return the half-open range of keys that a query of a sequence attends to."""
    low, high = k_begin, k_end
    position = k_begin + (query - q_begin)
    if causal_mask is not None:
        offset = 0
        if causal_mask == "BottomRight":
            offset = tirx.abs((q_end - q_begin) - (k_end - k_begin))
        high = tirx.min(high, position + offset + 1)
    if window_size is not None:
        low = tirx.max(low, position - window_size + 1)
    return low, high
