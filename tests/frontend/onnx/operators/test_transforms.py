"""Attributes of Fourier transforms, determinants, operators on patches and loops: by ONNX's
evaluator and differences."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from tvm import relax  # noqa: E402

import relax_grad  # noqa: E402
from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

from .cases import Case, chain, check, floats, integers, node, scalar, symmetric  # noqa: E402

OPSET = min(23, onnx.defs.onnx_opset_version())


def single(kind, *operands, **attributes) -> Case:
    """Return a case whose name is not that of its operator."""
    names = ["" if operand is None else str(i) for i, operand in enumerate(operands)]
    case = chain(*operands, nodes=[node(kind, names, **attributes)])
    return case._replace(attributes=attributes)


def body(nodes, inputs, outputs, initializers=()):
    """Return the body of a loop; inputs and outputs are types and extents by their names."""
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in types.items()]
        for types in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *values, list(initializers))


INTEGER, TRUTH, NUMBER = TensorProto.INT64, TensorProto.BOOL, TensorProto.DOUBLE

COUNTED = body(
    [
        node("Cast", ["i"], ["number"], to=NUMBER),
        node("Add", ["s", "number"], ["sum"]),
        node("Sin", ["sum"], ["new"]),
    ],
    {"i": (INTEGER, []), "c": (TRUTH, []), "s": (NUMBER, [2])},
    {"c": (TRUTH, []), "new": (NUMBER, [2])},
)

BACKWARDS = body(
    [node("Mul", ["s", "x"], ["new"]), node("Tanh", ["new"], ["row"])],
    {"s": (NUMBER, [2]), "x": (NUMBER, [2])},
    {"new": (NUMBER, [2]), "row": (NUMBER, [2])},
)

CASES = {
    "dft_complex": single("DFT", symmetric(2, 5, 2), None, scalar(1)),
    "dft_inverse": single("DFT", symmetric(2, 5, 2), None, scalar(1), inverse=1),
    "dft_one_sided": single("DFT", symmetric(3, 6, 1), None, scalar(-2), onesided=1),
    "dft_longer": single("DFT", symmetric(2, 4, 3, 1), scalar(7), scalar(1)),
    "dft_shorter": single("DFT", symmetric(2, 6, 2), scalar(4), scalar(1)),
    "stft_complex": single("STFT", symmetric(2, 11, 2), scalar(2), floats(4), scalar(4),
    onesided=0),
    "stft_no_window": single("STFT", symmetric(1, 9, 1), scalar(3), None, scalar(5)),
    "det_1": single("Det", symmetric(2, 1, 1)),
    "det_2": single("Det", symmetric(2, 2)),
    "det_5": single("Det", symmetric(3, 5, 5)),
    "col2im": single(
        "Col2Im", symmetric(2, 12, 6), integers(7, 6), integers(3, 2), strides=[2, 2],
        pads=[1, 1, 0, 1], dilations=[2, 2]
    ),
    "col2im_1d": single("Col2Im", symmetric(1, 6, 4), integers(9), integers(3), strides=[2]),
    "deform": single(
        "DeformConv", symmetric(2, 4, 5, 6), symmetric(4, 2, 3, 2), symmetric(2, 24, 3, 4), None,
        floats(2, 12, 3, 4),
        strides=[2, 2], pads=[1, 1, 1, 1], group=2, offset_group=2,
    ),
    "deform_dilated": single(
        "DeformConv", symmetric(1, 2, 6, 5), symmetric(3, 2, 2, 2), symmetric(1, 8, 4, 3),
        symmetric(3), dilations=[2, 2]
    ),
    "reverse": single("ReverseSequence", floats(2, 4, 3), integers(3, 2), time_axis=1,
    batch_axis=0),
    "norm_axes": single("MeanVarianceNormalization", floats(2, 3, 4), axes=[1]),
    "counted": chain(scalar(3), floats(2), np.array(True),
    nodes=[node("Loop", ["0", "2", "1"], body=COUNTED)]),
    "backwards": chain(
        floats(2), floats(2, 3),
        nodes=[
            node("Scan", ["0", "1"], ["last", "rows"], body=BACKWARDS, num_scan_inputs=1,
                scan_input_axes=[1],
                 scan_input_directions=[1], scan_output_axes=[1], scan_output_directions=[1]),
            node("MatMul", ["last", "rows"], ["y0"]),
        ],
    ),
}  # fmt: skip


def test_other_attributes_have_values_and_gradients():
    state, x = CASES["backwards"].operands
    rows = []
    for step in (2, 1, 0):
        state = state * x[:, step]
        rows.append(np.tanh(state))
    (data,) = CASES["norm_axes"].operands
    centred = data - data.mean(1, keepdims=True)
    values = {
        "backwards": state @ np.stack(rows[::-1], 1),
        "norm_axes": centred / (data.std(1, keepdims=True) + 1e-9),
    }
    check(CASES, OPSET, values)


def test_a_singular_determinant_is_zero():
    matrix = np.ones((4, 4))
    model = models.model_of([node("Det", ["x"], ["y"])], {"x": [4, 4]}, {}, dtype="float64")
    assert models.outputs(from_model(model), {"x": matrix})[0] == 0


def looped(count, goes_on, condition):
    """Return a model whose loop multiplies with a weight within its body."""
    weight = numpy_helper.from_array(models.normal(3, 3), "w")
    inner = body(
        [node("MatMul", ["s", "w"], ["product"]), node("Tanh", ["product"], ["new"]), *goes_on],
        {"i": (INTEGER, []), "c": (TRUTH, []), "s": (TensorProto.FLOAT, ["n", 3])},
        {condition: (TRUTH, []), "new": (TensorProto.FLOAT, ["n", 3])},
        [weight],
    )
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "at"], ["steps"]),
        node("Loop", [count, "", "x"], ["y"], body=inner, name="steps_of_it"),
    ]
    weights = {"three": np.array(3), "at": np.array(1), "many": np.array(300)}
    return models.model_of(nodes, {"x": ["n", 3]}, weights)


@pytest.mark.parametrize("count", ["three", "steps"])
def test_the_trips_of_a_loop_share_the_weights_of_its_body(count, tmp_path):
    """The number of trips is a constant, or computed from a known extent."""
    model = looped(count, [], "c")
    imported = from_model(model)
    assert list(imported.params) == ["w"]
    x, w = models.normal(2, 3), imported.params["w"].numpy()
    expected = np.tanh(np.tanh(np.tanh(x @ w) @ w) @ w)
    np.testing.assert_allclose(models.outputs(imported, {"x": x})[0], expected, 1e-5, 1e-6)
    imported.write_to(tmp_path / "zeros.onnx", {"w": np.zeros((3, 3), "float32")})
    assert not from_model(tmp_path / "zeros.onnx").params["w"].numpy().any()


@pytest.mark.parametrize(
    ("count", "goes_on", "condition"),
    [
        ("many", [], "c"),
        ("three", [node("ReduceMax", ["new"], ["most"], keepdims=0),
            node("Less", ["most", "most"], ["go"])], "go"),
    ],
)  # fmt: skip
def test_a_loop_whose_trips_are_not_known_is_refused(count, goes_on, condition):
    message = "Loop: 1 .steps_of_it.: its trips are written out if their number is a constant"
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(looped(count, goes_on, condition))


REFUSED = {
    "dft_inverse": (node("DFT", ["x"], ["y"], axis=1, inverse=1, onesided=1), [2, 1, 2],
    "its length is 0; it must be positive: give dft_length"),
    "dft_symbolic": (node("DFT", ["x"], ["y"], axis=1), [2, "n", 2],
    "the extent of its axis is n; give the extents"),
    "det": (node("Det", ["x"], ["y"]), [80, 80], "its matrices have 80 rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused(case):
    call, shape, message = REFUSED[case]
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_model(models.model_of([call], {"x": shape}, {}, opset=18))


@pytest.mark.parametrize(("frequencies", "length"), [(4, None), (5, 7), (4, 10), (6, 8), (3, 1)])
def test_the_real_signal_of_a_half_of_its_spectrum(frequencies, length):
    nodes = [
        node("Mul", ["x", "scale"], ["spectrum"]),
        node("DFT", ["spectrum", "length" if length else "", "axis"], ["y"], inverse=1, onesided=1),
    ]
    weights = {"scale": symmetric(frequencies, 1, 1), "axis": np.array(1)}
    if length:
        weights["length"] = np.array(length)
    shape = [2, frequencies, 3, 2]
    model = models.model_of(nodes, {"x": shape}, weights, opset=20, dtype="float64")
    imported = from_model(model, trainable="scale")
    x = models.normal(*shape, dtype="float64")
    spectrum = x * weights["scale"]
    expected = np.fft.irfft(spectrum[..., 0] + 1j * spectrum[..., 1], length, 1)
    (result,) = models.outputs(imported, {"x": x})
    np.testing.assert_allclose(result, expected[..., None], 1e-9, 1e-12)
    models.check_parameter_gradients(imported, {"x": x})


def test_the_frames_of_a_symbolic_signal():
    nodes = [
        node("Mul", ["x", "scale"], ["signal"]),
        node("STFT", ["signal", "step", "window"], ["y"]),
    ]
    weights = {
        "step": np.array(2),
        "window": np.hanning(4).astype("float32"),
        "scale": np.ones(1, "float32"),
    }
    model = models.model_of(nodes, {"x": [1, "n"]}, weights)
    imported = from_model(model, trainable="scale")
    run = models.compiled(imported.module)
    for count in (8, 13):
        x = models.normal(1, count)
        frames = np.lib.stride_tricks.sliding_window_view(x, 4, 1)[:, ::2] * weights["window"]
        expected = np.fft.rfft(frames)
        result = run(x, *imported.values)
        np.testing.assert_allclose(result[..., 0] + 1j * result[..., 1], expected, 1e-4, 1e-5)


def test_a_deformed_convolution_of_symbolic_extents():
    """One compilation for all batches and pictures, also those with a side of one element.

    The slope jumps where a point is on the side of a pixel. No point of these numbers is within a
    step of the difference from one, whichever tests have drawn numbers before.
    """
    rng = np.random.default_rng(0)
    weights = {
        "to_offset": 0.3 * rng.normal(size=(16, 2, 3, 3)),
        "weight": rng.normal(size=(3, 2, 2, 2)),
        "bias": rng.normal(size=3),
    }
    nodes = [
        node("Conv", ["x", "to_offset"], ["offset"], pads=[1, 1, 1, 1], strides=[2, 1]),
        node("DeformConv", ["x", "weight", "offset", "bias"], ["y"], pads=[1, 1, 0, 0],
            strides=[2, 1], offset_group=2),
    ]  # fmt: skip
    model = models.model_of(nodes, {"x": ["n", 2, "h", "w"]}, weights, opset=19, dtype="float64")
    imported = from_model(model)
    names = list(imported.params)
    assert sorted(names) == sorted(weights)

    def loss(bb, y):
        return bb.emit(relax.op.sum(relax.op.sin(y)))

    module = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=names)
    call, values = models.compiled(module, None), [weights[name] for name in names]
    directions = [rng.normal(size=value.shape) for value in values]
    # The evaluator divides by zero for a side of one element: the same picture with a column of
    # zeros has two.
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    wide.graph.initializer.append(
        numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 0, 0, 1]), "one")
    )
    wide.graph.node.insert(1, node("Pad", ["x", "one"], ["wide"]))
    wide.graph.node[2].input[0] = "wide"
    (pads,) = (a for a in wide.graph.node[2].attribute if a.name == "pads")
    pads.ints[3] = -1
    for shape in ((1, 2, 5, 4), (3, 2, 4, 7), (1, 2, 3, 1)):
        x = rng.normal(size=shape)
        result, (expected,) = call("main", x, *values), models.wanted(wide, {"x": x})
        np.testing.assert_allclose(result, expected, 1e-5, 1e-5)  # the evaluator has float32
        gradients = call("loss_adjoint", x, *values)[1]
        slope = sum(np.sum(g * d) for g, d in zip(gradients, directions, strict=True))
        ahead, behind = (
            call("loss", x, *(v + step * d for v, d in zip(values, directions, strict=True)))
            for step in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-5)
