"""Padding by computed extents: values by NumPy and gradients by differences, at several sizes."""

from __future__ import annotations

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx_models import node, normal  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

#: The widths of the axis of extent n, as the functions of n and as the nodes that compute them.
WIDTHS = {
    "wide": (lambda n: (n // 2, 2 * n),
    [node("Div", ["n", "two"], ["a"]), node("Mul", ["n", "two"], ["b"])]),
    "multiple": (lambda n: (0, -n % 4),
    [node("Neg", ["n"], ["m"]), node("Mod", ["m", "four"], ["b"])]),
    "to_nine": (lambda n: (1, 8 - n), [node("Sub", ["eight", "n"], ["b"])]),
}  # fmt: skip
NUMBERS = {name: np.array([i]) for i, name in enumerate(("zero", "one", "two"))}
NUMBERS |= {"four": np.array([4]), "eight": np.array([8]), "value": np.array(0.25)}
FIRST = {"wide": "a", "multiple": "zero", "to_nine": "one"}
MODES = ("constant", "reflect", "edge", "wrap")


def model_of(cases):
    nodes = [
        node("Mul", ["x", "w"], ["h"]),
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "one"], ["n"]),
    ]
    for widths in sorted({widths for widths, _ in cases}):
        made = onnx.helper.make_graph(WIDTHS[widths][1], "g", [], []).node
        for proto in made:
            proto.output[0] = f"{widths}.{proto.output[0]}"
            proto.input[:] = [f"{widths}.m" if name == "m" else name for name in proto.input]
        nodes += made
        first = f"{widths}.a" if widths == "wide" else FIRST[widths]
        # The axis before, of extent 2, has a constant width.
        nodes.append(
            node("Concat", ["one", first, "zero", f"{widths}.b"], [f"{widths}.pads"], axis=0)
        )
    for widths, mode in cases:
        nodes.append(node("Pad", ["h", f"{widths}.pads", "value"], [f"{widths}.{mode}"], mode=mode))
    outputs = [f"{widths}.{mode}" for widths, mode in cases]
    weights = {"w": normal(2, 1, dtype="float64"), **NUMBERS}
    return models.model_of(nodes, {"x": [2, "n"]}, weights, outputs, dtype="float64")


def padded(x, widths, mode):
    before, after = widths
    more = {"constant_values": 0.25} if mode == "constant" else {}
    x = np.pad(x, ((1, 0), (before, max(after, 0))), mode=mode, **more)
    return x if after >= 0 else x[:, :after]


def test_widths_that_are_computed():
    cases = [(name, mode) for name in ("wide", "multiple") for mode in MODES]
    cases.append(("to_nine", "constant"))  # a width that is negative for some extents
    imported = from_model(model_of(cases))
    assert list(imported.params) == ["w"]
    module = imported.with_loss(
        lambda bb, *ys: sum_of(bb, [bb.emit(relax.op.sum(relax.op.sin(y))) for y in ys])
    )
    call = models.compiled(relax_grad.value_and_grad(module, "loss", wrt=["w"]), None)
    w = imported.params["w"].numpy()
    for n in (1, 3, 6, 11):
        x = normal(2, n, dtype="float64")
        results = call("main", x, w)

        def expected(w, x=x, n=n):
            return [padded(x * w, WIDTHS[name][0](n), mode) for name, mode in cases]

        for case, result, other in zip(cases, results, expected(w), strict=True):
            np.testing.assert_array_equal(result, other, err_msg=f"{case} {n}")
        _, (gradient,) = call("loss_adjoint", x, w)
        ahead, behind = (
            sum(np.sin(value).sum() for value in expected(w + step)) for step in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(gradient.sum(), (ahead - behind) / 2e-6, rtol=1e-6)


def sum_of(bb, values):
    total = values[0]
    for value in values[1:]:
        total = bb.emit(relax.op.add(total, value))
    return total


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_width_that_may_be_negative_is_refused(mode):
    with pytest.raises(UnsupportedOperatorError, match=r"its widths 1 and 8 - n of the axis 1"):
        from_model(model_of([("to_nine", mode)]))
