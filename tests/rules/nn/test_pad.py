"""Gradients of padding: random shapes and widths, half precision, symbolic extents, and
refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx
from tvm.relax.op import grad as backward

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_many_against_torch
from relax_grad.testing.samples.pad import padded

MODES = ("constant", "reflect", "replicate", "circular")


@st.composite
def cases(draw):
    mode = draw(st.sampled_from(MODES))
    smallest = 0 if mode == "constant" else 1
    rank = draw(st.integers(1, 5))
    shape = tuple(draw(st.integers(smallest, 4 if rank < 4 else 3)) for _ in range(rank))
    widest = 6 if rank < 4 else 2
    widths = []
    for extent in shape:
        before = draw(st.integers(-4, widest))
        least = max(-4, -extent - before)
        widths += [before, draw(st.integers(least, max(least, widest)))]
    attrs = {"pad_width": widths, "pad_mode": mode}
    if draw(st.booleans()):
        attrs["pad_value"] = 2.5
    # TVM leaves a sum over an empty symbolic axis undefined. TVM's own pass that looks for reshapes
    # fails if a symbolic axis behind others is cropped.
    kept = [widths[2 * axis] + widths[2 * axis + 1] >= 0 for axis in range(rank)]
    names = [axis for axis in range(rank) if shape[axis] and kept[axis] and draw(st.booleans())]
    return TorchCase(
        "relax.nn.pad",
        [np.random.default_rng(0).normal(size=shape)],
        lambda torch, x: padded(torch, x, widths, mode, attrs.get("pad_value", 0.0)),
        attrs,
        symbolic={0: {axis: f"n{axis}" for axis in names}} if draw(st.booleans()) else {},
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(cases())
def test_pad(torch, case):
    check_many_against_torch([case])


@pytest.mark.slow
@at_length(2000)
@given(batches(cases()))
def test_pad_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


def compiled(params, build):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(*params))
        bb.emit_func_output(out)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), target=TARGET), tvm.cpu())
    return lambda *values: machine["main"](*map(tvm.runtime.tensor, values)).numpy()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_half_precision_sums_in_float32(mode):
    """In float16, a sum of ones stops at 2048."""
    grad = relax.Var("g", relax.TensorType((4097,), "float16"))
    run = compiled([grad], lambda g: backward.pad_backward_data(g, (1,), (4000, 96), mode))
    assert run(np.ones(4097, "float16")).tolist() == [4096]  # 4097 in float16


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("extent", [0, 1, 2, 3, 7])
def test_one_program_for_every_extent(mode, extent):
    """The widths may exceed the run-time value of a symbolic extent."""
    before, after = 3, 5
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n], "float32"))
    grad = relax.Var("g", relax.TensorType([n + before + after], "float32"))
    attrs = {"pad_width": (before, after), "pad_mode": mode}
    forward = compiled([x], lambda x: relax.op.nn.pad(x, **attrs))
    transposed = compiled([x, grad], lambda x, g: backward.pad_backward_data(g, (n,), **attrs))

    value = np.arange(extent, dtype="float32")
    cotangent = np.arange(1, extent + 9, dtype="float32")
    if extent == 0:
        assert forward(value).tolist() == [0] * 8
        assert transposed(value, cotangent).shape == (0,)
        return
    modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    source = np.pad(np.arange(extent), (before, after), modes[mode])
    np.testing.assert_array_equal(forward(value), value[source])
    expected = np.zeros(extent, "float32")
    np.add.at(expected, source, cotangent)
    np.testing.assert_array_equal(transposed(value, cotangent), expected)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"pad_width": (1, 1), "pad_mode": "edge"}, r"relax\.nn\.pad.*'edge'.*'constant'"),
        ({"pad_width": (-2, -2)}, "crops .* by more than its extents"),
    ],
)
def test_refused(attrs, message):
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.nn.pad(x, **attrs))))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match=message):
        relax.transform.Gradient("main")(bb.get())
