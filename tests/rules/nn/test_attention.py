"""Gradients of attention: random shapes against PyTorch, sequences, half precision, and
refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad.errors import GradientError
from relax_grad.testing import TorchCase, check_against_torch, check_many_against_torch

nn = relax.op.nn
MASKS = (None, "TopLeft", "BottomRight")


def torch_attention(torch, q, k, v, bias=None, scale=None, causal_mask=None, window_size=None):
    """Compute scaled_dot_product_attention, with the masks of Relax written out."""
    queries, keys = q.shape[1], k.shape[1]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal_mask is not None:
        seen = seen.tril(abs(queries - keys) if causal_mask == "BottomRight" else 0)
    if window_size is not None:
        seen = seen.triu(1 - window_size)
    mask = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
    heads = q.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
    result = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return result.transpose(1, 2)


def tensors(batch, queries, keys, heads, key_heads, value_heads, features, value_features):
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(batch, queries, heads, features)),
        rng.normal(size=(batch, keys, key_heads, features)),
        rng.normal(size=(batch, keys, value_heads, value_features)),
    ]


@st.composite
def cases(draw):
    batch, queries, keys, features, value_features = (draw(st.integers(1, 4)) for _ in range(5))
    heads = draw(st.sampled_from([1, 2, 4]))
    shared = [draw(st.sampled_from([1, heads])) for _ in range(2)]
    inputs = tensors(batch, queries, keys, heads, *shared, features, value_features)
    attrs = {
        "scale": draw(st.sampled_from([None, 0.25])),
        "causal_mask": draw(st.sampled_from(MASKS)),
    }
    windowed = attrs["causal_mask"] == "TopLeft" or (attrs["causal_mask"] and queries == keys)
    if windowed and draw(st.booleans()):
        attrs["window_size"] = draw(st.integers(1, 4))
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, extent])) for extent in (batch, heads, queries)]
        inputs.append(np.random.default_rng(1).normal(size=(*shape, keys)))
    return inputs, attrs


def torch_case(case):
    inputs, attrs = case
    op = "relax.nn.attention_bias" if len(inputs) == 4 else "relax.nn.attention"
    return TorchCase(
        op, inputs, lambda torch, *inputs: torch_attention(torch, *inputs, **attrs), attrs
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_and_mask(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(cases()))
def test_any_shape_and_mask_at_length(torch, batch):
    check_many_against_torch(list(map(torch_case, batch)), target=TARGET)


def gradients(function, inputs, grad):
    """Return the gradients of ``sum(grad * function(*inputs))`` for queries, keys and values."""
    arrays = [*inputs, grad]
    params = [
        relax.Var(f"x{i}", relax.TensorType(value.shape, value.dtype.name))
        for i, value in enumerate(arrays)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            product = relax.op.multiply(bb.emit(function(*params[:-1])), params[-1])
            loss = bb.emit_output(relax.op.sum(bb.emit(product)))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", params[:3])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    results = machine["main_adjoint"](*map(tvm.runtime.tensor, arrays))[1]
    return [result.numpy() for result in results]


@pytest.mark.parametrize("causal_mask", MASKS)
def test_sequences_are_as_if_they_were_alone(causal_mask):
    """The queries of one sequence do not interact with the keys of another."""
    lengths = [(2, 3), (1, 1), (3, 2)]
    starts = [np.cumsum([0, *ends], dtype="int32") for ends in zip(*lengths, strict=True)]
    inputs = tensors(1, 6, 6, 2, 1, 2, 3, 2)
    grad = np.random.default_rng(1).normal(size=(1, 6, 2, 2))

    def var_len(q, k, v, q_start, k_start, longest):
        return nn.attention_var_len(
            q, k, v, q_start, longest, k_start, longest, causal_mask=causal_mask
        )

    limit = np.array(3, "int32")

    def attention(q, k, v):
        return nn.attention(q, k, v, causal_mask=causal_mask)

    grads = gradients(var_len, [*inputs, *starts, limit], grad)
    for i in range(len(lengths)):
        rows, columns = (slice(start[i], start[i + 1]) for start in starts)
        q, k, v = inputs[0][:, rows], inputs[1][:, columns], inputs[2][:, columns]
        alone = gradients(attention, [q, k, v], grad[:, rows])
        for got, wanted, at in zip(grads, alone, (rows, columns, columns), strict=True):
            np.testing.assert_allclose(got[:, at], wanted, 1e-10, 1e-12)


@pytest.mark.parametrize("causal_mask", [None, "TopLeft"])
def test_half_precision_computes_in_float32(torch, causal_mask):
    """Half precision would lose the sum of the weights of 3000 keys with about the same weight."""
    rng = np.random.default_rng(0)
    shapes = [(1, 2, 1, 4), (1, 3000, 1, 4), (1, 3000, 1, 3)]
    inputs = [rng.normal(0, 0.1, shape).astype("float16") for shape in shapes]
    grad = rng.normal(0, 2000, (1, 2, 1, 3)).astype("float16")
    grads = gradients(lambda *qkv: nn.attention(*qkv, causal_mask=causal_mask), inputs, grad)
    leaves = [torch.tensor(value.astype("float64"), requires_grad=True) for value in inputs]
    torch_attention(torch, *leaves, causal_mask=causal_mask).backward(
        torch.tensor(grad.astype("float64"))
    )
    for got, leaf in zip(grads, leaves, strict=True):
        wanted = leaf.grad.numpy()
        np.testing.assert_allclose(got, wanted, 2e-3, 2e-3 * np.abs(wanted).max())


def test_a_query_that_sees_no_key_has_no_gradient(torch):
    """The result is 0 there, as in PyTorch, and the other queries are unaffected."""
    inputs = tensors(1, 2, 3, 1, 1, 1, 2, 2)
    bias = np.zeros((1, 1, 2, 3))
    bias[0, 0, 0] = -np.inf
    check_against_torch("relax.nn.attention_bias", [*inputs, bias], torch_attention)


def differentiate(shapes, **attrs):
    params = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(nn.attention(*params, **attrs))))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main")(bb.get())


N, S, H = (tirx.Var(name, "int64") for name in "nsh")


@pytest.mark.parametrize(
    ("shapes", "attrs", "match"),
    [
        ([(1, 3, 2, 4)] * 3, {"window_size": 2}, "a causal mask only"),
        ([(1, 3, 2, 4)] * 3, {"causal_mask": "Left"}, "must be 'TopLeft' or 'BottomRight'"),
        (
            [(1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4)],
            {"causal_mask": "BottomRight", "window_size": 2},
            "as many keys as queries",
        ),
        ([(1, 3, N, 4), (1, 3, 2, 4), (1, 3, 2, 4)], {}, "number of heads must be the same"),
    ],
)
def test_ambiguous_masks_and_heads_are_refused(shapes, attrs, match):
    with pytest.raises(GradientError, match=rf"relax\.nn\.attention, binding .*{match}"):
        differentiate(shapes, **attrs)


def test_every_extent_symbolic():
    """The symbolic extents include the number of features, whose root determines the scale."""
    shapes = [(N, S, 2, H)] * 3
    module = differentiate(shapes, causal_mask="TopLeft")
    static = differentiate([(2, 3, 2, 5)] * 3, causal_mask="TopLeft")
    values = [
        np.random.default_rng(i).normal(size=(2, 3, 2, 5)).astype("float32") for i in range(3)
    ]
    values = [tvm.runtime.tensor(value) for value in values]
    results = [
        relax.VirtualMachine(tvm.compile(m, TARGET), tvm.cpu())["main_adjoint"](*values)[1]
        for m in (module, static)
    ]
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), 1e-5, 1e-6)
