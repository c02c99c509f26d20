"""Gradients of image operators: random settings against PyTorch, kinks, and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch

#: PyTorch's modes of interpolation, with the equivalent settings of resize2d.
MODES = {
    "nearest": ("nearest_neighbor", "asymmetric", "floor"),
    "nearest-exact": ("nearest_neighbor", "tf_half_pixel_for_nn", "floor"),
    "bilinear": ("linear", "half_pixel", ""),
    "bicubic": ("cubic", "half_pixel", ""),
    "bilinear, corners": ("linear", "align_corners", ""),
    "bicubic, corners": ("cubic", "align_corners", ""),
}


@st.composite
def resizes(draw):
    mode = draw(st.sampled_from(sorted(MODES)))
    name, *corners = mode.split(", ")
    rank = draw(st.sampled_from([2, 2, 2, 3])) if name != "bicubic" else 2
    spatial, size = (draw(st.tuples(*[st.integers(1, 8 if rank == 2 else 4)] * rank)) for _ in "ab")
    axes = draw(st.permutations(range(2 + rank)))
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 2)), *spatial]
    method, coordinates, rounding = MODES[mode]

    def forward(torch, x):
        align = {"align_corners": True} if corners else {}
        plain = x.permute(*np.argsort(axes).tolist())
        interpolation = name if rank == 2 else name.replace("bi", "tri")
        y = torch.nn.functional.interpolate(plain, size, mode=interpolation, **align)
        return y.permute(*axes)

    return TorchCase(
        f"relax.image.resize{rank}d",
        [np.random.default_rng(0).normal(size=[shape[axis] for axis in axes])],
        forward,
        {
            "size": size,
            "layout": "".join(("NCHW" if rank == 2 else "NCDHW")[axis] for axis in axes),
            "method": method,
            "coordinate_transformation_mode": coordinates,
            "rounding_method": rounding,
        },
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(resizes())
def test_resize(torch, case):
    check_many_against_torch([case])


@pytest.mark.slow
@at_length(1200)
@given(batches(resizes()))
def test_resize_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


def grid_sample_case(case, shape, samples, grid=None):
    method, padding_mode, align_corners = case
    ndim = len(shape) - 2
    rng = np.random.default_rng(1)
    if grid is None:
        grid = rng.uniform(-2.5, 2.5, (shape[0], ndim, *samples))
    return TorchCase(
        "relax.image.grid_sample",
        [rng.normal(size=shape), grid],
        lambda torch, x, g: torch.nn.functional.grid_sample(
            x, g.movedim(1, -1), method, padding_mode, align_corners
        ),
        {
            "method": method,
            "padding_mode": padding_mode,
            "align_corners": align_corners,
            "layout": "NCHW" if ndim == 2 else "NCDHW",
        },
    )


def check_grid_sample(*args):
    check_many_against_torch([grid_sample_case(*args)])


CASES = list(
    itertools.product(
        ["nearest", "bilinear", "bicubic"], ["zeros", "border", "reflection"], [False, True]
    )
)
SAMPLINGS = st.builds(
    grid_sample_case,
    st.sampled_from(CASES),
    st.tuples(*(st.integers(1, high) for high in (2, 2, 5, 5))),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(SAMPLINGS)
def test_grid_sample(torch, case):
    check_many_against_torch([case])


@pytest.mark.slow
@at_length(200)
@given(batches(SAMPLINGS))
def test_grid_sample_at_length(torch, batch):
    check_many_against_torch(batch, target=TARGET)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "bilinear"], ids=str)
def test_grid_sample_at_kinks(case):
    """The points are the centres and borders of elements, and the points of reflection."""
    at = np.arange(-3, 3.25, 0.25)
    grid = np.stack(np.meshgrid(at, at[:13], indexing="ij"))[None]
    check_grid_sample(case, (1, 1, 4, 2 if not case[2] else 5), None, grid)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("case", [("nearest", "zeros", True), ("bilinear", "reflection", False)])
def test_grid_sample_in_three_dimensions(case):
    check_grid_sample(case, (2, 1, 2, 3, 4), (2, 1, 3))


def test_grid_sample_to_third_order():
    rng = np.random.default_rng(0)
    grid = np.array([[-0.41, 0.13], [0.62, -0.87]]).reshape(1, 2, 1, 2)
    for method in ("bilinear", "bicubic"):
        check_gradients(
            "relax.image.grid_sample",
            [rng.normal(size=(1, 1, 3, 4)), grid],
            order=3,
            method=method,
        )


def test_a_nan_position_leaves_other_samples_unchanged():
    """An undefined place in the grid has no element that could receive its gradient."""
    rng = np.random.default_rng(0)
    grid = rng.uniform(-0.9, 0.9, (1, 2, 1, 4))
    grid[0, :, 0, 1] = np.nan, 1e30

    def others(x):
        sampled = relax.op.image.grid_sample(x, relax.const(grid))
        return relax.op.take(sampled, relax.const([0, 2, 3]), axis=3)

    check_gradients(others, [rng.normal(size=(1, 2, 3, 4))])


def gradient(build, *types):
    params = [relax.Var(f"x{i}", kind) for i, kind in enumerate(types)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(build(*params))))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main", params)(bb.get())


@pytest.mark.parametrize(
    ("build", "shapes", "message"),
    [
        (
            lambda x: relax.op.image.resize2d(x, (2, 2), layout="NCHW4c"),
            [(1, 2, 3, 3, 4)],
            "relax.image.resize2d.*'NCHW4c'.*unpacked",
        ),
        (
            lambda x, g: relax.op.image.grid_sample(x, g, layout="NHWC"),
            [(1, 3, 3, 2), (1, 2, 3, 3)],
            "relax.image.grid_sample.*layout must be one of",
        ),
        (
            lambda x, g: relax.op.image.grid_sample(x, g, method="cubic"),
            [(1, 2, 3, 3), (1, 2, 3, 3)],
            "method must be one of",
        ),
        (
            lambda x, g: relax.op.image.grid_sample(x, g),
            [(2, 2, 3, 3), (1, 2, 3, 3)],
            "data and grid must have the same batch",
        ),
    ],
)
def test_unsupported_layouts_methods_and_batches_are_refused(build, shapes, message):
    with pytest.raises(GradientError, match=message):
        gradient(build, *(relax.TensorType(shape, "float32") for shape in shapes))
