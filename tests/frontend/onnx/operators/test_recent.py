"""Operators of ONNX's versions from 24 on, with other attributes than in the table: values by
ONNX's evaluator, gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
if onnx.defs.onnx_opset_version() < 28:
    pytest.skip("this version of onnx has no operators of version 28", allow_module_level=True)

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

from . import cases as operators  # noqa: E402
from .cases import RNG, integers, scalar, symmetric  # noqa: E402


def case(kind, *operands, count=1, **attributes):
    names = ["" if operand is None else str(i) for i, operand in enumerate(operands)]
    results = [f"y{i}" for i in range(count)]
    return operators.chain(*operands, nodes=[node(kind, names, results, **attributes)], count=count)


WIDTH = int(RNG.integers(2, 4))
CACHE = symmetric(2, 7, 3), symmetric(2, 4, 3)

CASES = {
    "product": case("CumProd", symmetric(3, 4), scalar(0)),
    "product, exclusive": case("CumProd", symmetric(3, 4), scalar(-1), exclusive=1),
    "product, from the end": case("CumProd", symmetric(3, 4, 2), scalar(1), reverse=1),
    "gate": case("SwiGLU", symmetric(2, 3), symmetric(2, 3)),
    "swish": case("Swish", symmetric(2, 3)),
    "cache": case("TensorScatter", *CACHE),
    "cache, places": case("TensorScatter", *CACHE, integers(3, 1), axis=1),
    "cache, in a circle": case("TensorScatter", *CACHE, integers(6, 9), mode="circular"),
    "cache, last axis": case("TensorScatter", symmetric(2, 2, 5), symmetric(2, 2, 3),
    integers(2, 0), axis=-1),
    "convolution": case("CausalConvWithState", symmetric(2, 3, 5), symmetric(3, 1, WIDTH), count=2),
    "convolution of one": case("CausalConvWithState", symmetric(2, 3, 4), symmetric(3, 1, 1),
    count=2),
    "convolution, state": case("CausalConvWithState", symmetric(2, 3, 2), symmetric(3, 1, 4), None,
    symmetric(2, 3, 3), count=2, activation="swish"),
    "blocks": case("SpaceToDepth", symmetric(1, 2, 4, 6), blocksize=2, mode="CRD"),
}  # fmt: skip


def test_values_and_gradients():
    operators.check(CASES, 28)


def test_symbolic_extents():
    nodes = [
        node("CausalConvWithState", ["x", "w", "", "s"], ["a", "new"]),
        node("TensorScatter", ["cache", "a", "places"], ["y"], axis=2, mode="circular"),
    ]
    shapes = {"x": ["b", 3, "t"], "s": ["b", 3, 2], "cache": ["b", 3, "n"]}
    weights = {"w": normal(3, 1, 3), "places": np.array([4, 1])}
    model = models.model_of(nodes, shapes, weights, outputs=["y", "new"], opset=28)
    extents = {"b": 2, "t": 3, "n": 5}
    feeds = {
        name: normal(*(extents.get(extent, extent) for extent in shape))
        for name, shape in shapes.items()
    }
    places = onnx.helper.make_tensor_value_info("places", onnx.TensorProto.INT64, ["b"])
    model.graph.input.append(places)
    model.graph.initializer.remove(model.graph.initializer[1])
    feeds["places"] = np.array([4, 1])
    models.check_outputs(from_model(model), model, feeds)


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("cache", {"mode": "ring"}, "attribute mode is 'ring'; it must be 'linear' or 'circular'"),
        ("cache", {"axis": 0}, "attribute axis is 0; it must be an axis of the 3 axes"),
        ("convolution", {"activation": "relu"}, "activation is 'relu'; it must be 'none', 'silu'"),
        ("blocks", {"mode": "RCD"}, "attribute mode is 'RCD'; it must be 'DCR' or 'CRD'"),
    ],
)
def test_errors(name, attributes, message):
    model, _ = operators.model_of({name: CASES[name]}, 28)
    own = model.graph.node[1]
    kept = [attribute for attribute in own.attribute if attribute.name not in attributes]
    del own.attribute[:]
    own.attribute.extend(kept)
    own.attribute.extend(onnx.helper.make_attribute(*pair) for pair in attributes.items())
    with pytest.raises((UnsupportedOperatorError, ValueError), match=message):
        from_model(model)
