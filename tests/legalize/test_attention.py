"""The legalization of attention where TVM's is wrong, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import build, tensor, value_of
from sweep import TARGET
from tvm import relax, tirx


def reference(q, k, v, bias=0.0, seen=True, scale=None):
    q, k, v = (value.astype("float64").transpose(0, 2, 1, 3) for value in (q, k, v))
    k, v = (value.repeat(q.shape[1] // value.shape[1], 1) for value in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = np.where(seen, scores + bias, -np.inf)
    weights = np.exp(scores - np.nan_to_num(scores.max(-1, keepdims=True), neginf=0.0))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return (weights @ v).transpose(0, 2, 1, 3)


def compute(*values, function=relax.op.nn.attention, **attrs):
    return value_of(function, *values, **attrs)


def values_of(dtype, queries=3, keys=5, heads=4, shared_heads=4):
    rng = np.random.default_rng(0)
    shapes = [(2, queries, heads, 4), (2, keys, shared_heads, 4), (2, keys, shared_heads, 3)]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def check(actual, expected, dtype):
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}[dtype]
    assert actual.dtype.name == dtype
    np.testing.assert_allclose(actual.astype("float64"), expected, tolerance, tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shared_heads", [1, 2])
def test_heads_that_share_keys(dtype, shared_heads):
    values = values_of(dtype, shared_heads=shared_heads)
    check(compute(*values), reference(*values), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scale_in_half_precision_keeps_the_dtype(dtype):
    values = values_of(pytest.importorskip("ml_dtypes").bfloat16 if dtype[0] == "b" else dtype)
    check(compute(*values, scale=0.25), reference(*values, scale=0.25), dtype)


def test_half_precision_sums_in_float32():
    """In float16, the sum of 4096 weights of 1 would be 2048."""
    q, k, v = np.zeros((1, 1, 1, 1)), np.zeros((1, 4096, 1, 1)), np.ones((1, 4096, 1, 1))
    values = [value.astype("float16") for value in (q, k, v)]
    np.testing.assert_array_equal(compute(*values), np.ones((1, 1, 1, 1), "float16"))


def test_causal_scores_far_below_zero():
    q, k, v = values_of("float32")
    q, k = abs(q) + 10, -abs(k) - 10
    result = compute(q, k, v, causal_mask="TopLeft")
    check(result, reference(q, k, v, seen=np.tri(3, 5, dtype=bool)), "float32")


def test_window():
    values = values_of("float32", 5, 5)
    result = compute(*values, causal_mask="BottomRight", window_size=2)
    seen = np.tril(np.triu(np.ones((5, 5), bool), -1))
    check(result, reference(*values, seen=seen), "float32")


def test_window_without_a_causal_mask_is_refused():
    with pytest.raises(ValueError, match="a window is defined with a causal mask only"):
        compute(*values_of("float32"), window_size=2)


def test_bias_that_leaves_no_key():
    values = values_of("float32")
    bias = np.zeros((1, 1, 3, 5), "float32")
    bias[..., 1, :] = -np.inf
    result = compute(*values, bias)
    assert not result[:, 1].any()
    check(result, reference(*values, bias), "float32")


def test_sequences():
    values = [value[:1] for value in values_of("float32", 5, 6, 4, 2)]
    starts, ends = np.int32([0, 2, 5]), np.int32([0, 1, 6])
    seen = np.zeros((5, 6), bool)
    seen[:2, :1] = seen[2:, 1:] = True

    def var_len(q, k, v, seqstart_q, seqstart_k, longest):
        return relax.op.nn.attention_var_len(q, k, v, seqstart_q, longest, seqstart_k, longest)

    result = compute(*values, starts, ends, np.array(5, "int32"), function=var_len)
    check(result, reference(*values, seen=seen), "float32")


@pytest.mark.parametrize("keys", [0, tirx.Var("n", "int64")], ids=["static", "symbolic"])
@pytest.mark.parametrize("causal_mask", [None, "TopLeft"])
def test_no_keys(keys, causal_mask):
    """The result of a query without keys is 0."""
    params = [
        tensor("query", (2, 4, 3, 8), "float32"),
        tensor("key", (2, keys, 3, 8), "float32"),
        tensor("value", (2, keys, 3, 8), "float32"),
    ]
    module = build(params, lambda *of: relax.op.nn.attention(*of, causal_mask=causal_mask))
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    values = [np.ones((2, extent, 3, 8), "float32") for extent in (4, 0, 0)]
    for _ in range(3):
        result = machine["main"](*map(tvm.runtime.tensor, values)).numpy()
        np.testing.assert_array_equal(result, np.zeros((2, 4, 3, 8)))


def test_a_number_of_keys_that_is_an_expression():
    """Patches of a picture and a token of the class."""
    rows, columns = tirx.Var("h", "int64"), tirx.Var("w", "int64")
    keys = rows // 2 * (columns // 2) + 1
    params = [
        tensor("size", (rows, columns), "float32"),
        *(tensor(name, (2, keys, 3, 8), "float32") for name in ("query", "key", "value")),
    ]
    module = build(params, lambda _, *of: relax.op.nn.attention(*of))
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(2, 7, 3, 8)).astype("float32") for _ in range(3)]
    inputs = [np.zeros((4, 6), "float32"), *values]
    result = machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()
    check(result, reference(*values), "float32")
