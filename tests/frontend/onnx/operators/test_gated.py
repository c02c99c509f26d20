"""Gates and convolutions of ONNX Runtime's domain, with other attributes than in the table: values
by NumPy, and the messages of refused ones."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

from . import cases as operators  # noqa: E402
from .cases import microsoft  # noqa: E402
from .cases.microsoft import case, shifted  # noqa: E402


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def causal(x, w):
    """Return the convolution of channels of ``(batch, channels, steps)`` with those before."""
    width, steps = w.shape[2], x.shape[2]
    whole = np.pad(x, [(0, 0), (0, 0), (width - 1, 0)])
    return sum(whole[:, :, i : i + steps] * w[:, 0, i, None] for i in range(width))


def norm(x, scale, gate):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale * gate * sigmoid(gate)


CASES = {
    "two halves": (case("SwiGLU", shifted(2, 3), shifted(2, 3)), lambda a, b: a * sigmoid(a) * b),
    "gate of rows": (case("GatedAdd", shifted(2, 3), shifted(2, 3), shifted(2, 1)),
    lambda x, y, g: x + y * g),
    "scale": (case("ScaledSiLU", shifted(2, 3), np.array(0.3)),
    lambda x, s: s * x * sigmoid(s * x)),
    "norm": (case("GatedRMSNorm", shifted(2, 3, 4), shifted(4), shifted(2, 3, 4)), norm),
    "softmax of axes": (case("BiasSoftmax", shifted(2, 3, 4), shifted(2, 3, 4), axis=1,
    is_inner_broadcast=0), lambda x, b: np.exp(x + b) / np.exp(x + b).sum((1, 2), keepdims=True)),
    "convolution": (case("CausalConvWithState", shifted(2, 3, 5), shifted(3, 1, 4), count=2),
    causal),
}  # fmt: skip


def test_values_and_gradients():
    cases = {name: entry for name, (entry, _) in CASES.items()}
    values = {name: function(*cases[name].operands) for name, (_, function) in CASES.items()}
    operators.check(cases, 17, values, set())


def test_operators_that_onnx_has_in_later_versions():
    cases = {
        "Trilu": case("Trilu", shifted(3, 4)),
        "GridSample": microsoft.CASES["GridSample"],
    }
    values = {"Trilu": np.triu(cases["Trilu"].operands[0])}
    operators.check(cases, 11, values, {"GridSample"})


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("CausalConvWithState", {"state_window": 2}, "state_window=2; state_window=0 is supported"),
        ("CausalConvWithState", {"ndim": 2}, "ndim=2; ndim=1 is supported"),
        ("GatedRMSNorm", {"activation": "tanh"}, "activation is 'tanh'; it must be 'silu', 'swi"),
        ("LinearAttention", {"state_window": 3}, "state_window=3, whose results are states"),
        ("RotaryEmbedding", {"scale": 0.5}, "attribute scale is 0.5; 1 is supported"),
        ("FusedGemm", {"activation": "Cube"}, "activation is 'Cube'; supported are Relu, Sigm"),
    ],
)
def test_errors(name, attributes, message):
    model, _ = operators.model_of({name: microsoft.CASES[name]}, 17)
    own = model.graph.node[1]
    kept = [attribute for attribute in own.attribute if attribute.name not in attributes]
    del own.attribute[:]
    own.attribute.extend(kept)
    own.attribute.extend(onnx.helper.make_attribute(*pair) for pair in attributes.items())
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model)


def test_packed_queries_are_refused():
    model, _ = operators.model_of({"a": microsoft.CASES["GatedRelativePositionBias"]}, 17)
    model.graph.node[1].input.append("offsets")
    offsets = models.numpy_helper.from_array(np.zeros((2, 3), "int32"), "offsets")
    model.graph.initializer.append(offsets)
    with pytest.raises(UnsupportedOperatorError, match="its queries are packed"):
        from_model(model)
