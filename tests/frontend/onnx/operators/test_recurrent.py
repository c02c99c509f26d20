"""Recurrent layers of ONNX: values by ONNX's evaluator and onnxruntime, gradients by differences
and PyTorch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from recurrent_layers import sigmoid
from tvm import relax

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402


def recurrent(kind, direction, dtype, **attributes):
    """Return a recurrent layer with a state from outside, and values of its inputs."""
    count = 2 if direction == "bidirectional" else 1
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    states = ["h", "c"] if kind == "LSTM" else ["h"]
    weights = {
        "w": normal(count, gates * 5, 4, dtype=dtype),
        "r": normal(count, gates * 5, 5, dtype=dtype),
        "b": normal(count, gates * 10, dtype=dtype),
    }
    shapes = {"x": [3, 2, 4], **{name: [count, 2, 5] for name in states}}
    outputs = ["y", *(f"last_{name}" for name in states)]
    layer = node(
        kind,
        ["x", "w", "r", "b", "", *states],
        outputs,
        hidden_size=5,
        direction=direction,
        **attributes,
    )
    model = models.model_of([layer], shapes, weights, outputs=outputs, dtype=dtype)
    return model, {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}


RECURRENT = [
    ("LSTM", "forward", {}),
    ("LSTM", "bidirectional", {}),
    ("GRU", "forward", {}),
    ("GRU", "reverse", {"linear_before_reset": 1}),
    ("RNN", "forward", {}),
    ("RNN", "bidirectional", {"activations": ["Sigmoid", "Relu"]}),
]


@pytest.mark.parametrize(("kind", "direction", "attributes"), RECURRENT)
def test_a_recurrent_layer(kind, direction, attributes):
    model, feeds = recurrent(kind, direction, "float64", **attributes)
    imported = from_model(model)
    assert list(imported.params) == ["w", "r", "b"]
    models.check_parameter_gradients(imported, feeds)
    if direction == "forward":  # the only one that ONNX's evaluator computes
        model, feeds = recurrent(kind, direction, "float32", **attributes)
        results = models.outputs(from_model(model), feeds)
        for result, expected in zip(results, models.wanted(model, feeds), strict=True):
            np.testing.assert_allclose(result, expected.reshape(result.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "direction", "attributes"), RECURRENT)
def test_a_recurrent_layer_has_the_values_of_onnxruntime(kind, direction, attributes):
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    model, feeds = recurrent(kind, direction, "float32", **attributes)
    expected = runtime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for result, other in zip(models.outputs(from_model(model), feeds), expected, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "direction"),
    [
        ("RNN", "reverse"),
        pytest.param("LSTM", "reverse", marks=pytest.mark.slow),
        pytest.param("GRU", "bidirectional", marks=pytest.mark.slow),
    ],
)
def test_sequences_of_different_lengths(kind, direction):
    """Each sequence has the results of a model with this sequence alone, and zeros after its
    end."""
    model, feeds = recurrent(kind, direction, "float64")
    alone = from_model(
        model, shapes={name: (*x.shape[:1], 1, x.shape[2]) for name, x in feeds.items()}
    )
    short = from_model(
        model,
        shapes={
            name: (2 if name == "x" else x.shape[0], 1, x.shape[2]) for name, x in feeds.items()
        },
    )
    imported = from_model(with_lengths(model))
    feeds = {**feeds, "lengths": np.array([3, 2], "int32")}
    models.check_parameter_gradients(imported, feeds)
    results = models.outputs(imported, feeds)
    assert not results[0][2:, :, 1].any()
    for number, (single, length) in enumerate(((alone, 3), (short, 2))):
        own = {
            name: feeds[name][: length if name == "x" else None, number : number + 1]
            for name in single.inputs
        }
        first, *last = models.outputs(
            single, {name: np.ascontiguousarray(x) for name, x in own.items()}
        )
        np.testing.assert_allclose(results[0][:length, :, number], first[:, :, 0])
        for whole, state in zip(results[1:], last, strict=True):
            np.testing.assert_allclose(whole[:, number], state[:, 0])


def symbolic(model):
    """Give a model symbolic steps and batch."""
    for value in model.graph.input:
        extents = value.type.tensor_type.shape.dim
        extents[{"x": 1, "lengths": 0}.get(value.name, 1)].dim_param = "batch"
        if value.name == "x":
            extents[0].dim_param = "steps"
    return model


def with_lengths(model):
    """Let the sequences of a model end at lengths from outside."""
    model.graph.node[0].input[4] = "lengths"
    kind = onnx.TensorProto.INT32
    model.graph.input.append(onnx.helper.make_tensor_value_info("lengths", kind, [2]))
    return model


def batch_first(model):
    """Return a model with the batch as the first axis of data, states and results."""
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("layout", 1))
    for value in model.graph.input:
        extents = value.type.tensor_type.shape.dim
        if len(extents) > 1:
            extents[0].dim_value, extents[1].dim_value = extents[1].dim_value, extents[0].dim_value
    return model


@pytest.mark.parametrize(
    ("kind", "direction", "attributes"),
    [
        ("LSTM", "bidirectional", {}),
        ("GRU", "forward", {"linear_before_reset": 1}),
        ("RNN", "reverse", {"activations": ["Sigmoid"]}),
    ],
)
def test_batch_first(kind, direction, attributes):
    """Results are those of the other layout, and ONNX's evaluator has the same without lengths."""
    model, feeds = recurrent(kind, direction, "float64", **attributes)
    swapped = {name: np.ascontiguousarray(x.swapaxes(0, 1)) for name, x in feeds.items()}
    if direction == "forward":
        turned = onnx.ModelProto()
        turned.CopyFrom(model)
        batch_first(turned)
        results = models.outputs(from_model(turned), swapped)
        for result, expected in zip(results, models.wanted(turned, swapped), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-9)
    with_lengths(model)
    lengths = {"lengths": np.array([3, 2], "int32")}
    sequences, *states = models.outputs(from_model(model), {**feeds, **lengths})
    imported = from_model(batch_first(model))
    results = models.outputs(imported, {**swapped, **lengths})
    np.testing.assert_allclose(results[0], sequences.transpose(2, 0, 1, 3), rtol=1e-12)
    for result, state in zip(results[1:], states, strict=True):
        np.testing.assert_allclose(result, state.swapaxes(0, 1), rtol=1e-12)
    models.check_parameter_gradients(imported, {**swapped, **lengths})


