"""Recurrent layers of ONNX with peepholes, bounds, coupled gates and other activations: values by
formulas in NumPy and by onnxruntime, gradients by differences of the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx_models import node  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

RNG = np.random.default_rng(11)
SIZE, WIDTH = 5, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

#: The activations by ONNX's formulas, and the number of their parameters.
FORMULAS = {
    "Affine": (lambda x, a, b: a * x + b, 2),
    "Elu": (lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1),
    "HardSigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 2),
    "LeakyRelu": (lambda x, a, b: np.where(x >= 0, x, a * x), 1),
    "Relu": (lambda x, a, b: np.maximum(x, 0), 0),
    "ScaledTanh": (lambda x, a, b: a * np.tanh(b * x), 2),
    "Sigmoid": (lambda x, a, b: (1 + np.tanh(x / 2)) / 2, 0),
    "Softplus": (lambda x, a, b: np.logaddexp(0, x), 0),
    "Softsign": (lambda x, a, b: x / (1 + np.abs(x)), 0),
    "Tanh": (lambda x, a, b: np.tanh(x), 0),
    "ThresholdedRelu": (lambda x, a, b: np.where(x > a, x, 0), 1),
}


def drawn(kind: str, direction: str, names, **attributes) -> dict:
    """Return the attributes of a layer with activations of random parameters."""
    takers = [name for name in names if FORMULAS[name][1] > 0]
    alphas = RNG.uniform(0.2, 0.6, len(takers)).tolist()
    betas = RNG.uniform(0.2, 0.6, sum(FORMULAS[name][1] == 2 for name in names)).tolist()
    own = {"activations": names, "activation_alpha": alphas, "activation_beta": betas}
    attributes = {**{key: value for key, value in own.items() if value}, **attributes}
    for key, value in attributes.items():
        if isinstance(value, float) or key.startswith("activation_"):
            attributes[key] = np.array(value, "float32").tolist()  # as ONNX stores it
    return {"kind": kind, "direction": direction, "attributes": attributes}


PEEPHOLES = {"has_peepholes": True}

#: ONNX Runtime asks for activations of each direction.
SHARED = "activations of both directions"

#: All activations, in a random order.
NAMES = RNG.permutation(sorted(FORMULAS)).tolist()

CASES = {
    "peepholes": {**drawn("LSTM", "bidirectional", NAMES[:6]), **PEEPHOLES},
    "coupled": {**drawn("LSTM", "reverse", [], input_forget=1, clip=0.9), **PEEPHOLES},
    SHARED: drawn("LSTM", "bidirectional", NAMES[4:7], input_forget=1),
    "state that is reset first": drawn("GRU", "bidirectional", NAMES[6:10]),
    "state that is reset last": drawn("GRU", "reverse", NAMES[9:], linear_before_reset=1, clip=0.6),
    "bound": drawn("RNN", "forward", ["Tanh"], clip=float(RNG.uniform(0.3, 0.8))),
}


def model_of(cases: dict, dtype: str, steps="steps", batch="batch", lengths="lengths"):
    """Return a model of all layers, whose values have the name of the case before their own, and
    the initial states as inputs."""
    nodes, shapes, arrays, outputs = [], {}, {}, []
    for name, case in cases.items():
        kind, direction, attributes = case["kind"], case["direction"], case["attributes"]
        count, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
        states = ["h", "c"] if kind == "LSTM" else ["h"]
        weights = {"w": (count, gates * SIZE, WIDTH), "r": (count, gates * SIZE, SIZE)}
        weights["b"] = (count, 2 * gates * SIZE)
        own = ["x", "w", "r", "b", "", *states]
        if case.get("has_peepholes"):
            weights["p"] = (count, 3 * SIZE)
            own.append("p")
        operands = [f"{name}/{key}" if key else lengths for key in own]
        results = [f"{name}/{key}" for key in ("y", *(f"last_{state}" for state in states))]
        nodes.append(node(kind, operands, results, hidden_size=SIZE, direction=direction,
        **attributes))  # fmt: skip
        outputs += results
        shapes[f"{name}/x"] = [steps, batch, WIDTH]
        shapes.update({f"{name}/{state}": [count, batch, SIZE] for state in states})
        for key, shape in weights.items():
            arrays[f"{name}/{key}"] = RNG.normal(size=shape).astype(dtype) / 2
    model = models.model_of(nodes, shapes, arrays, outputs=outputs, dtype=dtype)
    if lengths:
        kind = onnx.TensorProto.INT32
        model.graph.input.append(onnx.helper.make_tensor_value_info(lengths, kind, [batch]))
    return model


def functions_of(case: dict) -> list[list]:
    """Return the activations of each direction, as functions of the bounded operand."""
    kind, attributes = case["kind"], case["attributes"]
    default = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
    names = attributes.get("activations", default[kind])
    alphas, betas = (iter(attributes.get(f"activation_{key}", [])) for key in ("alpha", "beta"))
    bound = attributes.get("clip", math.inf)
    made = []
    for number, name in enumerate(names):
        formula, count = FORMULAS[name]
        a, b = next(alphas) if count else 0.0, next(betas) if count == 2 else 0.0
        # The state has no bound before its activation.
        edge = math.inf if kind == "LSTM" and number % 3 == 2 else bound
        made.append(lambda x, f=formula, a=a, b=b, edge=edge: f(np.clip(x, -edge, edge), a, b))
    count = len(default[kind])
    rows = [made[i : i + count] for i in range(0, len(made), count)]
    return rows * 2


def expected(case: dict, lengths, tensors) -> list[np.ndarray]:
    """Return the results of a layer by the formulas of ONNX."""
    kind, attributes = case["kind"], case["attributes"]
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    ways, x = ways[case["direction"]], tensors["x"]
    names = [name for name in ("h", "c") if name in tensors]
    hidden = np.zeros((x.shape[0], len(ways), x.shape[1], SIZE))
    last = [np.array(tensors[name]) for name in names]
    for number, backwards in enumerate(ways):
        functions = functions_of(case)[number]
        w, r = tensors["w"][number], tensors["r"][number]
        bias, own = np.split(tensors["b"][number], 2)
        peepholes = np.split(tensors["p"][number] if "p" in tensors else np.zeros(3 * SIZE), 3)
        for sequence, length in enumerate(lengths):
            state = [tensors[name][number, sequence] for name in names]
            for t in reversed(range(length)) if backwards else range(length):
                z = w @ x[t, sequence] + bias
                if kind == "LSTM":
                    state = lstm_step(z + r @ state[0] + own, state[1], peepholes, functions,
                    attributes)  # fmt: skip
                elif kind == "GRU":
                    state = [gru_step(z, r, own, state[0], functions, attributes)]
                else:
                    state = [functions[0](z + r @ state[0] + own)]
                hidden[t, number, sequence] = state[0]
            for part, end in zip(last, state, strict=True):
                part[number, sequence] = end
    return [hidden, *last]


def lstm_step(z, cell, peepholes, functions, attributes):
    f, g, h = functions
    (i, o, forget, c), (p_i, p_o, p_f) = np.split(z, 4), peepholes
    i = f(i + p_i * cell)
    kept = 1 - i if attributes.get("input_forget") else f(forget + p_f * cell)
    new = kept * cell + i * g(c)
    return [f(o + p_o * new) * h(new), new]


def gru_step(x, r, own, state, functions, attributes):
    f, g = functions
    (x_z, x_r, x_h), (r_z, r_r, r_h), (b_z, b_r, b_h) = (np.split(part, 3) for part in (x, r, own))
    z, reset = f(x_z + r_z @ state + b_z), f(x_r + r_r @ state + b_r)
    after = attributes.get("linear_before_reset")
    inner = reset * (r_h @ state + b_h) if after else r_h @ (reset * state) + b_h
    return (1 - z) * g(x_h + inner) + z * state


def squares(bb, *results):
    """Build a loss: the sum of the results and of their squares, of any extents."""
    op, total = tvm.relax.op, None
    for result in results:
        part = bb.emit(op.sum(op.add(result, op.multiply(result, result))))
        total = part if total is None else bb.emit(op.add(total, part))
    return total


@pytest.fixture(scope="module")
def layers():
    """Return the functions of results and gradients of all layers with symbolic extents, and the
    import."""
    imported = from_model(model_of(CASES, "float64"), trainable="*")
    wrt = [key for key in (*imported.inputs, *imported.params) if key != "lengths"]
    module = relax_grad.value_and_grad(imported.with_loss(squares), "loss", wrt=wrt)
    return models.compiled(module, None), imported, wrt


@pytest.mark.parametrize(("steps", "lengths"), [(4, [4, 2, 3]), (1, [1]), (6, [0, 6])])
def test_values_and_gradients(layers, steps, lengths):
    """Gradients by data, initial states and weights, of sequences of different lengths."""
    call, imported, wrt = layers
    tensors = {key: value.numpy() for key, value in imported.params.items()}
    for key, kind in imported.inputs.items():
        shape = [{"steps": steps, "batch": len(lengths)}.get(str(n), n) for n in kind.shape.values]
        tensors[key] = RNG.normal(size=[int(extent) for extent in shape])
    tensors["lengths"] = np.array(lengths, "int32")
    operands = [tensors[key] for key in (*imported.inputs, *imported.params)]
    results, (_, gradients) = call("main", *operands), call("loss_adjoint", *operands)
    slopes = dict(zip(wrt, gradients, strict=True))
    for name, case in CASES.items():
        own = {
            key.rpartition("/")[2]: value
            for key, value in tensors.items()
            if key.startswith(f"{name}/")
        }
        wanted = expected(case, lengths, own)
        for result, other in zip(results, wanted, strict=False):
            np.testing.assert_allclose(result, other, rtol=1e-9, atol=1e-11, err_msg=name)
        del results[: len(wanted)]
        for key, value in own.items():
            direction = RNG.normal(size=value.shape)
            ahead, behind = (
                sum((x + x**2).sum() for x in expected(case, lengths, {**own, key: moved}))
                for moved in (value + 1e-6 * direction, value - 1e-6 * direction)
            )
            slope = float((slopes[f"{name}/{key}"] * direction).sum())
            assert slope == pytest.approx((ahead - behind) / 2e-6, rel=1e-6, abs=1e-6), (name, key)


def test_values_of_onnxruntime():
    reason = "onnxruntime is not installed, with which values are compared"
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    cases = {name: case for name, case in CASES.items() if name != SHARED}
    model = model_of(cases, "float32", 3, 2, "")
    imported = from_model(model)
    feeds = {
        key: RNG.normal(size=[int(n) for n in kind.shape.values]).astype("float32")
        for key, kind in imported.inputs.items()
    }
    wanted = runtime.InferenceSession(model.SerializeToString()).run(None, feeds)
    outputs = [output.name for output in model.graph.output]
    for name, result, other in zip(outputs, models.outputs(imported, feeds), wanted, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-5, atol=1e-5, err_msg=name)


def test_half_precision_is_computed_in_single_precision():
    cases = {name: CASES[name] for name in ("coupled", "state that is reset last", "bound")}
    model = model_of(cases, "float16", 3, 2, "")
    imported = from_model(model)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in
        model.graph.initializer}  # fmt: skip
    feeds = {
        key: RNG.normal(size=[int(n) for n in kind.shape.values]).astype("float16")
        for key, kind in imported.inputs.items()
    }
    tensors.update(feeds)
    results = models.outputs(imported, feeds)
    for name, case in cases.items():
        own = {
            key.rpartition("/")[2]: value.astype("float64")
            for key, value in tensors.items()
            if key.startswith(f"{name}/")
        }
        for other in expected(case, [3, 3], own):
            result = results.pop(0)
            assert result.dtype == np.float16
            np.testing.assert_allclose(result, other, rtol=4e-3, atol=4e-3, err_msg=name)


def test_the_slope_at_zero():
    """With zeros as data, the sums of the gates are 0, where an activation by absolute values has
    another derivative."""
    smooth = ["Sigmoid", "Tanh", "Softplus", "Softsign", "ScaledTanh", "Affine"]
    cases = {name: drawn("RNN", "forward", [name]) for name in smooth}
    model = model_of(cases, "float64", 1, 1, "")
    for tensor in model.graph.initializer:
        if tensor.name.endswith("/b"):
            zeros = np.zeros(tuple(tensor.dims))
            tensor.CopyFrom(onnx.numpy_helper.from_array(zeros, tensor.name))
    imported = from_model(model, trainable="*")
    wrt = [key for key in imported.params if key.endswith("/b")]
    module = relax_grad.value_and_grad(imported.with_loss(squares), "loss", wrt=wrt)
    zeros = [np.zeros([int(n) for n in kind.shape.values]) for kind in imported.inputs.values()]
    _, slopes = models.compiled(module, "loss_adjoint")(*zeros, *imported.params.values())
    for (name, case), slope in zip(cases.items(), slopes, strict=True):
        function = functions_of(case)[0][0]
        ahead, behind = (2 * (y + y**2) for y in map(function, (1e-6, -1e-6)))
        wanted = np.full(SIZE, (ahead - behind) / 2e-6)
        np.testing.assert_allclose(slope[0], np.tile(wanted, 2), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (drawn("RNN", "forward", [], activations=["Cube"]), "the activation Cube; known are Aff"),
        (drawn("RNN", "forward", [], activations=["Affine"]), "Affine has no activation_alpha"),
        (drawn("LSTM", "bidirectional", [], activations=["Tanh"]), r"1 names \(Tanh\); .* 3 or 6"),
        (drawn("RNN", "forward", ["Elu"], activation_alpha=[0.1, 0.2]), "has 2 values"),
        (drawn("GRU", "forward", [], clip=-1.0), "attribute clip is -1; a bound is positive"),
        (drawn("LSTM", "forward", [], input_forget=2), "attribute input_forget is 2"),
        (drawn("LSTM", "sideways", []), "direction is 'sideways'; it must be one of forward"),
    ],
)
def test_errors(case, message):
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model_of({"a": case}, "float32", 3, 2, ""))
