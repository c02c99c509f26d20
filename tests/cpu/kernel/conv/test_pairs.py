"""Convolutions of pairs of bfloat16 against PyTorch in float64, on processors that multiply
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import convolutions
import ml_dtypes
import numpy as np
import pytest
import tvm
from convolutions import expected
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from machines import HALVES, PAIRS, at, compile_kernels, largest_error, of_halves
from sweep import one_by_one
from tvm import tirx

from relax_grad.cpu.kernel.conv.direct import (
    conv2d,
    conv2d_backward_data,
    conv3d,
    conv3d_backward_data,
)
from relax_grad.cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows
from relax_grad.cpu.kernel.conv.stem_weight import conv_stem
from relax_grad.cpu.kernel.conv.weight import conv3d_weight, conv_weight
from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.target import CPU

pytestmark = pytest.mark.usefixtures("halves")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TARGET = tvm.target.Target(PAIRS["avx512bf16"])
RNG = np.random.default_rng(0)


@pytest.fixture(params=HALVES)
def halves(request, monkeypatch):
    """Compile for a target that multiplies pairs, or tiles."""
    monkeypatch.setitem(globals(), "TARGET", of_halves(request.param))


#: The operands and the result of a kernel.
FORWARD = ("data", "weight", "out")
BACKWARD_DATA = ("out", "weight", "data")
BACKWARD_WEIGHT = ("out", "data", "weight")

IMAGES = [
    (conv2d, FORWARD),
    (conv2d_backward_data, BACKWARD_DATA),
    (conv_weight, BACKWARD_WEIGHT),
]
VOLUMES = [
    (conv3d, FORWARD),
    (conv3d_backward_data, BACKWARD_DATA),
    (conv3d_weight, BACKWARD_WEIGHT),
]

CONVS = [
    Conv2d(2, 7, 40, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1)),
    Conv2d(3, 34, 18, (12, 13), (3, 3), (2, 2), (1, 0, 1, 2)),
    Conv2d(2, 17, 33, (7, 7), (1, 1)),
    Conv2d(1, 66, 35, (9, 10), (1, 1), (2, 2)),
    Conv2d(2, 12, 30, (8, 15), (2, 4), (1, 3), (0, 2, 1, 1), (2, 1), groups=2),
    Conv2d(2, 9, 6, (6, 20), (3, 5), (3, 1), (2, 2, 2, 2), (1, 3), groups=3),
    Conv2d(2, 3, 20, (20, 19), (7, 7), (2, 2), (3, 3, 3, 3)),
    Conv2d(1, 40, 16, (1, 33), (1, 3), (1, 1), (0, 1, 0, 1)),
    Conv2d(1, 260, 20, (5, 1), (3, 1), (1, 1), (1, 0, 1, 0)),
    Conv2d(5, 881, 40, (9, 9), (3, 3), (2, 2), (1, 1, 1, 1)),  # in parts of its channels
]


def kernel(make: Callable, conv: Conv2d | Conv3d, result="float32", **properties) -> tirx.PrimFunc:
    """Return the kernel of a convolution of bfloat16."""
    cpu = replace(CPU.of(TARGET), **properties)
    return stored_as(("bfloat16", "bfloat16", result), 1, lambda: make(conv, cpu))


def check(kinds: Sequence[tuple], convs: Sequence[Conv2d | Conv3d], batch: int = 0) -> None:
    """Compare convolutions whose sums are stored in float32."""
    cases = [(make, names, conv) for conv in convs for make, names in kinds]
    functions = {f"f{i}": kernel(make, conv) for i, (make, _, conv) in enumerate(cases)}
    library = compile_kernels(functions, TARGET)
    for i, (_, names, conv) in enumerate(cases):
        *operands, wanted = names
        shapes = {name: at(getattr(conv, f"{name}_shape"), {"batch": batch}) for name in names}
        arrays = {name: RNG.normal(size=shapes[name]).astype(BFLOAT16) for name in operands}
        result = run(library[f"f{i}"], list(arrays.values()), shapes[wanted])
        wide = {name: array.astype("float32") for name, array in arrays.items()}
        error = largest_error(result, expected(conv, wide, shapes[wanted], wanted))
        assert error < 4e-6, (conv, wanted)


def run(function, arrays: Sequence[np.ndarray], shape, dtype: str = "float32") -> np.ndarray:
    output = tvm.runtime.empty(shape, dtype)
    output.copyfrom(np.full(shape, np.nan, "float32").astype(output.numpy().dtype))
    function(*map(tvm.runtime.tensor, arrays), output)
    return output.numpy()


def test_images():
    check(IMAGES, CONVS)


def test_few_channels():
    """The weight gradient of a first convolution, whose lanes are output channels."""
    convs = [
        Conv2d(2, 3, 40, (21, 19), (7, 7), (2, 2), (3, 3, 3, 3)),
        Conv2d(3, 1, 17, (8, 9), (3, 3), (1, 1), (1, 0, 2, 1)),
        Conv2d(1, 4, 33, (10, 23), (2, 3), (1, 3), (0, 0, 1, 2), (2, 2)),
        Conv2d(2, 2, 64, (60, 66), (3, 3), (1, 1), (1, 1, 1, 1)),
    ]
    check([(conv_stem, BACKWARD_WEIGHT)], convs)


def test_volumes():
    slices = Conv2d(2, 11, 20, (6, 7), (3, 3), (1, 2), (1, 1, 1, 1))
    grouped = Conv2d(1, 10, 6, (5, 8), (2, 3), (1, 1), (0, 1, 1, 1), groups=2)
    depth = Windows(5, 3, 2, 1, 1, 1)
    check(VOLUMES, [Conv3d(slices, depth), Conv3d(grouped, depth)])
    if not CPU.of(TARGET).tiles:
        return
    # With enough channels for them: strides, dilations, groups, slices out of bounds.
    wide = Conv2d(2, 17, 35, (6, 7), (3, 3), (1, 2), (1, 1, 1, 1))
    pairs = Conv2d(1, 36, 40, (5, 8), (2, 3), (2, 1), (0, 1, 1, 1), (1, 2), groups=2)
    points = Conv2d(1, 16, 20, (4, 5), (1, 1))
    many = Windows(6, 3, 3, 2, 2, 1), Windows(7, 2, 3, 1, 0, 3), Windows(4, 1, 2, 0, 0, 1)
    convs = [Conv3d(wide, depth), Conv3d(pairs, many[0])]
    check(VOLUMES[:2], [*convs, *(Conv3d(points, windows) for windows in many[1:])])


@pytest.mark.parametrize("batch", [0, 9])
def test_symbolic_batch(batch):
    n = tirx.Var("batch", "int32")
    check(IMAGES, [Conv2d(n, 19, 21, (6, 9), (3, 3), (1, 1), (1, 1, 1, 1))], batch)


@pytest.mark.slow
@one_by_one(15, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(convolutions.convolutions(groups=(1, 1, 2, 3)), min_size=3, max_size=3))
def test_random_images(convs):
    check(IMAGES, convs)
    check([(conv_stem, BACKWARD_WEIGHT)], [conv for conv in convs if conv.groups == 1])


def test_results_are_rounded_once():
    """Sums over several chunks of images, and over several stretches of channels, are rounded at
    their end."""
    many = Conv2d(3, 70, 16, (40, 41), (1, 1), (1, 1), (1, 1, 1, 1))
    deep = Conv2d(1, 700, 20, (4, 5), (3, 3), (1, 1), (1, 1, 1, 1))
    for make, names, conv in [(*IMAGES[0], deep), (*IMAGES[2], many)]:
        *operands, wanted = (getattr(conv, f"{name}_shape") for name in names)
        arrays = [RNG.normal(size=shape).astype(BFLOAT16) for shape in operands]
        functions = {dtype: kernel(make, conv, dtype) for dtype in ("bfloat16", "float32")}
        library = compile_kernels(functions, TARGET)
        narrow, wide = (run(library[dtype], arrays, wanted, dtype) for dtype in functions)
        assert narrow.tobytes() == wide.astype(BFLOAT16).tobytes()


@pytest.mark.parametrize(("make", "names"), [*IMAGES, VOLUMES[0]])
def test_results_do_not_depend_on_the_threads(make, names):
    conv = Conv2d(3, 35, 67, (9, 11), (3, 3), (1, 1), (1, 1, 1, 1))
    conv = Conv3d(conv, Windows(3, 2, 1, 1, 0, 1)) if make is conv3d else conv
    *operands, wanted = (getattr(conv, f"{name}_shape") for name in names)
    arrays = [RNG.normal(size=shape).astype(BFLOAT16) for shape in operands]
    functions = {f"f{cores}": kernel(make, conv, cores=cores) for cores in (1, 2, 5)}
    library = compile_kernels(functions, TARGET)
    assert len({run(library[name], arrays, wanted).tobytes() for name in functions}) == 1


@pytest.mark.parametrize(
    ("make", "channels"), [(conv_weight, (3, 5)), (conv_weight, (17, 18)), (conv_stem, (3, 5))]
)
@pytest.mark.parametrize("size", [(3, 7), (4, 32), (5, 31)])
def test_infinite_numbers_reach_only_their_taps(make, channels, size):
    """Elements beside a row, those that the next window alone reads, and those of the next rows are
    not multiplied by 0."""
    conv = Conv2d(1, *channels, size, (3, 3), (1, 1), (1, 1, 1, 1))
    data, out = (np.ones(shape, BFLOAT16) for shape in (conv.data_shape, conv.out_shape))
    data[0, 0, 0, -1] = out[0, 0, 2, 0] = np.inf
    data[0, 1, -1, 0] = np.nan
    function = compile_kernels({"f": kernel(make, conv)}, TARGET)["f"]
    result = run(function, [out, data], conv.weight_shape)
    wide = {"out": out.astype("float32"), "data": data.astype("float32")}
    np.testing.assert_array_equal(result, expected(conv, wide, result.shape, "weight"))


@pytest.mark.parametrize(("make", "_"), IMAGES)
def test_other_dtypes(make, _):
    """Kernels of other operands than two of bfloat16 multiply neither pairs nor tiles."""
    conv, cpu = Conv2d(1, 16, 16, (5, 5), (3, 3)), CPU.of(TARGET)
    name = "relax_grad_tiles_add" if cpu.tiles else "add_pairs"
    for dtypes in (("float16", "float16"), ("bfloat16", "float32")):
        mixed = stored_as((*dtypes, "float32"), 1, lambda: make(conv, cpu))
        assert name not in mixed.script()
    assert name in kernel(make, conv).script()
    assert name not in kernel(make, conv, bfloat16=False, tiles=False).script()
