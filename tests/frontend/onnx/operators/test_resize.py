"""Resizing with the settings that Relax's operators do not have: values by ONNX's evaluator, and
gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402
from sweep import share  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

COORDINATES = [
    *("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"),
    *("half_pixel_symmetric", "tf_crop_and_resize"),
]
ROUNDINGS = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
# A place that is nearly whole is a whole one in the evaluator, with the weights of the other.
SCALES = [(0.45, 1.27), (1.53, 0.72), (1 / 3, 2.5), (1.2345, 0.8), (0.6, 1)]


def cases():
    """Yield names, attributes, scales of the last two axes, and the region."""
    for i, coordinates in enumerate(COORDINATES):
        crops = coordinates == "tf_crop_and_resize"
        roi = [0, 0, 0.1, -0.1, 1, 1, 0.8, 1.2] if crops else []
        settings = {"coordinate_transformation_mode": coordinates, "extrapolation_value": 0.5}
        rounding = {"mode": "nearest", "nearest_mode": ROUNDINGS[i % 4]}
        yield f"nearest_{coordinates}", {**settings, **rounding}, SCALES[i % 5], roi
        smooth = {"mode": "linear", "antialias": int(not crops and i % 2)}
        yield f"linear_{coordinates}", {**settings, **smooth}, SCALES[(i + 1) % 5], roi
        cubic = {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": int(not crops)}
        cubic["antialias"] = int(i == 0)
        yield f"cubic_{coordinates}", {**settings, **cubic}, SCALES[(i + 2) % 5], roi


CASES = list(cases())

#: Cases with each of the coordinates and each of the modes.
SOME = [
    *("nearest_asymmetric", "nearest_half_pixel", "linear_align_corners",
    "linear_half_pixel_symmetric"),
    *("cubic_pytorch_half_pixel", "linear_tf_crop_and_resize"),
]  # fmt: skip


def model_of(chosen, shape, opset: int = 19):
    nodes, weights = [node("Mul", ["x", "w"], ["h"])], {"w": normal(2, 1, 1, dtype="float64")}
    for name, attributes, scales, roi in chosen:
        weights[f"{name}.scales"] = np.array([1, 1, *scales], "float32")
        weights[f"{name}.roi"] = np.array(roi, "float32")
        operands = ["h", f"{name}.roi", f"{name}.scales"]
        nodes.append(node("Resize", operands, [name], **attributes))
    outputs = [name for name, *_ in chosen]
    return models.model_of(nodes, {"x": shape}, weights, outputs, opset, "float64")


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_scales_of_symbolic_extents(part):
    """One compilation for all extents; the scale stays as it is where it gives no whole extent."""
    some = [case for case in CASES if case[0] in SOME]
    chosen = some if part == "some" else [*some[:1], *share(CASES[1:])]
    model = model_of(chosen, ["n", 2, "height", "width"])
    imported = from_model(model)
    assert list(imported.params) == ["w"]

    def loss(bb, *results):
        total = None
        for result in results:
            part = bb.emit(relax.op.sum(relax.op.sin(result)))
            total = part if total is None else bb.emit(relax.op.add(total, part))
        return total

    module = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=["w"])
    call = models.compiled(module, None)
    w = imported.params["w"].numpy()
    for shape in ((1, 2, 7, 10), (2, 2, 12, 3)):
        x = normal(*shape, dtype="float64")
        outputs, expected = call("main", x, w), models.wanted(model, {"x": x})
        for (name, *_), result, other in zip(chosen, outputs, expected, strict=True):
            np.testing.assert_allclose(result, other, 1e-5, 2e-6, err_msg=f"{name} {shape}")
        (gradient,) = call("loss_adjoint", x, w)[1]
        losses = [call("loss", x, w + step) for step in (1e-5, -1e-5)]
        difference = (losses[0] - losses[1]) / 2e-5
        np.testing.assert_allclose(gradient.sum(), difference, rtol=1e-6)


def test_known_extents_and_the_aspect_ratio():
    chosen = [
        case for case in CASES if case[0] in ("linear_half_pixel_symmetric", "cubic_half_pixel")
    ]
    model = model_of(chosen, [2, 2, 7, 10])
    for i, policy in enumerate(("not_larger", "not_smaller")):
        operands, name = ["h", "", "", "sizes"], f"aspect_{i}"
        settings = {"keep_aspect_ratio_policy": policy, "axes": [2, 3], "mode": "linear"}
        model.graph.node.append(node("Resize", operands, [name], **settings))
        model.graph.output.append(onnx.helper.make_value_info(name, onnx.TypeProto()))
    # All axes, including the batch and the channels, which TVM does not resize.
    every = node("Resize", ["h", "", "all"], ["every"], mode="linear")
    model.graph.node.append(every)
    model.graph.output.append(onnx.helper.make_value_info("every", onnx.TypeProto()))
    values = {"sizes": np.array([5, 9]), "all": np.array([2, 1.5, 0.5, 1.2], "float32")}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in values.items())
    x = normal(2, 2, 7, 10, dtype="float64")
    imported = from_model(model)
    models.check_outputs(imported, model, {"x": x}, 1e-5, 2e-6)  # scales are of float32
    models.check_parameter_gradients(imported, {"x": x})


@pytest.mark.parametrize(
    ("attributes", "operands", "message"),
    [
        ({"antialias": 1, "mode": "linear"}, ["x", "", "", "sizes"], "its scale are symbolic"),
        ({"keep_aspect_ratio_policy": "not_larger", "mode": "linear"}, ["x", "", "", "sizes"],
        "some of which are symbolic"),
        ({"antialias": 1, "mode": "nearest"}, ["x", "", "fraction"],
        "no meaning for the mode nearest"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(attributes, operands, message):
    nodes = [node("Resize", operands, **attributes)]
    values = {"sizes": np.array([1, 2, 4, 4]), "fraction": np.array([1, 1, 0.5, 0.5], "float32")}
    model = models.model_of(nodes, {"x": [1, 2, "h", "w"]}, values, opset=19)
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(model)


def test_integers_are_resized_by_nearest_elements_only():
    for mode in ("nearest", "linear"):
        nodes = [node("Cast", ["x"], ["i"], to=onnx.TensorProto.INT32),
            node("Resize", ["i", "", "s"], mode=mode)]  # fmt: skip
        model = models.model_of(nodes, {"x": [1, 1, "n"]}, {"s": np.array([1, 1, 1.5], "float32")})
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
        if mode == "linear":
            with pytest.raises(UnsupportedOperatorError, match="interpolated by nearest elements"):
                from_model(model)
            continue
        x = np.arange(7, dtype="float32").reshape(1, 1, 7)
        models.check_outputs(from_model(model), model, {"x": x}, 0, 0)
