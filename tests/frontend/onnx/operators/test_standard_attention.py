"""ONNX's own operator ``Attention`` is one operator: values by ONNX's evaluator, gradients by
differences."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
reason = "this version of onnx does not have the operator Attention"
pytest.importorskip("onnx.reference.ops.op_attention", reason=reason)

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

NEWEST = pytest.mark.skipif(
    onnx.defs.onnx_opset_version() < 25, reason="this version of onnx has no windows of Attention"
)
B, T, S, WIDTH, D, E = 2, 5, 7, 6, 8, 3
RNG = np.random.default_rng(3)

KEPT = RNG.random((T, S)) < 0.6
KEPT[:, 0] = True
NONE_FOR_ONE = KEPT & (np.arange(T) != 2)[:, None]


def model_of(
    attributes,
    *,
    heads=2,
    groups=2,
    keys=S,
    mask=None,
    past=0,
    results=1,
    flat=False,
    lengths=None,
    opset=23,
):
    """Return a model of the products of ``x`` and ``z`` with weights, and their attention."""
    dtype = "float64"
    weights = {}
    for name, count, size in (("wq", heads, D), ("wk", groups, D), ("wv", groups, E)):
        shape = (WIDTH, count * size) if flat else (count, WIDTH, size)
        weights[name] = normal(*shape, dtype=dtype)
    inner = () if flat else (1,)
    shapes = {"x": [B, *inner, T, WIDTH], "z": [B, *inner, keys, WIDTH]}
    nodes = [node("MatMul", [source, f"w{n}"], [n]) for source, n in zip("xzz", "qkv", strict=True)]
    operands = [*"qkv", *(["mask"] if mask is not None else [])]
    if mask is not None:
        weights["mask"] = mask if mask.dtype == bool else mask.astype(dtype)
    if past:
        operands += ["", "past_key", "past_value"][len(operands) - 3 :]
        shapes["past_key"], shapes["past_value"] = ([B, groups, past, n] for n in (D, E))
    if lengths is not None:
        operands += [""] * (6 - len(operands)) + ["lengths"]
        weights["lengths"] = np.array(lengths)
    outputs = ["y", "key", "value", "scores"][:results]
    if flat:
        attributes = {**attributes, "q_num_heads": heads, "kv_num_heads": groups}
    nodes.append(node("Attention", operands, outputs, **attributes))
    model = models.model_of(nodes, shapes, weights, outputs=outputs, opset=opset, dtype=dtype)
    return model, {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}


def close(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-7)


CASES = {
    "plain": model_of({}),
    "scale": model_of({"scale": 0.3}),
    "softmax in float32": model_of({"softmax_precision": onnx.TensorProto.FLOAT}),
    "causal": model_of({"is_causal": 1}),
    "three axes, grouped": model_of({"is_causal": 1}, heads=4, flat=True),
    "one head of keys": model_of({}, heads=3, groups=1, mask=normal(T, S)),
    "bias of heads": model_of({}, mask=normal(2, T, S)),
    "bias of sequences": model_of({"is_causal": 1}, mask=normal(B, 1, T, S)),
    "mask": model_of({}, mask=KEPT),
    "query without keys": model_of({}, mask=NONE_FOR_ONE),
    "past": model_of({}, past=2, results=3),
    "past, causal": model_of({"is_causal": 1}, keys=T, past=3, flat=True),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    model, feeds = CASES[case]
    imported = from_model(model)
    assert "R.nn.attention" in imported.module.script()
    assert "R.nn.softmax" not in imported.module.script()
    close(models.outputs(imported, feeds), models.wanted(model, feeds))
    assert list(imported.params)[:3] == ["wq", "wk", "wv"]
    models.check_parameter_gradients(imported, feeds)


def drawn(**attributes):
    """Return random windows around a query."""
    windows = {f"{side}_window_size": int(RNG.integers(0, 3)) for side in ("left", "right")}
    return {**windows, **attributes}


LENGTHS = RNG.permutation([2, S]).tolist()
SHORT = normal(2, 1, S - 1)
DOUBLE = onnx.TensorProto.DOUBLE
SCORES = {"results": 4}

#: Attentions of version 25: whether they are one operator, and the arguments of :func:`model_of`.
NEWER = {
    "lengths": (True, {}, {"lengths": LENGTHS}),
    "lengths, three axes": (True, {}, {"lengths": LENGTHS, "heads": 4, "flat": True}),
    "lengths, causal": (True, {"is_causal": 1}, {"lengths": LENGTHS, "groups": 1}),
    "lengths, mask": (True, {"is_causal": 1}, {"lengths": LENGTHS, "mask": KEPT}),
    "lengths, short mask": (True, {}, {"lengths": [3, S - 1], "mask": SHORT}),
    "window": (True, drawn(left_window_size=-1), {}),
    "window, causal": (True, drawn(is_causal=1), {"mask": KEPT}),
    "window, lengths": (True, drawn(), {"lengths": LENGTHS}),
    "window, past": (True, drawn(), {"past": 2, "results": 3}),
    "causal, fewer queries than keys": (True, {"is_causal": 1}, {"past": 2, "keys": S}),
    "bound": (False, {"softcap": 2.0}, {}),
    "bound, mask": (False, {"softcap": 0.7, "is_causal": 1}, {"mask": NONE_FOR_ONE}),
    "bound, lengths": (False, {"softcap": 1.5}, {"lengths": LENGTHS, "heads": 4}),
    "products": (False, {"is_causal": 1}, SCORES),
    "bounded products": (False, {"softcap": 2.0, "qk_matmul_output_mode": 1}, SCORES),
    "weights": (False, drawn(is_causal=1, qk_matmul_output_mode=3), {**SCORES, "lengths": LENGTHS}),
    "softmax in float64": (False, {"softmax_precision": DOUBLE}, {"flat": True}),
}


@NEWEST
@pytest.mark.parametrize("case", NEWER)
def test_lengths_windows_and_scores(case):
    is_operator, attributes, arguments = NEWER[case]
    model, feeds = model_of(attributes, opset=25, **arguments)
    imported = from_model(model)
    assert ("R.nn.attention" in imported.module.script()) == is_operator
    close(models.outputs(imported, feeds), models.wanted(model, feeds))
    models.check_parameter_gradients(imported, feeds)


def test_scores_with_hidden_keys():
    """The scores with the mask are -inf where a query does not see a key."""
    model, feeds = model_of(
        {"qk_matmul_output_mode": 2, "is_causal": 1}, mask=KEPT, results=4, opset=23
    )
    close(models.outputs(from_model(model), feeds), models.wanted(model, feeds))


def test_a_negative_scale_written_out():
    """That of the operator: ONNX's evaluator takes the square root of the scale."""
    model, feeds = model_of({"scale": -0.3}, mask=normal(T, S))
    wanted = models.outputs(from_model(model), feeds)
    model.graph.node[-1].attribute.append(onnx.helper.make_attribute("softcap", 1e6))
    imported = from_model(model)
    assert "R.nn.softmax" in imported.module.script()
    close(models.outputs(imported, feeds), wanted)
    models.check_parameter_gradients(imported, feeds)


