"""Attention and quantised products of ONNX Runtime: values and gradients by PyTorch in float64, and
onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")

import onnx_models as models  # noqa: E402
from onnx import helper  # noqa: E402
from onnx_models import normal  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

F = torch.nn.functional

MICROSOFT = "com.microsoft"

BATCH, STEPS, WIDTH = 2, 6, 64


class Case(NamedTuple):
    """A node on ``x`` of shape (2, 6, 64), whose other operands are weights in float64 or
    constants, or left out.

    The function takes x and the operands that are there.
    """

    kind: str
    operands: tuple
    function: Callable
    attributes: Mapping = MappingProxyType({})


def double(*shape):
    return normal(*shape, dtype="float64")


def attend(q, k, v, scale=None, bias=None, excluded=None, softcap=0.0):
    """Return attention of (batch, heads, steps, size) as (batch, steps, heads * size)."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def in_heads(x, heads):
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def later(steps=STEPS, window=None):
    places = torch.arange(steps)
    distance = places[:, None] - places[None, :]
    return (distance < 0) | (distance >= window if window else distance < -steps)


def joined(x, w, b, heads=2, sizes=None, **settings):
    parts = (x @ w + b).split(sizes or [w.shape[1] // 3] * 3, -1)
    return attend(*(in_heads(tensor, heads) for tensor in parts), **settings)


def multi(q, k, v, vector=None, heads=2, **settings):
    if vector is not None:
        parts = vector.split([q.shape[2], k.shape[2], v.shape[2]])
        q, k, v = (tensor + part for tensor, part in zip((q, k, v), parts, strict=True))
    return attend(*(in_heads(tensor, heads) for tensor in (q, k, v)), **settings)


def grouped(
    q, k, v, last, heads=4, groups=2, tables=None, window=None, interleaved=False, **settings
):
    q, k, v = in_heads(q, heads), in_heads(k, groups), in_heads(v, groups)
    if tables is not None:
        q, k = (turned(tensor, *tables, interleaved) for tensor in (q, k))
    k, v = (tensor.repeat_interleave(heads // groups, 1) for tensor in (k, v))
    behind = torch.arange(STEPS)[None, None, None] > last.reshape(-1, 1, 1, 1)
    return attend(q, k, v, excluded=later(window=window) | behind, **settings)


def turned(x, cosines, sines, interleaved):
    c, s = cosines[: x.shape[2]], sines[: x.shape[2]]
    width = 2 * c.shape[1]
    y, rest = x[..., :width], x[..., width:]
    if interleaved:
        even, other = y[..., 0::2], y[..., 1::2]
        y = torch.stack([even * c - other * s, other * c + even * s], -1).flatten(-2)
    else:
        even, other = y.chunk(2, -1)
        y = torch.cat([even * c - other * s, other * c + even * s], -1)
    return torch.cat([y, rest], -1)


def bias_of(mask):
    """Return the scores that a mask adds."""
    return torch.where(mask > 0, 0.0, -10000.0).double()


ANGLES = np.outer(np.arange(STEPS), 0.5 ** np.arange(8))
RAW = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], "int32")
LENGTHS = np.array([4, 6], "int32")
SQUARE = np.tril(np.ones((BATCH, STEPS, STEPS), "int32"))
LAST = np.array([STEPS - 1, STEPS - 1], "int32")


def packed(rows, width, bits, block, zeros, groups=None):
    """Return packed numbers, scales, zero points (packed, floating-point or none), g_idx, and the
    weight (rows, width)."""
    rng, blocks = np.random.default_rng(bits), -(-width // block)
    q = rng.integers(0, 1 << bits, (rows, blocks, block))
    zero = np.full((rows, blocks), float(1 << (bits - 1)))
    if zeros == "float":
        zero = rng.uniform(0, 1 << bits, (rows, blocks))
    elif zeros:
        zero = rng.integers(0, 1 << bits, (rows, blocks))
    scales = rng.uniform(0.1, 0.3, (rows, blocks))
    of = np.arange(blocks * block) // block if groups is None else np.array(groups)
    weight = (q.reshape(rows, -1)[:, :width] - zero[:, of[:width]]) * scales[:, of[:width]]

    def in_bytes(values):
        per = 8 // bits
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per)])
        values = values.reshape(*values.shape[:-1], -1, per) << (np.arange(per) * bits)
        return values.sum(-1).astype("uint8")

    points = zero.reshape(-1) if zeros == "float" else in_bytes(zero).reshape(-1) if zeros else None
    order = None if groups is None else np.array(groups, "int32")
    return (in_bytes(q), scales.reshape(-1), points, order), torch.tensor(weight)


