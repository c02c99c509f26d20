"""No kernel reads or writes out of bounds, for any values of the inputs.

Every kernel of the differentiated samples runs between inaccessible pages, with its own values and
with extreme ones (see ``guard``). Further cases run in the same way; their shapes and attributes
are edge cases, or drawn in ``test_out_of_bounds_drawn.py``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from guard import Case, check_out_of_bounds, random, run_guarded, sample_cases
from guard import faults as faulty
from machines import WIDEST
from sweep import SHARE, share
from versions import REGIONS, WITHOUT

from relax_grad.testing.samples import sampled_operators

INT32 = np.iinfo("int32")


@pytest.fixture(params=[None, pytest.param(WIDEST, marks=pytest.mark.slow)])
def machine(request):
    """Return None for kernels of TVM's pipeline before fusion, or the target of relax_grad's
    pipeline."""
    return request.param


def extremes(size: int, dtype: str) -> np.ndarray:
    """Return integers at and beyond the bounds of an axis, and at the bounds of their dtype."""
    info = np.iinfo(dtype)
    values = [0, size - 1, size, size + 1, -1, -size, -size - 1, 10**6, -(10**6)]
    return np.array([*values, info.max, info.min, info.min + 1], dtype)


def test_faults_are_found():
    """Each faulty kernel is reported with its kind of fault, and hides no other fault."""
    x, index = np.array([1.0, 2, 3, 0]), np.arange(4, 0, -1) % 4
    expected = {
        faulty.reads_behind: "as called, at the end: SIGSEGV",
        faulty.reads_before: "as called, at the start: SIGSEGV",
        faulty.reads_behind_a_workspace: "as called, at the end: SIGSEGV",
        faulty.writes_behind: "as called, at the end: SIGSEGV",
        faulty.leaves_an_element_out: "as called: the results depend on the memory around",
        faulty.divides: "as called, at the end: SIGFPE",
        faulty.reads_at_index: "integers",
        faulty.reads_at_number: "floats",
        faulty.counts_to: "SIGALRM",
    }
    cases = [
        Case(function.__name__, function, [x, index][: function.__code__.co_argcount], order=0)
        for function in expected
    ]
    right = Case("right", "relax.take", [x, index], order=0)
    report = run_guarded([*cases, right], time_limit=1)
    faults = {case.name: [] for case in (*cases, right)}
    for finding in report.findings:
        faults[finding.case].append(finding.what)
    assert faults.pop("right") == []
    for function, what in expected.items():
        assert any(what in fault for fault in faults[function.__name__]), faults


OPERATORS = [op for op in sampled_operators() if op not in WITHOUT]


def test_kernels_of_the_first_samples():
    """These are the kernels that relax_grad legalizes, at first order, from one sample of every
    sixth operator."""
    report = check_out_of_bounds(sample_cases(OPERATORS[::6], 1, order=1), ours=True)
    assert report.kernels == report.ours > 40


#: The number of parts of the list of operators with samples. The parts are checked in parallel.
PARTS = 6


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_of_all_samples(part):
    report = check_out_of_bounds(sample_cases(share(OPERATORS)[part::PARTS]))
    assert report.kernels > 200 * SHARE


@pytest.mark.parametrize(
    "mode", ["fast", "wrap", *(pytest.param(m, marks=pytest.mark.slow) for m in ("clip", "nan"))]
)
def test_take(mode, machine):
    cases = []
    for dtype in ("int32", "int64"):
        index = extremes(5, dtype)
        for name, shape, index_shape, axis in (
            ("1d", (5,), (12,), None),
            ("rows", (5, 3), (12,), 0),
            ("columns", (3, 5), (3, 4), -1),
        ):
            inputs = [random(*shape), index.reshape(index_shape)]
            attrs = {"axis": axis, "mode": mode}
            cases.append(Case(f"{name} {dtype}", "relax.take", inputs, attrs))
    check_out_of_bounds(cases, machine=machine)


def test_gather_elements(machine):
    cases = []
    for dtype in ("int32", "int64"):
        index = extremes(5, dtype)
        for shape, index_shape, axis in (
            ((5,), (12,), 0),
            ((3, 5), (3, 4), 1),
            ((5, 4), (3, 4), 0),
        ):
            inputs = [random(*shape), index.reshape(index_shape)]
            name = f"{shape} {dtype}"
            cases.append(Case(name, "relax.gather_elements", inputs, {"axis": axis}))
    check_out_of_bounds(cases, machine=machine)


def test_gather_nd_and_index_tensor(machine):
    cases = []
    index = extremes(5, "int64")
    for name, shape, indices, batch_dims in (
        ("rows", (5, 3), index.reshape(3, 4, 1), 0),
        ("elements", (4, 5), np.stack([index, index[::-1]], -1), 0),
        ("batch", (3, 5), index.reshape(3, 4, 1), 1),
    ):
        attrs = {"batch_dims": batch_dims}
        cases.append(Case(name, "relax.gather_nd", [random(*shape), indices], attrs))
    for dtype in ("int32", "int64"):
        index = extremes(5, dtype)
        for shape, indices in (
            ((5, 3), (index,)),
            ((5, 4), (index.reshape(12, 1), index[:4])),
        ):
            inputs = [random(*shape), indices]
            cases.append(Case(f"{shape} {dtype}", "relax.index_tensor", inputs))
    check_out_of_bounds(cases, machine=machine)


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [
        *(("update", "int64"), ("add", "int32")),
        *(pytest.param(*e, marks=pytest.mark.slow) for e in (("mul", "int64"), ("max", "int32"))),
    ],
)
def test_scatters(reduction, dtype, machine):
    index, attrs = extremes(5, dtype), {"reduction": reduction}
    cases = []
    for name, shape, index_shape, axis in (
        ("1d", (5,), (12,), 0),
        ("fewer columns", (5, 4), (4, 3), 0),
        ("more columns", (5, 2), (4, 3), -2),
    ):
        inputs = [random(*shape), index.reshape(index_shape), random(*index_shape)]
        cases.append(Case(name, "relax.scatter_elements", inputs, {**attrs, "axis": axis}))
    inputs = [random(5, 2), index.reshape(12, 1), random(12, 2)]
    cases.append(Case("nd rows", "relax.scatter_nd", inputs, attrs))
    inputs = [random(4, 5), np.stack([index, index[::-1]], -1), random(12)]
    cases.append(Case("nd elements", "relax.scatter_nd", inputs, attrs))
    check_out_of_bounds(cases, machine=machine)


def test_index_put_and_slice_scatter(machine):
    cases = []
    for dtype, accumulate in (("int32", False), ("int64", True)):
        index = extremes(5, dtype)
        for name, shape, indices, values in (
            ("1d", (5,), (index,), (12,)),
            ("broadcast", (5, 4), (index.reshape(12, 1), index[:4]), (4,)),
            ("one value", (5, 4), (index, index[::-1].copy()), ()),
        ):
            inputs = [random(*shape), indices, random(*values)]
            attrs = {"accumulate": accumulate}
            what = f"{name} {dtype} {accumulate}"
            cases.append(Case(what, "relax.index_put", inputs, attrs))
    for src, start, end, step in (
        (1, 4, 5, 1),
        (0, 3, 3, 1),
        (9, -2, 7, 1),
        (3, 10**9, 10**9 + 5, 2),
    ):
        inputs = [random(5, 2), random(src, 2)]
        attrs = {"start": start, "end": end, "step": step}
        cases.append(Case(f"slice {start}", "relax.slice_scatter", inputs, attrs))
    check_out_of_bounds(cases, machine=machine)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("uint8", marks=pytest.mark.slow)])
def test_narrow_indices(dtype, machine):
    """The axis is longer than the largest index, so its extent would overflow in the dtype of the
    indices."""
    size, index = 200, np.arange(12, dtype=dtype) * 23  # the harness adds those at the limits
    rows, columns, values = index.reshape(12, 1), index[:4], random(12)
    cases = [
        *(
            Case(f"take {mode}", "relax.take", [random(size, 2), index], {"axis": 0, "mode": mode})
            for mode in ("fast", "wrap", "clip", "nan")
        ),
        *(
            Case(
                f"scatter {reduction}",
                "relax.scatter_elements",
                [random(size), index, values],
                attrs,
            )
            for reduction in ("update", "add", "mul")
            for attrs in [{"axis": 0, "reduction": reduction}]
        ),
        Case(
            "nd", "relax.scatter_nd", [random(size, 2), rows, random(12, 2)], {"reduction": "add"}
        ),
        Case("nll", "relax.nn.nll_loss", [random(12, size), index], {"ignore_index": 3}),
    ]
    if dtype == "int8":  # TVM takes only signed indices here
        cases += [
            Case("gather", "relax.gather_elements", [random(size), index]),
            Case("index", "relax.index_tensor", [random(size, size), (rows, columns)]),
            Case("put", "relax.index_put", [random(size, size), (rows, columns), random(12, 4)]),
        ]
    check_out_of_bounds(cases, machine=machine)


@pytest.mark.parametrize(
    "reduction",
    ["mean", *(pytest.param(reduction, marks=pytest.mark.slow) for reduction in ("none", "sum"))],
)
def test_nll_loss(reduction, machine):
    cases = []
    for dtype, ignore_index in itertools.product(["int32", "int64"], [-100, 2, 255, INT32.min]):
        targets = extremes(5, dtype)
        attrs = {"reduction": reduction, "ignore_index": ignore_index}
        for name, predictions, target in (
            ("rows", (12, 5), targets),
            ("images", (2, 5, 6), targets.reshape(2, 6)),
            ("no batch", (5,), targets[-1].reshape(())),
        ):
            for weights in ([], [random(5)]):
                inputs = [random(*predictions), target, *weights]
                what = f"{name} {dtype} {ignore_index} {len(weights)}"
                cases.append(Case(what, "relax.nn.nll_loss", inputs, attrs))
    check_out_of_bounds(cases[::5], machine=machine)  # each kind and each ignored index occurs


def test_pooling(machine):
    cases = []
    for op in ("relax.nn.max_pool2d", "relax.nn.avg_pool2d"):
        for i, attrs in enumerate(
            [
                {"pool_size": (3, 2), "strides": (2, 3), "padding": (1, 1, 0, 1)},
                {"pool_size": (2, 2), "strides": (4, 5), "ceil_mode": True},
                {"pool_size": (3, 3), "dilation": (2, 3), "padding": (3, 4, 4, 3)},
                {"pool_size": (1, 1), "padding": (2, 2, 2, 2), "strides": 3},
            ]
        ):
            cases.append(Case(f"{op} {i}", op, [random(1, 2, 7, 8)], attrs))
    for rank in (1, 3):
        shape = (1, 2, 7, 4, 5)[: rank + 2]
        sizes = {"pool_size": (3, 1, 2)[:rank], "strides": (2, 3, 4)[:rank]}
        padding = (3, 0, 1, 0, 2, 4)[: 2 * rank]
        for kind in ("max", "avg"):
            op = f"relax.nn.{kind}_pool{rank}d"
            for ceil_mode in (False, True):
                attrs = {**sizes, "padding": padding, "ceil_mode": ceil_mode}
                name = f"{op} {ceil_mode}"
                cases.append(Case(name, op, [random(*shape)], attrs))
    for rank, extents, windows in (
        (1, (5,), (7,)),
        (1, (7,), (3,)),
        (2, (5, 3), (1, 4)),
        (3, (2, 4, 3), (3, 2, 1)),
    ):
        op = f"relax.nn.adaptive_avg_pool{rank}d"
        name = f"{op} {extents} {windows}"
        cases.append(Case(name, op, [random(1, 2, *extents)], {"output_size": windows}))
    check_out_of_bounds(cases, machine=machine)


def test_convolution(machine):
    check_out_of_bounds(
        [
            Case(
                f"conv2d {i}",
                "relax.nn.conv2d",
                [random(1, 2, *size), random(4, 2, *kernel)],
                attrs,
            )
            for i, (size, kernel, attrs) in enumerate(
                [
                    ((5, 6), (3, 2), {"strides": (3, 4), "padding": (0, 1, 3, 2)}),
                    ((2, 2), (5, 5), {"padding": (2, 2, 2, 2)}),
                    ((9, 9), (3, 3), {"dilation": (3, 4), "strides": 2}),
                    ((4, 4), (1, 1), {"strides": 7, "padding": 5}),
                ]
            )
        ]
        + [
            Case(
                f"conv{rank}d{suffix} {i}",
                f"relax.nn.conv{rank}d{suffix}",
                [random(1, 2, *(5, 4, 3)[:rank]), random(2, 2, *(3, 2, 1)[:rank])],
                attrs,
            )
            for rank in (1, 3)
            for suffix in ("", "_transpose")
            for i, attrs in enumerate(
                [
                    {"strides": (3, 1, 2)[:rank], "padding": (0, 1, 2, 1, 0, 1)[: 2 * rank]},
                    {"strides": 2, "dilation": 2, "padding": (1, 2, 1)[:rank]},
                ]
            )
        ],
        machine=machine,
    )


def test_slicing(machine):
    limits = [-(10**6), -6, -1, 0, 3, 5, 10**6]
    cases = [
        Case(
            f"{begin}:{end}:{stride}",
            "relax.strided_slice",
            [random(5, 3), [0], [begin], [end], [stride]],
        )
        for begin, end, stride in itertools.product(limits, limits, (1, -2, 7))
        # TVM infers a negative extent for an end before the begin.
        if len(range(5)[begin:end:stride])
    ]
    check_out_of_bounds(cases[::3], machine=machine)


WILD = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9, 1e4, -1e4, 1.0, -1.0, 0.3]


@pytest.mark.parametrize(
    "method", ["nearest", "bilinear", pytest.param("bicubic", marks=pytest.mark.slow)]
)
def test_grid_sample(method, machine):
    cases = []
    grid = np.array(list(itertools.product(WILD, WILD)), "float64").T.reshape(1, 2, 12, 12)
    for padding_mode, align_corners, shape in (
        ("zeros", False, (1, 2, 3, 4)),
        ("border", True, (1, 1, 3, 4)),
        ("reflection", False, (1, 1, 3, 4)),
        ("reflection", True, (1, 1, 1, 5)),
    ):
        attrs = {"method": method, "padding_mode": padding_mode, "align_corners": align_corners}
        inputs = [random(*shape).astype("float32"), grid.astype("float32")]
        name = f"{padding_mode} {align_corners}"
        cases.append(Case(name, "relax.image.grid_sample", inputs, attrs))
    check_out_of_bounds(cases, machine=machine)


@REGIONS
@pytest.mark.parametrize("op", [pytest.param("roi_align", marks=pytest.mark.slow), "roi_pool"])
def test_regions(op, machine):
    # Finite corners in and beyond the data, for batch indices in and beyond the batch.
    far = [[batch, -50, 3, 90, 4] for batch in (0, 1, 2, -1, 1e9, -1e9, np.nan, np.inf)]
    wild = [[1, *corners] for corners in itertools.product([np.nan, np.inf, -1e30, 2.0], repeat=4)]
    rois = np.array([*far, *wild], "float32")
    attrs = {"pooled_size": 2, "spatial_scale": 1.0}
    settings = [attrs]
    if op == "roi_align":
        settings = [
            {**attrs, "mode": mode, "sample_ratio": ratio, "aligned": ratio == 2}
            for mode, ratio in (("avg", -1), ("max", -1), ("avg", 2))
        ]
    check_out_of_bounds(
        [
            Case(
                f"{i}",
                f"relax.vision.{op}",
                [random(2, 2, 3, 4).astype("float32"), rois],
                attributes,
            )
            for i, attributes in enumerate(settings)
        ],
        machine=machine,
        time_limit=5,  # a region of 3e9 samples uses all of it: guard.ENDLESS
    )


def test_resize(machine):
    check_out_of_bounds(
        [
            Case(
                f"{method} {mode}",
                "relax.image.resize2d",
                [random(1, 1, 3, 7).astype("float32")],
                {
                    "size": size,
                    "roi": roi,
                    "method": method,
                    "coordinate_transformation_mode": mode,
                },
            )
            for method in ("nearest_neighbor", "linear", "cubic")
            for mode, roi, size in (
                ("half_pixel", None, (1, 20)),
                ("align_corners", None, (11, 1)),
                ("tf_crop_and_resize", (-5.0, 7.0, 1e6, -1e6), (11, 20)),
            )
        ],
        machine=machine,
    )


def test_normalisation_and_softmax(machine):
    x, channels = random(2, 4, 3), [random(4), random(4)]
    grouped = {"channel_axis": 1, "axes": [2]}
    check_out_of_bounds(
        [
            Case("batch_norm", "relax.nn.batch_norm", [x, *channels, *channels], {"axis": 1}),
            Case("layer_norm", "relax.nn.layer_norm", [x, *random(2, 3, 2)], {"axes": [2, 0]}),
            Case("rms_norm", "relax.nn.rms_norm", [x, random(4, 3)], {"axes": [1, 2]}),
            Case("instance_norm", "relax.nn.instance_norm", [x, *channels], grouped),
            Case("group_norm", "relax.nn.group_norm", [x, *channels], {"num_groups": 2, **grouped}),
            Case("softmax", "relax.nn.softmax", [x], {"axis": 1}),
            Case("log_softmax", "relax.nn.log_softmax", [x], {"axis": -1}),
        ],
        machine=machine,
    )