def test_symbolic_steps():
    """Layers with symbolic steps and batch have the values of those with fixed extents."""
    for kind, direction, attributes in (
        ("LSTM", "bidirectional", {}),
        ("GRU", "reverse", {"linear_before_reset": 1}),
        ("GRU", "bidirectional", {}),
        ("RNN", "forward", {"activations": ["Relu"]}),
    ):
        model, feeds = recurrent(kind, direction, "float64", **attributes)
        with_lengths(model)
        feeds["lengths"] = np.array([3, 2], "int32")
        fixed = models.outputs(from_model(model), feeds)
        imported = from_model(symbolic(model))
        for result, other in zip(models.outputs(imported, feeds), fixed, strict=True):
            np.testing.assert_allclose(result, other, rtol=1e-12)


def weighted(bb, *results):
    """Build a loss in which the elements of a result, of any extents, have different weights."""
    total = None
    for result in results:
        part = bb.emit(relax.op.sum(relax.op.sin(relax.op.multiply(result, result))))
        total = part if total is None else bb.emit(relax.op.add(total, part))
    return total


@pytest.fixture(scope="module")
def layers_of_symbolic_steps():
    """Return functions of losses and gradients of layers with symbolic extents, compiled together,
    with their inputs."""
    module, layers = tvm.IRModule(), {}
    for number, (kind, direction, attributes) in enumerate(SYMBOLIC):
        model, _ = recurrent(kind, direction, "float64", **attributes)
        imported = from_model(symbolic(with_lengths(model)), trainable="*")
        wrt = [name for name in (*imported.inputs, *imported.params) if name != "lengths"]
        adjoint = relax_grad.value_and_grad(imported.with_loss(weighted), "loss", wrt=wrt)
        adjoint = adjoint["loss_adjoint"].with_attr("global_symbol", f"layer{number}")
        module[f"layer{number}"] = adjoint
        layers[kind, direction, str(attributes)] = f"layer{number}", imported
    return models.compiled(module, None), layers


SYMBOLIC = [
    ("LSTM", "bidirectional", {}),
    ("GRU", "reverse", {}),
    ("GRU", "bidirectional", {"linear_before_reset": 1}),
    ("RNN", "reverse", {"activations": ["Relu"]}),
    ("RNN", "bidirectional", {}),
]


