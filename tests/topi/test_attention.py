"""The attention weights, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import te, tirx

from relax_grad.topi.attention import attention_weights


def run(scores, *seqstarts, **attrs):
    tensors = [
        te.placeholder([tirx.IntImm("int64", e) for e in value.shape], value.dtype.name, f"x{i}")
        for i, value in enumerate((scores, *seqstarts))
    ]
    result = attention_weights(tensors[0], tensors[1:], **attrs)
    function = tvm.compile(te.create_prim_func([*tensors, result]), target=TARGET)
    out = tvm.runtime.tensor(np.full_like(scores, np.nan))
    function(*map(tvm.runtime.tensor, (scores, *seqstarts)), out)
    return out.numpy()


def reference(scores, seen):
    masked = np.where(seen, scores.astype("float64"), -np.inf)
    top = np.nan_to_num(masked.max(-1, keepdims=True), neginf=0.0)
    weights = np.exp(masked - top)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def random(*shape, dtype="float32"):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("window_size", [None, 1, 3])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 3), (3, 1)])
@pytest.mark.parametrize("causal_mask", [None, "TopLeft", "BottomRight"])
def test_masks(causal_mask, shape, window_size):
    scores = random(2, 1, *shape)
    seen = np.ones(shape, bool)
    if causal_mask:
        seen = np.tril(seen, abs(shape[0] - shape[1]) if causal_mask == "BottomRight" else 0)
    if window_size:
        seen = np.triu(seen, 1 - window_size)
    result = run(scores, causal_mask=causal_mask, window_size=window_size)
    np.testing.assert_allclose(result, reference(scores, seen), 1e-5, 1e-6)
    assert not result[:, :, ~seen].any()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_sequence_starts_that_are_garbage(dtype):
    """Any starts give valid weights; a query before the first or after the last sequence has no
    weights."""
    info = np.iinfo(dtype)
    scores = random(1, 2, 6, 4)
    for starts_q, starts_k in (
        ([1, 3, 5], [0, 2, 4]),
        ([-3, 2, 100], [-7, 90, 3]),
        ([5, 3, 1], [4, 2, 0]),
        ([info.min, 0, info.max], [info.min, 0, info.max]),
        ([info.max] * 3, [info.min] * 3),
    ):
        for causal_mask in (None, "BottomRight"):
            starts = [np.array(values, dtype) for values in (starts_q, starts_k)]
            result = run(scores, *starts, causal_mask=causal_mask)
            totals = result.sum(-1)
            assert np.all(np.isclose(totals, 1) | (totals == 0))
            outside = [i for i in range(6) if i < min(starts_q) or i >= max(starts_q)]
            assert not totals[:, :, outside].any()


def test_extremes():
    """Scores that overflow, a query with only minus infinity, and a query with NaN."""
    scores = np.float32([[1e38, 1e38], [-np.inf, -np.inf], [-np.inf, -1e38], [np.nan, 0]])
    result = run(scores[None, None])[0, 0]
    np.testing.assert_array_equal(result[:3], [[0.5, 0.5], [0, 0], [0, 1]])
    assert np.isnan(result[3]).all()


def test_half_precision_sums_in_float32():
    result = run(np.zeros((1, 1, 1, 4096), "float16"))
    np.testing.assert_array_equal(result, np.full_like(result, 1 / 4096))


def test_no_keys():
    assert run(np.zeros((2, 1, 3, 0), "float32"), causal_mask="TopLeft").shape == (2, 1, 3, 0)
