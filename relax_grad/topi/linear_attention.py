"""Linear attention: a matrix of each head that each step of a sequence changes and reads.

It is differentiated by its statements. Each element is written once, so that no values are saved
besides the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ._loops import loops, statements, tasks
from .util import is_empty, is_static, zeros


def linear_attention(
    query: te.Tensor,
    key: te.Tensor,
    value: te.Tensor,
    initial: te.Tensor,
    factors: te.Tensor | None,
    rate: te.Tensor | None,
) -> list[te.Tensor]:
    """Linear attention over time.

    With the state S of a head, and the factors a and the rate b of a step: ``S = a * S``,
    ``v = b * (v - S^T k)``, ``S = S + k v^T`` and ``y = S^T q``.

    Parameters
    ----------
    query : te.Tensor
        The queries, ``(batch, steps, heads, size)``; several heads may share one of keys.
    key : te.Tensor
        The keys, ``(batch, steps, groups, size)``.
    value : te.Tensor
        The values, ``(batch, steps, groups, width)``.
    initial : te.Tensor
        The initial states, ``(batch, groups, size, width)``.
    factors : te.Tensor or None
        The factors of the rows of the states, ``(batch, steps, groups, size)``; None for 1.
    rate : te.Tensor or None
        The rates of the update, ``(batch, steps, groups)``. None: the values are added.

    Returns
    -------
    results : list[te.Tensor]
        The results, ``(batch, steps, heads, width)``; the states after each step,
        ``(batch, groups, steps, size, width)``; and with ``rate``, the products of the states with
        the keys and the values that are added, both of the shape of ``value``.
    """
    batch, steps, heads, size = query.shape
    groups, width = value.shape[2:]
    shared = int(heads) // int(groups)
    dtype = query.dtype
    inputs = [query, key, value, initial, *(x for x in (factors, rate) if x is not None)]

    def body(*buffers: tirx.Buffer) -> None:
        q, k, v, start, *others = buffers[: len(inputs)]
        result, states, *sums = buffers[len(inputs) :]
        a = others[0] if factors is not None else None
        b = others[-1] if rate is not None else None
        zero = tirx.const(0, dtype)

        def step(n: tirx.PrimExpr, t: tirx.PrimExpr, g: tirx.PrimExpr, before: Callable) -> None:
            def kept(i: tirx.PrimExpr, j: tirx.PrimExpr) -> tirx.PrimExpr:
                return before(i, j) if a is None else a[n, t, g, i] * before(i, j)

            added = v
            if b is not None:
                seen, added = sums
                with loops([width]) as (j,):
                    T.buffer_store(seen, zero, [n, t, g, j])
                with loops([size, width]) as (i, j):
                    total = seen[n, t, g, j] + kept(i, j) * k[n, t, g, i]
                    T.buffer_store(seen, total, [n, t, g, j])
                with loops([width]) as (j,):
                    error = v[n, t, g, j] - seen[n, t, g, j]
                    T.buffer_store(added, b[n, t, g] * error, [n, t, g, j])
            with loops([size, width]) as (i, j):
                total = kept(i, j) + k[n, t, g, i] * added[n, t, g, j]
                T.buffer_store(states, total, [n, g, t, i, j])
            with loops([shared]) as (r,):
                h = g * shared + r
                with loops([width]) as (j,):
                    T.buffer_store(result, zero, [n, t, h, j])
                with loops([size, width]) as (i, j):
                    total = result[n, t, h, j] + q[n, t, h, i] * states[n, g, t, i, j]
                    T.buffer_store(result, total, [n, t, h, j])

        with tasks([batch, groups]) as (n, g), contextlib.ExitStack() as stack:
            if not is_static(steps):
                stack.enter_context(T.If(steps > 0))
                stack.enter_context(T.Then())
            step(n, tirx.const(0, "int64"), g, lambda i, j: start[n, g, i, j])
            with loops([steps - 1]) as (t,):
                step(n, t + 1, g, lambda i, j: states[n, g, t, i, j])

    shapes = [[batch, steps, heads, width], [batch, groups, steps, size, width]]
    if rate is not None:
        shapes += [list(value.shape)] * 2
    if is_empty(shapes[0]):
        return [zeros(shape, dtype) for shape in shapes]
    return statements(body, inputs, [(shape, dtype) for shape in shapes], "linear_attention")