@pytest.mark.parametrize(("kind", "direction", "attributes"), SYMBOLIC)
def test_gradients_of_symbolic_steps(layers_of_symbolic_steps, kind, direction, attributes):
    """Gradients by all inputs, initial states and weights, of sequences of different lengths,
    against loops in PyTorch."""
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    call, layers = layers_of_symbolic_steps
    name, imported = layers[kind, direction, str(attributes)]
    count = 2 if direction == "bidirectional" else 1
    for steps, lengths in ((4, [4, 2, 3]), (1, [1]), (7, [0, 7])):
        arrays = {"x": normal(steps, len(lengths), 4, dtype="float64")}
        for state in list(imported.inputs)[1:]:
            if state != "lengths":
                arrays[state] = normal(count, len(lengths), 5, dtype="float64")
        # Small weights, so that the states of an RNN with Relu do not grow.
        weights = {key: value.numpy() / 3 for key, value in imported.params.items()}
        inputs = {**arrays, "lengths": np.array(lengths, "int32")}
        loss, gradients = call(name, *(inputs[key] for key in imported.inputs), *weights.values())
        leaves = {
            key: torch.tensor(value, requires_grad=True)
            for key, value in {**arrays, **weights}.items()
        }
        wanted = torch_loss(torch, kind, direction, attributes, lengths, leaves)
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-10)
        differentiated = [key for key in (*imported.inputs, *weights) if key != "lengths"]
        expected = torch.autograd.grad(wanted, [leaves[key] for key in differentiated])
        for key, grad, other in zip(differentiated, gradients, expected, strict=True):
            np.testing.assert_allclose(grad, other.numpy(), rtol=1e-9, atol=1e-10, err_msg=key)


def torch_loss(torch, kind, direction, attributes, lengths, tensors):
    """Return the loss of a layer by the formulas of ONNX, one sequence at a time."""
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    total = 0.0
    for number, backwards in enumerate(ways):
        w, r, (bias, own) = (
            tensors["w"][number],
            tensors["r"][number],
            tensors["b"][number].chunk(2),
        )
        for sequence, length in enumerate(lengths):
            state = [tensors[key][number, sequence] for key in ("h", "c") if key in tensors]
            for t in reversed(range(length)) if backwards else range(length):
                x = w @ tensors["x"][t, sequence] + bias
                state = torch_step(torch, kind, attributes, x, r, own, state)
                total = total + torch.sin(state[0] ** 2).sum()
            total = total + sum(torch.sin(part**2).sum() for part in state)
    return total


def torch_step(torch, kind, attributes, x, r, own, state):
    hidden, *cell = state
    if kind == "LSTM":
        i, o, f, c = (x + r @ hidden + own).chunk(4)
        new = f.sigmoid() * cell[0] + i.sigmoid() * c.tanh()
        return [o.sigmoid() * new.tanh(), new]
    if kind == "RNN":
        total = x + r @ hidden + own
        return [total.relu() if attributes else total.tanh()]
    (x_z, x_r, x_h), (r_z, r_r, r_h), (b_z, b_r, b_h) = x.chunk(3), r.chunk(3), own.chunk(3)
    z, reset = (x_z + r_z @ hidden + b_z).sigmoid(), (x_r + r_r @ hidden + b_r).sigmoid()
    if attributes:
        h = (x_h + reset * (r_h @ hidden + b_h)).tanh()
    else:
        h = (x_h + r_h @ (reset * hidden) + b_h).tanh()
    return [(1 - z) * h + z * hidden]


def numpy_layer(kind, direction, attributes, lengths, tensors):
    """Return the results of a layer by the formulas of ONNX in float64: all hidden states, of
    shape (steps, directions, batch, hidden), and the last states."""
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    x, names = tensors["x"], [name for name in ("h", "c") if name in tensors]
    hidden = np.zeros((x.shape[0], len(ways), x.shape[1], tensors["r"].shape[-1]))
    last = [np.array(tensors[name]) for name in names]
    for number, backwards in enumerate(ways):
        w, r = tensors["w"][number], tensors["r"][number]
        bias, own = np.split(tensors["b"][number], 2)
        for sequence, length in enumerate(lengths):
            state = [tensors[name][number, sequence] for name in names]
            for t in reversed(range(length)) if backwards else range(length):
                state = numpy_step(kind, attributes, w @ x[t, sequence] + bias, r, own, state)
                hidden[t, number, sequence] = state[0]
            for part, end in zip(last, state, strict=True):
                part[number, sequence] = end
    return [hidden, *last]


def numpy_step(kind, attributes, x, r, own, state):
    hidden, *cell = state
    if kind == "LSTM":
        i, o, f, c = np.split(x + r @ hidden + own, 4)
        new = sigmoid(f) * cell[0] + sigmoid(i) * np.tanh(c)
        return [sigmoid(o) * np.tanh(new), new]
    if kind == "RNN":
        total = x + r @ hidden + own
        return [np.maximum(total, 0) if attributes else np.tanh(total)]
    (x_z, x_r, x_h), (r_z, r_r, r_h), (b_z, b_r, b_h) = (np.split(part, 3) for part in (x, r, own))
    z, reset = sigmoid(x_z + r_z @ hidden + b_z), sigmoid(x_r + r_r @ hidden + b_r)
    inner = reset * (r_h @ hidden + b_h) if attributes else r_h @ (reset * hidden) + b_h
    return [(1 - z) * np.tanh(x_h + inner) + z * hidden]


