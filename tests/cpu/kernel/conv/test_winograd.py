"""Winograd's minimal filtering against PyTorch's convolutions in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from convolutions import expected
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, at, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.conv._winograd_plan import is_winograd
from relax_grad.cpu.kernel.conv._winograd_transforms import transform_of
from relax_grad.cpu.kernel.conv._winograd_weight_plan import divide
from relax_grad.cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows
from relax_grad.cpu.kernel.conv.winograd import winograd, winograd_backward_data
from relax_grad.cpu.kernel.conv.winograd_weight import winograd_weight
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import GENERIC

RNG = np.random.default_rng(0)
MAKERS = {"out": winograd, "data": winograd_backward_data, "weight": winograd_weight}
TOLERANCES = {2: 4e-6, 4: 4e-5}

#: The tolerance of kernels of 5 taps, whose transforms multiply by larger numbers.
OF_FIVE = 2e-5


def conv3x3(batch, ins, outs, size, padding=(1, 1, 1, 1)):
    return Conv2d(batch, ins, outs, size, (3, 3), padding=padding)


def volumes(batch, ins, outs, size, kernel=3, stride=1, padding=(1, 1), dilation=1):
    """Return a convolution of volumes; the first extent of ``size`` is the depth, whose windows the
    other attributes describe."""
    depth = Windows(size[0], kernel, stride, *padding, dilation)
    return Conv3d(conv3x3(batch, ins, outs, size[1:]), depth)


#: Convolutions whose sums take few bytes beside the squares.
IN_PARTS = [
    conv3x3(3, 20, 34, (40, 37)),
    Conv2d(2, 17, 18, (47, 30), (3, 3), padding=(2, 1, 0, 3), dilation=(2, 3)),
    volumes(1, 12, 18, (9, 20, 21), stride=2),
    Conv2d(9, 33, 9, (1, 300), (1, 5), padding=(0, 2, 0, 2)),
    conv3x3(37, 5, 17, (5, 9)),
]

#: The parallel loops of kernels whose threads sum their own squares, and of others.
OF_PARTS, SHARED = 2, 3


def check(convolutions, target, square=2, cores=2, kinds=tuple(MAKERS), **extents):
    """Compare the forward and both gradient kernels of convolutions, or some of them, compiled
    together, with PyTorch."""
    host = CPU.of(target)
    cpu = CPU(host.lanes, host.registers, cores)
    runs, wanted = [], []
    for conv in convolutions:
        arrays = {
            name: RNG.normal(size=at(shape, extents)).astype("float32")
            for name, shape in [
                ("data", conv.data_shape),
                ("weight", conv.weight_shape),
                ("out", conv.out_shape),
            ]
        }
        for result in kinds:
            make = MAKERS[result]
            known = {name: array for name, array in arrays.items() if name != result}
            # Gradient kernels take the output gradient first.
            inputs = sorted(known, key=["out", "data", "weight"].index)
            function = make(conv, cpu, square=square)
            shape = arrays[result].shape
            runs.append(Run(function, [known[name] for name in inputs], [shape]))
            wanted.append(expected(conv, known, shape, result))
    results = [result for (result,) in run_kernels(runs, target)]
    for i, (result, right) in enumerate(zip(results, wanted, strict=True)):
        conv = convolutions[i // len(kinds)]
        images = conv.slices if isinstance(conv, Conv3d) else conv
        tolerance = max(TOLERANCES[square], OF_FIVE if 5 in images.kernel else 0)
        assert largest_error(result, right) < tolerance, (conv, kinds[i % len(kinds)])
    return results


@pytest.mark.parametrize(("results", "taps"), [(1, 1), (2, 3), (4, 3), (2, 5)])
def test_transforms_multiply_polynomials(results, taps):
    """In one dimension and exactly: A^T ((G g) * (B^T d)) is the filter g over the data d."""
    transforms = transform_of(results, taps)
    data, weight = RNG.normal(size=results + taps - 1), RNG.normal(size=taps)
    products = (np.array(transforms.weight) @ weight) * (np.array(transforms.data) @ data)
    wanted = [data[i : i + taps] @ weight for i in range(results)]
    np.testing.assert_allclose(np.array(transforms.result) @ products, wanted, rtol=1e-12)


@each_target
@pytest.mark.parametrize("square", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sizes_around_the_tile(target, square):
    sizes = [
        conv3x3(2, 16, 16, (8, 8)),
        conv3x3(1, 5, 3, (7, 9), (0, 1, 2, 1)),
        conv3x3(3, 40, 35, (5, 5)),
        conv3x3(1, 1, 1, (1, 1)),
    ]
    check(sizes, target, square)


@each_target
def test_weights_that_leave_the_cache(target):
    """Each step handles many images, and sums run over more channels than a tile adds at once."""
    check([conv3x3(3, 270, 100, (5, 6)), conv3x3(9, 130, 140, (3, 3))], target)


def test_symbolic_batch():
    batch = tirx.Var("batch", "int32")
    for conv, size in [
        (conv3x3(batch, 18, 9, (20, 21)), 3),
        (conv3x3(batch, 18, 9, (8, 9)), 13),
        (conv3x3(batch, 120, 140, (3, 4)), 0),
        (volumes(batch, 18, 9, (3, 5, 6)), 3),
    ]:
        check([conv], {"kind": "llvm"}, batch=size)


@pytest.mark.slow
@each_target
def test_symbolic_batch_of_any_size(target):
    batch = tirx.Var("batch", "int32")
    for size in (0, 1, 3, 60):
        check([conv3x3(batch, 18, 9, (8, 9)), conv3x3(batch, 120, 140, (3, 4))], target, batch=size)


def parallel_loops(conv, cores=2, square=2):
    """Return the number of parallel loops of the kernel of a weight gradient."""
    return winograd_weight(conv, CPU(8, 16, cores), square=square).script().count("T.parallel(")


@each_target
def test_weight_gradients_whose_threads_sum_their_own_squares(target):
    """Parts of images and of rows, of interleaved images, and of volumes."""
    assert {parallel_loops(conv) for conv in IN_PARTS} == {OF_PARTS}
    check(IN_PARTS, target, kinds=["weight"])


@pytest.mark.parametrize(
    ("conv", "cores", "loops"),
    {
        "few channels": (conv3x3(8, 64, 64, (56, 56)), 8, OF_PARTS),
        "more cores than parts": (conv3x3(8, 64, 64, (56, 56)), 9, SHARED),
        "two parts": (conv3x3(8, 96, 96, (28, 28)), 2, OF_PARTS),
        "many images": (conv3x3(64, 96, 96, (28, 28)), 8, OF_PARTS),
        "one image": (conv3x3(1, 64, 64, (64, 64)), 2, OF_PARTS),
        "large sums": (conv3x3(64, 128, 128, (28, 28)), 2, SHARED),
        "sums as large as the squares": (conv3x3(8, 96, 96, (8, 8)), 2, SHARED),
        "small images": (conv3x3(8, 64, 64, (8, 8)), 2, SHARED),
        "symbolic batch": (conv3x3(tirx.Var("n", "int32"), 64, 64, (56, 56)), 8, OF_PARTS),
    }.values(),
)
def test_threads_sum_their_own_squares_if_the_sums_are_small(conv, cores, loops):
    assert parallel_loops(conv, cores) == loops


@pytest.mark.parametrize(
    ("batch", "phases", "height", "row"),
    [
        (1, 1, 29, 200),
        (3, 1, 14, 200),
        (5, 2, 7, 200),
        (7, 3, 3, 200),
        (100, 1, 1, 200),
        (3, 1, 96, 8),
        (100, 1, 129, 200),
    ],
)
def test_parts_are_equal_shares(batch, phases, height, row):
    """Two threads of equal numbers of parts have nearly equal numbers of rows."""
    parts, chunks = divide(batch, phases, height, row * 1000, 50_000, GENERIC.convolutions)
    sizes = [
        min(chunks.images, batch * phases - i) * min(chunks.rows, height - j)
        for i in range(0, batch * phases, chunks.images)
        for j in range(0, height, chunks.rows)
    ]
    assert (sum(sizes), len(sizes)) == (batch * phases * height, chunks.number)
    half = sum(sizes[: -(-parts // 2) * len(sizes) // parts])
    assert parts > 1
    assert abs(half / sum(sizes) - 0.5) < 0.04


def test_results_do_not_depend_on_the_cores():
    global RNG
    convolutions = [
        conv3x3(3, 20, 40, (9, 9)),
        conv3x3(5, 120, 140, (3, 4)),
        volumes(1, 20, 40, (7, 9, 9)),
    ]
    runs = []
    for cores in (1, 2, 64):
        RNG = np.random.default_rng(0)
        results = check(convolutions, {"kind": "llvm"}, cores=cores)
        results += check(IN_PARTS[:2], {"kind": "llvm"}, cores=cores, kinds=["weight"])
        runs.append([result.tobytes() for result in results])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(1, 4, 4, (8, 8), (3, 3), strides=(2, 1)),
        Conv2d(1, 4, 4, (8, 8), (3, 3), groups=2),
        Conv2d(1, 4, 4, (8, 8), (1, 1)),
        Conv2d(1, 4, 4, (8, 8), (3, 4)),
        Conv2d(1, 4, 4, (8, 8), (1, 3), padding=(1, 0, 0, 0)),
        Conv2d(1, 4, 4, (8, 8), (3, 3), padding=(3, 1, 1, 1)),
    ],
)
def test_strides_groups_and_other_windows_are_not_winograd(conv):
    depth = Windows(8, 2, 3, 1, 1, 2)
    for kernel in (conv, Conv3d(conv, depth)):
        assert not is_winograd(kernel)
    plain = conv3x3(1, 4, 4, (8, 8))
    dilated = Conv2d(1, 4, 4, (8, 8), (5, 3), padding=(8, 1, 8, 3), dilation=(2, 2))
    for kernel in (plain, dilated, Conv3d(plain, depth)):
        assert is_winograd(kernel)


@each_target
def test_other_kernels_and_dilations(target):
    """Kernels along one axis, of different extents, with dilations that exceed the result, and in
    volumes."""
    dilated = Conv2d(1, 19, 9, (7, 12), (3, 3), padding=(5, 3, 2, 6), dilation=(3, 5))
    check(
        [
            dilated,
            Conv2d(2, 5, 18, (6, 9), (5, 5), padding=(2, 2, 2, 2)),
            Conv2d(1, 9, 33, (1, 21), (1, 5), padding=(0, 3, 0, 1), dilation=(1, 2)),
            Conv2d(1, 17, 5, (11, 4), (3, 1), padding=(2, 0, 1, 0), dilation=(2, 3)),
            Conv2d(1, 70, 65, (9, 10), (5, 3), padding=(0, 0, 4, 1), dilation=(1, 2)),
            Conv3d(replace(dilated, kernel=(5, 3), size=(11, 9)), Windows(3, 2, 1, 1, 0, 1)),
        ],
        target,
    )


@each_target
def test_volumes(target):
    """Blocks of all slices and of some, strides and dilations of the depth, and no tap in bounds
    for some slices, or for a single one."""
    check(
        [
            volumes(2, 9, 20, (5, 6, 7)),
            volumes(1, 19, 7, (7, 5, 4), kernel=1, stride=2, padding=(0, 0)),
            volumes(1, 5, 35, (9, 5, 6), kernel=4, stride=3, padding=(2, 1), dilation=2),
            volumes(2, 40, 33, (3, 31, 33), kernel=2, stride=3, padding=(4, 3)),
            volumes(1, 120, 140, (4, 3, 4)),
            volumes(2, 13, 14, (1, 5, 4), kernel=1, stride=2, padding=(1, 0)),
        ],
        target,
    )


@st.composite
def any_volumes(draw):
    """Draw convolutions of volumes with any attributes of the depth."""
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (4, 3, 2))
    padding = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    least = max(1, (kernel - 1) * dilation + 1 - sum(padding))
    depth = draw(st.integers(least, least + 6))
    slices = draw(convolutions())
    return Conv3d(slices, Windows(depth, kernel, stride, *padding, dilation))


@st.composite
def convolutions(draw):
    kernel = draw(st.sampled_from([(3, 3), (3, 3), (5, 5), (1, 3), (3, 5), (5, 1)]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 4), (3, 2)]))
    reach = [(taps - 1) * step for taps, step in zip(kernel, dilation, strict=True)]
    padding = tuple(draw(st.integers(0, most)) for most in reach * 2)
    least = (max(1, reach[i] + 1 - padding[i] - padding[i + 2]) for i in (0, 1))
    size = tuple(draw(st.integers(extent, extent + 20)) for extent in least)
    channels = st.integers(1, 70)
    images = conv3x3(draw(st.integers(1, 4)), draw(channels), draw(channels), size, padding)
    return replace(images, kernel=kernel, dilation=dilation)


@pytest.mark.slow
@each_target
@at_length(30, batch=10)
@given(cases=batches(any_volumes(), 10))
def test_any_volumes(target, cases):
    check(cases, target)


@pytest.mark.slow
@each_target
@at_length(60, batch=10)
@given(cases=batches(convolutions(), 10))
def test_any_convolution(target, cases):
    check(cases, target)


@at_length(8, batch=4)
@given(cases=batches(convolutions(), 4))
def test_some_convolutions(cases):
    check(cases, {"kind": "llvm"})