def n_bits(bits, block, zeros, width=WIDTH, groups=None):
    operands, weight = packed(5, width, bits, block, zeros, groups)
    while operands[-1] is None:
        operands = operands[:-1]
    attributes = {"N": 5, "K": width, "bits": bits, "block_size": block}
    return Case("MatMulNBits", operands, lambda x, *_: x @ weight.T, attributes)


def shuffled(*sizes):
    """Return groups of these sizes in random order."""
    return np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


TWO = {"num_heads": 2}
FOUR = {"num_heads": 4, "kv_num_heads": 2}
TOTAL = np.array(STEPS, "int32")
WEIGHT, BIAS = double(WIDTH, 3 * WIDTH), double(3 * WIDTH)

CASES = {
    "joined": Case("Attention", (WEIGHT, BIAS), joined, TWO),
    "joined_causal": Case(
        "Attention", (double(WIDTH, 3 * WIDTH), BIAS), lambda x, w,
        b: joined(x, w, b, excluded=later(), scale=0.25),
        {**TWO, "unidirectional": 1, "scale": 0.25},
    ),
    "joined_mask": Case(
        "Attention", (double(WIDTH, 3 * WIDTH), BIAS, RAW), lambda x, w, b,
        m: joined(x, w, b, bias=bias_of(m)[:, None, None]), TWO
    ),
    "joined_lengths": Case(
        "Attention", (double(WIDTH, 3 * WIDTH), BIAS, LENGTHS),
        lambda x, w, b, m: joined(x, w, b, bias=bias_of(torch.tensor(RAW))[:, None, None]), TWO,
    ),
    "joined_square": Case(
        "Attention", (double(WIDTH, 3 * WIDTH), BIAS, SQUARE), lambda x, w, b,
        m: joined(x, w, b, bias=bias_of(m)[:, None]), TWO
    ),
    "joined_bias": Case(
        "Attention", (double(WIDTH, 3 * WIDTH), BIAS, None, None, double(1, 2, STEPS, STEPS)),
        lambda x, w, b, extra: joined(x, w, b, bias=extra), TWO,
    ),
    "joined_sizes": Case(
        "Attention", (double(WIDTH, 12 + 12 + 6), double(30)), lambda x, w,
        b: joined(x, w, b, 2, [12, 12, 6]),
        {**TWO, "qkv_hidden_sizes": [12, 12, 6]},
    ),
    "multi": Case("MultiHeadAttention", (double(2, 5, WIDTH), double(2, 5, WIDTH)), multi, TWO),
    "multi_bias": Case(
        "MultiHeadAttention", (double(2, 6, WIDTH), double(2, 6, WIDTH), double(3 * WIDTH), RAW,
            double(2, 2, 6, 6)),
        lambda x, k, v, b, m, extra: multi(x, k, v, b, bias=extra + bias_of(m)[:, None, None]), TWO,
    ),
    "multi_causal": Case(
        "MultiHeadAttention", (double(2, 6, WIDTH), double(2, 6, WIDTH)), lambda x, k,
        v: multi(x, k, v, excluded=later(), scale=0.5),
        {**TWO, "unidirectional": 1, "scale": 0.5},
    ),
    "multi_heads": Case(
        "MultiHeadAttention", (double(2, 2, 5, WIDTH // 2), double(2, 2, 5, WIDTH // 2)),
        lambda x, k, v: attend(in_heads(x, 2), k, v), TWO,
    ),
    "grouped": Case("GroupQueryAttention",
    (double(2, 6, WIDTH // 2), double(2, 6, WIDTH // 2), None, None, LAST, TOTAL),
                    lambda x, k, v, last, _: grouped(x, k, v, last), FOUR),
    "grouped_packed": Case(
        "GroupQueryAttention", (None, None, None, None, LAST, TOTAL),
        lambda x, last, _: grouped(*x.split([WIDTH // 2, WIDTH // 4, WIDTH // 4], -1), last), FOUR,
    ),
    "grouped_rotary": Case(
        "GroupQueryAttention",
        (double(2, 6, WIDTH // 2), double(2, 6, WIDTH // 2), None, None, LAST, TOTAL,
        np.cos(ANGLES), np.sin(ANGLES)),
        lambda x, k, v, last, _, c, s: grouped(x, k, v, last, tables=(c, s)),
        {**FOUR, "do_rotary": 1},
    ),
    "grouped_window": Case(
        "GroupQueryAttention", (double(2, 6, WIDTH // 2), double(2, 6, WIDTH // 2), None, None,
            LAST, TOTAL),
        lambda x, k, v, last, _: grouped(x, k, v, last, window=3, softcap=2.0, scale=0.75),
        {**FOUR, "local_window_size": 3, "softcap": 2.0, "scale": 0.75},
    ),
    "bits_4": n_bits(4, 16, True),
    "bits_4_plain": n_bits(4, 16, False),
    "bits_4_rest": n_bits(4, 128, True),
    "bits_8": n_bits(8, 16, True),
    "bits_2": n_bits(2, 16, False),
    "bits_2_zeros": n_bits(2, 16, True),
    "bits_4_float": n_bits(4, 16, "float"),
    "bits_8_float": n_bits(8, 32, "float"),
    "bits_4_order": n_bits(4, 16, False, groups=shuffled(16, 16, 16, 16)),
    "bits_4_order_zeros": n_bits(4, 16, True, groups=shuffled(16, 16, 16, 16)),
    "bits_8_order": n_bits(8, 32, False, groups=shuffled(32, 32)),
    "bits_4_order_float": n_bits(4, 32, "float", groups=shuffled(32, 32)),
    "bits_4_order_rest": n_bits(4, 48, "float", groups=shuffled(16, 48)),
    "bits_2_order": n_bits(2, 32, True, groups=np.repeat([0, 1], 32)),
    "softmax": Case("BiasSoftmax", (double(2, 6, WIDTH),), lambda x, b: (x + b).softmax(-1),
    {"axis": 2, "is_inner_broadcast": 0}),
    "gemm_gelu": Case("GemmFastGelu", (double(WIDTH, 3), double(3)), lambda x, w,
    b: F.gelu(x @ w + b, approximate="tanh")),
    "add": Case("BiasAdd", (double(WIDTH), double(2, 6, WIDTH)), lambda x, b, s: x + b + s),
    "split_gelu": Case("BiasSplitGelu", (double(WIDTH),), lambda x,
    b: (x + b).chunk(2, -1)[0] * F.gelu((x + b).chunk(2, -1)[1])),
    "transposed": Case("TransposeMatMul", (double(5, WIDTH),), lambda x, w: x @ w.T, {"transB": 1}),
}  # fmt: skip

#: Operators that onnxruntime has for GPUs only, or in another form. Version 1.32 refuses g_idx and
#: floating-point zero points of 8 bits, and gives other numbers for g_idx with packed zero points,
#: also where g_idx is in order.
WITHOUT_RUNTIME = {
    *("softmax", "gemm_gelu", "add", "split_gelu"),
    *("bits_8_float", "bits_8_order", "bits_2_order", "bits_4_order_zeros", "bits_4_order_rest"),
}


def model_of(dtype, names):
    """Return a model of cases on the product of the input and a weight."""
    nodes, weights = (
        [models.node("Mul", ["z", "factor"], ["x"])],
        {"factor": np.ones((2, 6, WIDTH))},
    )
    weights["factor"] += double(2, 6, WIDTH) / 9
    for name in names:
        case = CASES[name]
        operands = [
            "" if operand is None else f"{name}.{i}" for i, operand in enumerate(case.operands)
        ]
        nodes.append(
            helper.make_node(
                case.kind, ["x", *operands], [f"{name}_y"], domain=MICROSOFT, **case.attributes
            )
        )
        weights |= {
            operand: value
            for operand, value in zip(operands, case.operands, strict=True)
            if operand
        }
    weights = {
        name: value.astype(dtype) if value.dtype == "float64" else value
        for name, value in weights.items()
    }
    outputs = [f"{name}_y" for name in names]
    model = models.model_of(nodes, {"z": [2, 6, WIDTH]}, weights, outputs, opset=17, dtype=dtype)
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return model


def reference(names, values):
    x = values["z"] * values["factor"]
    return [
        CASES[name].function(
            x,
            *(
                values[f"{name}.{i}"]
                for i, operand in enumerate(CASES[name].operands)
                if operand is not None
            ),
        )
        for name in names
    ]


def tensors(model, z):
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    return {name: torch.tensor(value) for name, value in {**constants, "z": z}.items()}


def test_values_and_gradients_are_pytorchs():
    model, z = model_of("float64", CASES), double(2, 6, WIDTH)
    trained = [
        tensor.name for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.DOUBLE and not tensor.name.startswith(("bits",
            "grouped_rotary.6", "grouped_rotary.7"))
    ]  # fmt: skip
    imported = from_model(model, trainable=trained)
    assert sorted(imported.params) == sorted(trained)
    trained = list(imported.params)
    module = relax_grad.value_and_grad(imported.with_loss(models.weighted_sum), "loss", wrt=trained)
    call = models.compiled(module, None)
    results = call("main", z, *imported.values)
    gradients = call("loss_adjoint", z, *imported.values)[1]
    values = tensors(model, z)
    for name in trained:
        values[name].requires_grad_()
    wanted = reference(CASES, values)
    for name, result, other in zip(CASES, results, wanted, strict=True):
        np.testing.assert_allclose(result, other.detach().numpy(), 1e-9, 1e-10, err_msg=name)
    total = sum(
        (
            value * torch.cos(torch.arange(value.numel(), dtype=torch.float64)).reshape(value.shape)
        ).sum()
        for value in wanted
    )
    total.backward()
    for name, gradient in zip(trained, gradients, strict=True):
        expected = values[name].grad.numpy()
        np.testing.assert_allclose(gradient, expected, 1e-8, 1e-9, err_msg=name)


def test_the_reference_is_onnxruntime():
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    z = normal(2, 6, WIDTH)
    for name in CASES.keys() - WITHOUT_RUNTIME:
        model = model_of("float32", [name])
        results = runtime.InferenceSession(model.SerializeToString()).run(None, {"z": z})
        values = tensors(model, z)
        (wanted,) = reference(
            [name],
            {
                key: value.double() if value.is_floating_point() else value
                for key, value in values.items()
            },
        )
        np.testing.assert_allclose(results[0], wanted.numpy(), 1e-3, 1e-3, err_msg=name)


def test_scales_of_a_quantised_weight_are_constants():
    imported = from_model(model_of("float32", ["bits_4"]))
    assert list(imported.params) == []
    assert imported.explain()["bits_4.1"].kind != "trained"


def test_embeddings_with_a_normalisation():
    """With a symbolic batch and symbolic steps; the places of the words are those of the steps."""
    names = ["words", "places", "segments", "g", "b"]
    weights = dict(
        zip(names, (double(9, 8), double(7, 8), double(2, 8), double(8), double(8)), strict=True)
    )
    operands = ["ids", "kinds", *names, "mask"]
    node = helper.make_node(
        "EmbedLayerNormalization", operands, ["y", "count"], domain=MICROSOFT, epsilon=2.0**-20
    )
    model = models.model_of([node], {}, weights, ("y", "count"), dtype="float64")
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    kind = onnx.TensorProto.INT32
    for name in ("ids", "kinds", "mask"):
        model.graph.input.append(helper.make_tensor_value_info(name, kind, ["batch", "steps"]))
    imported = from_model(model)
    assert list(imported.params) == names
    module = imported.with_loss(lambda bb, y, count: bb.emit(relax.op.sum(relax.op.sin(y))))
    module = relax_grad.value_and_grad(module, "loss", wrt=names)
    call = models.compiled(module, None)
    for batch, steps in ((2, 5), (3, 7)):
        rng = np.random.default_rng(batch)
        ids, kinds, mask = (
            rng.integers(0, most, (batch, steps)).astype("int32") for most in (9, 2, 2)
        )
        result, count = call("main", ids, kinds, mask, *imported.values)
        gradients = call("loss_adjoint", ids, kinds, mask, *imported.values)[1]
        values = [torch.tensor(weight, requires_grad=True) for weight in weights.values()]
        words, places, segments, g, b = values
        total = words[ids] + places[:steps] + segments[kinds]
        wanted = F.layer_norm(total, (8,), g, b, 2.0**-20)
        np.testing.assert_allclose(result, wanted.detach().numpy(), 1e-9, 1e-10)
        np.testing.assert_array_equal(count, mask.sum(1))
        wanted.sin().sum().backward()
        for gradient, value in zip(gradients, values, strict=True):
            np.testing.assert_allclose(gradient, value.grad.numpy(), 1e-8, 1e-10)


REFUSED = {
    "past": ("MultiHeadAttention", ["x", "x", "x", "", "", "", "w", "w"], TWO,
    "past_key; export the model without caches"),
    "past_group": ("GroupQueryAttention", ["x", "x", "x", "w", "w", "n", "n"], FOUR,
    "past_key; export the model without caches"),
    "bits": ("MatMulNBits", ["x", "q", "w"], {"N": 2, "K": 8, "bits": 3, "block_size": 16},
    "it has 3 bits; supported are 2, 4 and 8"),
    "g_idx": ("MatMulNBits", ["x", "q", "s", "", "g"], {"N": 2, "K": 8, "bits": 4, "block_size": 4},
              r"its g_idx has groups of \[3, 5\] columns; all but one must have block_size=4"),
    "g_idx_range": ("MatMulNBits", ["x", "q", "s", "", "h"],
    {"N": 2, "K": 8, "bits": 4, "block_size": 4},
                    "its g_idx must have 8 numbers from 0 to 1"),
    "odd_block": ("MatMulNBits", ["x", "q", "w"], {"N": 2, "K": 8, "bits": 8, "block_size": 3},
    "its block_size is 3; it must be even"),
    "rotary": ("Attention", ["x", "w"], {"num_heads": 2, "do_rotary": 1}, "do_rotary=1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_in_training_is_refused(case):
    kind, operands, attributes, message = REFUSED[case]
    weights = {
        "w": normal(8, 24),
        "n": np.array([5, 5], "int32"),
        "q": np.zeros((2, 2, 2), "uint8"),
        "s": np.ones(4, "float32"),
        "g": np.array([0, 1, 0, 1, 0, 1, 0, 0], "int32"),
        "h": np.array([0, 1, 0, 1, 0, 1, 0, 2], "int32"),
    }
    nodes = [helper.make_node(kind, operands, ["y"], name="it", domain=MICROSOFT, **attributes)]
    model = models.model_of(nodes, {"x": [2, 6, 8]}, weights)
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model)