def numpy_loss(*arguments):
    """Return the loss of :func:`with_squares` of a layer."""
    return sum(float((result + result**2).sum()) for result in numpy_layer(*arguments))


def with_squares(bb, *results):
    """Build a loss: the sum in float32 of the results and of their squares."""
    total = None
    for result in results:
        result = bb.emit(relax.op.astype(result, "float32"))
        terms = bb.emit(relax.op.add(result, relax.op.multiply(result, result)))
        part = bb.emit(relax.op.sum(terms))
        total = part if total is None else bb.emit(relax.op.add(total, part))
    return total


def numpy_dtype(name):
    """Return a dtype of NumPy, also for bfloat16."""
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name, name))


HALVES = [
    ("LSTM", "bidirectional", {}, "bfloat16"),
    ("LSTM", "reverse", {}, "float16"),
    ("GRU", "bidirectional", {}, "float16"),
    ("GRU", "forward", {"linear_before_reset": 1}, "bfloat16"),
    ("RNN", "reverse", {"activations": ["Relu"]}, "bfloat16"),
    ("RNN", "forward", {}, "float16"),
]


@pytest.fixture(scope="module")
def layers_in_half_precision():
    """Return functions of results and gradients of layers in half precision with symbolic extents
    and lengths, compiled together with the kernels, and their imports."""
    module, layers = tvm.IRModule(), []
    models.reseed(len(HALVES))
    for number, (kind, direction, attributes, dtype) in enumerate(HALVES):
        dtype = numpy_dtype(dtype)
        model, _ = recurrent(kind, direction, dtype, **attributes)
        imported = from_model(symbolic(with_lengths(model)), trainable="*")
        wrt = [name for name in (*imported.inputs, *imported.params) if name != "lengths"]
        with_loss = imported.with_loss(with_squares)
        adjoint = relax_grad.value_and_grad(with_loss, "loss", wrt=wrt)["loss_adjoint"]
        module[f"layer{number}"] = adjoint.with_attr("global_symbol", f"layer{number}")
        results = imported.module["main"].with_attr("global_symbol", f"results{number}")
        module[f"results{number}"] = results
        layers.append(imported)
    return models.compiled(module, None, "relax_grad"), layers


@pytest.mark.parametrize(
    "number", range(len(HALVES)), ids=["-".join((*h[:2], h[3])) for h in HALVES]
)
def test_half_precision(layers_in_half_precision, number):
    """Results have the dtype of the model. They, and the gradients in a random direction, are those
    of float64 up to a few roundings, for sequences of different lengths, also of none.

    A state near 1 has a slope of which float16 rounds a large part: draws that depended on the
    order of the tests had one now and then.
    """
    call, layers = layers_in_half_precision
    models.reseed(number)
    (kind, direction, attributes, name), imported = HALVES[number], layers[number]
    dtype, count = numpy_dtype(name), 2 if direction == "bidirectional" else 1
    error = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[name]
    for steps, lengths in ((4, [4, 2, 3]), (1, [1]), (7, [0, 7])):
        arrays = {"x": normal(steps, len(lengths), 4, dtype=dtype)}
        for state in list(imported.inputs)[1:]:
            if state != "lengths":
                arrays[state] = normal(count, len(lengths), 5, dtype=dtype)
        weights = {key: value.numpy() for key, value in imported.params.items()}
        weights = {
            key: (value.astype("float64") / 3).astype(dtype) for key, value in weights.items()
        }
        inputs = {**arrays, "lengths": np.array(lengths, "int32")}
        operands = [*(inputs[key] for key in imported.inputs), *weights.values()]
        exact = {key: value.astype("float64") for key, value in {**arrays, **weights}.items()}
        wanted = numpy_layer(kind, direction, attributes, lengths, exact)
        for result, other in zip(call(f"results{number}", *operands), wanted, strict=True):
            assert result.dtype == dtype
            np.testing.assert_allclose(result.astype("float64"), other, rtol=0, atol=8 * error)
        loss = functools.partial(numpy_loss, kind, direction, attributes, lengths)
        _, gradients = call(f"layer{number}", *operands)
        differentiated = [key for key in (*imported.inputs, *weights) if key != "lengths"]
        for key, grad in zip(differentiated, gradients, strict=True):
            assert grad.dtype == dtype, key
            step = 1e-5 * normal(*exact[key].shape, dtype="float64")
            ahead, behind = (loss({**exact, key: exact[key] + way * step}) for way in (1, -1))
            products = grad.astype("float64") * step
            scale = np.abs(products).sum() + 1e-7
            difference = (ahead - behind) / 2
            assert products.sum() == pytest.approx(difference, abs=4 * error * scale), key