@NEWEST
@pytest.mark.parametrize("attributes", [{"is_causal": 1}, drawn(), drawn(softcap=1.0)])
def test_symbolic_extents(attributes):
    model, feeds = model_of(attributes, lengths=LENGTHS, opset=25)
    (lengths,) = (tensor for tensor in model.graph.initializer if tensor.name == "lengths")
    model.graph.initializer.remove(lengths)
    kind = onnx.TensorProto.INT64
    model.graph.input.append(onnx.helper.make_tensor_value_info("lengths", kind, [B]))
    feeds["lengths"] = np.array(LENGTHS)
    shapes = {"x": ("b", 1, "t", WIDTH), "z": ("b", 1, "s", WIDTH), "lengths": ("b",)}
    close(models.outputs(from_model(model, shapes=shapes), feeds), models.wanted(model, feeds))
    del shapes["lengths"]
    model, feeds = model_of(attributes, past=2, opset=25)
    shapes["past_key"], shapes["past_value"] = (("b", 2, "p", n) for n in (D, E))
    close(models.outputs(from_model(model, shapes=shapes), feeds), models.wanted(model, feeds))


@pytest.mark.parametrize(
    ("mask", "whole"),
    [
        (KEPT[:, :1], np.broadcast_to(KEPT[:, :1], KEPT.shape)),
        (KEPT[:, :-2], KEPT & (np.arange(S) < S - 2)),
        (normal(2, 1, 4), None),
    ],
    ids=["one key", "fewer keys, truth values", "fewer keys, numbers"],
)
def test_masks_of_fewer_keys(mask, whole):
    """A mask of one key is one of all keys, and keys behind the mask are hidden."""
    if whole is None:
        missing = [(0, 0), (0, 0), (0, S - mask.shape[-1])]
        whole = np.pad(mask, missing, constant_values=-np.inf)
    model, feeds = model_of({}, mask=mask)
    other, _ = model_of({}, mask=np.ascontiguousarray(whole))
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensor in other.graph.initializer:
        if tensor.name != "mask":
            tensor.CopyFrom(values[tensor.name])
    results = models.outputs(from_model(model), feeds)[0], models.wanted(other, feeds)[0]
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (model_of({}, mask=normal(T, S + 1))[0], "its mask has 8 keys, and it has 7"),
        pytest.param(
            model_of({}, past=2, lengths=LENGTHS, opset=24)[0],
            "nonpad_kv_seqlen and past keys",
            marks=NEWEST,
        ),
        pytest.param(
            model_of({}, lengths=[1, 2, 3], opset=24)[0],
            "has 3 numbers, and its batch is 2",
            marks=NEWEST,
        ),
        pytest.param(
            model_of({"left_window_size": -2}, opset=25)[0], "left_window_size is -2", marks=NEWEST
        ),
        (model_of({"softcap": -1.0})[0], "softcap is -1; a bound is positive"),
        (model_of({"qk_matmul_output_mode": 4}, results=4)[0], "mode is 4; it must be 0, 1, 2 or"),
        (model_of({"softmax_precision": 7})[0], r"precision is 7; .* 1 \(float32\), 10"),
    ],
    ids=["mask", "past", "lengths", "window", "bound", "mode", "precision"],
)
def test_errors(model, message):
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model)
