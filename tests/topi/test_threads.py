"""Kernels written as statements for the threads of a GPU, run on a CPU one thread after the
other."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from kernels import int64, run
from threads import GPU, in_threads, stores_outside_threads, threads_of
from tvm import relax, te, tirx
from tvm.s_tir import dlight
from versions import REGIONS

from relax_grad.ir.compat import Analyzer
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve, select_wrt
from relax_grad.testing.samples import samples
from relax_grad.topi import _loops, index, index_nd, index_write, scan
from relax_grad.topi.grid_sample import grid_sample_backward_data
from relax_grad.topi.loss import nll_loss_backward_weights
from relax_grad.topi.roi_align import roi_align_backward_data
from relax_grad.topi.roi_pool import roi_pool_backward_data

rng = np.random.default_rng(0)
#: Repeated, negative and out-of-bounds indices.
INDICES = np.array([[2, 0, 2, -8, 1], [-1, 5, -4, 2, 0]])
POINTS = np.stack([INDICES, INDICES[::-1]], -1)
ROIS = np.array([[0, 0.3, 1.2, 5.1, 6.7], [1, 2, -1, 4, 3], [0, 1, 1, 9, 9], [7, 0, 0, 3, 3]])
ROIS = ROIS.astype("float32")
HALF = "float16"
ALIGN = {"pooled_size": (2, 2), "spatial_scale": 1.0, "sample_ratio": 0, "aligned": False}
SAMPLE = {"method": "bilinear", "padding_mode": "zeros", "align_corners": True}


def normal(*shape, dtype="float64"):
    return rng.normal(size=shape).astype(dtype)


#: Each case: the expression and its inputs; the first input has the shape and dtype of the result.
#: In float16 a second kernel follows, so that the first one writes to memory that the function
#: allocates.
CASES = {
    "take_backward": (
        lambda x, dy, i: index.take_backward(dy, i, x.shape, 1, "fast"),
        [normal(2, 30, 5), normal(2, 2, 5, 5), INDICES],
    ),
    "take_backward of a vector, in float16": (
        lambda x, dy, i: index.take_backward(dy, i, x.shape, 0, "wrap"),
        [normal(40, dtype=HALF), normal(2, 5, dtype=HALF), INDICES.astype("uint8")],
    ),
    "take_backward of nothing": (
        lambda x, dy, i: index.take_backward(dy, i, x.shape, 0, "fast"),
        [normal(3, 4), normal(0, 4), INDICES[0, :0]],
    ),
    "gather_elements_backward_data": (
        lambda x, dy, i: index.gather_elements_backward_data(dy, i, x.shape, -1),
        [normal(2, 37), normal(2, 5), INDICES],
    ),
    "gather_nd_backward_data": (
        lambda x, dy, i: index_nd.gather_nd_backward_data(dy, i, x.shape, 1),
        [normal(2, 5, 6, 3, dtype=HALF), normal(2, 5, 3, dtype=HALF), POINTS],
    ),
    "index_tensor_backward_data": (
        lambda x, dy, i, j: index_nd.index_tensor_backward_data(dy, [i, j], x.shape),
        [normal(5, 8), normal(2, 5), INDICES, INDICES[0]],
    ),
    "scatter_elements": (
        lambda x, i, u: index_write.scatter_elements(x, i, u, 0, "mean"),
        [normal(40, 5), INDICES, normal(2, 5)],
    ),
    "scatter_nd": (
        lambda x, i, u: index_write.scatter_nd(x, i, u, "update"),
        [normal(5, 7, 2), POINTS, normal(2, 5, 2)],
    ),
    "index_put": (
        lambda x, i, j, u: index_write.index_put(x, [i, j], u, False),
        [normal(5, 8), INDICES, INDICES[0], normal(5)],
    ),
    "scatter_elements_backward_updates": (
        lambda u, dy, i: index_write.scatter_elements_backward_updates(dy, i, 1, "mean"),
        [normal(2, 5), normal(2, 20), INDICES],
    ),
    "scatter_nd_backward_updates": (
        lambda u, dy, i: index_write.scatter_nd_backward_updates(dy, i),
        [normal(2, 5, 3), normal(6, 7, 3), POINTS],
    ),
    "scatter_elements_scan": (
        lambda a, s, i, b: index_write.scatter_elements_scan(s, i, a, b, 0, True),
        [normal(2, 5), normal(9, 5), INDICES, normal(2, 5)],
    ),
    "linear_scan": (
        lambda a, b: scan.linear_scan(a, b, 1, False),
        [normal(3, 5, 70), normal(3, 5, 70)],
    ),
    "cumsum_backward_data": (
        lambda dy: scan.cumsum_backward_data(dy, dy.shape, 0, True),
        [normal(300)],
    ),
    "nll_loss_backward_weights": (
        lambda w, x, t, dy: nll_loss_backward_weights(dy, x, t, w, "none", 2),
        [normal(33), normal(4, 33, 3), rng.integers(-1, 33, (4, 3)), normal(4, 3)],
    ),
    "grid_sample_backward_data": (
        lambda x, dy, g: grid_sample_backward_data(dy, g, [], x.shape, **SAMPLE),
        [
            normal(2, 3, 20, 6, dtype=HALF),
            normal(2, 3, 4, 5, dtype=HALF),
            rng.uniform(-1.2, 1.2, (2, 2, 4, 5)).astype("float32"),
        ],
    ),
    "roi_align_backward_data": (
        lambda x, dy, r: roi_align_backward_data(dy, x, r, layout="NCHW", mode="avg", **ALIGN),
        [normal(2, 3, 20, 6, dtype=HALF), normal(4, 3, 2, 2, dtype=HALF), ROIS],
    ),
    "roi_align_backward_data of the largest": (
        lambda x, dy, r: roi_align_backward_data(dy, x, r, layout="NHWC", mode="max", **ALIGN),
        [normal(2, 20, 6, 3), normal(4, 2, 2, 3), ROIS],
    ),
    "roi_pool_backward_data": (
        lambda x, dy, r: roi_pool_backward_data(
            dy, x, r, layout="NCHW", pooled_size=(2, 2), spatial_scale=0.9
        ),
        [normal(2, 3, 20, 6, dtype=HALF), normal(4, 3, 2, 2, dtype=HALF), ROIS],
    ),
}


#: The cases whose kernels differ most for symbolic extents.
SYMBOLIC = [
    "take_backward of a vector, in float16",
    "take_backward of nothing",
    "gather_elements_backward_data",
    "index_put",
    "linear_scan",
    "nll_loss_backward_weights",
]


@pytest.mark.parametrize(
    ("name", "symbolic"), [*((name, False) for name in CASES), *((name, True) for name in SYMBOLIC)]
)
def test_threads_agree_with_a_cpu(name, symbolic, monkeypatch):
    """The result is the same in any order and with any number of elements per thread: no thread
    reads another's."""
    expression, inputs = CASES[name]
    expected = run(expression, inputs, inputs[0].shape, inputs[0].dtype.name, symbolic)
    for backwards, enough in ((True, 4**8), (False, 64))[: 1 if symbolic else 2]:
        monkeypatch.setattr(_loops, "_ENOUGH", enough)
        with in_threads(backwards):
            result = run(expression, inputs, inputs[0].shape, inputs[0].dtype.name, symbolic)
        np.testing.assert_array_equal(result, expected)


@pytest.fixture
def without_nvcc():
    """Let TVM generate CUDA source without compiling it."""
    name = "tvm_callback_cuda_compile"
    own = tvm.get_global_func(name)
    tvm.register_global_func(name, lambda code, *_: code, override=True)
    yield
    tvm.register_global_func(name, own, override=True)


@pytest.mark.parametrize(
    "name",
    [
        "take_backward",
        "scatter_elements",
        "scatter_nd_backward_updates",
        "scatter_elements_scan",
        "linear_scan",
        "grid_sample_backward_data",
    ],
)
def test_cuda(name, without_nvcc):
    """The buffers that a kernel works in are allocated outside of it where necessary."""
    expression, inputs = CASES[name]
    target = tvm.target.Target(GPU)
    with target:
        tensors = [te.placeholder(x.shape, x.dtype.name) for x in inputs]
        function = te.create_prim_func([*tensors, expression(*tensors)])
        module = tvm.IRModule({"main": function.with_attr("target", target)})
        module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(module)
    tvm.compile(module, target=target)


def kernels(expression, *types):
    """Return the number of threads of each kernel of an expression of tensors of these shapes and
    dtypes."""
    with tvm.target.Target(GPU):
        tensors = [te.placeholder(shape, dtype) for shape, dtype in types]
        function = te.create_prim_func([*tensors, expression(*tensors)])
    return [blocks * threads for blocks, threads in threads_of(function)]


@pytest.mark.parametrize(
    ("expression", "types"),
    [
        (
            lambda dy, i: index.take_backward(dy, i, (50257, 768), 0, "fast"),
            [((8192, 768), "float32"), ((8192,), "int64")],
        ),
        (
            lambda dy, i: index.gather_elements_backward_data(dy, i, (10**6,), 0),
            [((10**5,), "float32"), ((10**5,), "int64")],
        ),
        (
            lambda dy, i: index_nd.gather_nd_backward_data(dy, i, (512, 512), 0),
            [((10**5,), "float32"), ((10**5, 2), "int64")],
        ),
        (
            lambda dy, i: index_write.scatter_nd_backward_updates(dy, i),
            [((10**6,), "float32"), ((10**5, 1), "int64")],
        ),
        (
            lambda a: scan.linear_scan(a, None, 1, False),
            [((128, 100, 256), "float32")],
        ),
    ],
    ids=["embedding", "vector", "matrix", "updates", "scan"],
)
def test_large_kernels_have_many_threads(expression, types):
    # The last kernel does the work; an earlier one may initialize its state.
    *_, count = kernels(expression, *types)
    assert 2**14 <= int(count) <= 2**17


def value_of(expression, n, value):
    """Return the value of an expression for a value of its variable."""
    function = tirx.PrimFunc([n], tirx.Evaluate(expression)).specialize({n: int64(value)})
    return int(Analyzer().simplify(function.body.value))


@pytest.mark.parametrize(("before", "shares"), [(1, 4**6), (2**8, 4**4), (2**12, 4**2), (2**20, 1)])
def test_symbolic_extents_choose_their_threads(before, shares):
    """A symbolic extent gives an expression, in factors of 16; a static extent gives a number, in
    factors of 4."""
    n = tirx.Var("n", "int64")
    with tvm.target.Target(GPU):
        symbolic = _loops.Chunks((), [int64(10**6)], [n])._shares
        static = _loops.Chunks((), [int64(10**6)], [int64(before)])._shares
    assert value_of(symbolic, n, before) == shares
    assert shares <= int(static) <= 16 * shares


def test_threads_follow_the_shape():
    n = tirx.Var("n", "int64")
    with tvm.target.Target(GPU):
        x = te.placeholder((n, int64(3), int64(100)), "float32")
        function = te.create_prim_func([x, scan.linear_scan(x, None, 1, False)])
    ((blocks, threads),) = threads_of(function)
    assert value_of(blocks, n, 1000) * int(threads) == 391 * 256
    assert value_of(blocks, n, 0) == 1  # an empty grid cannot be launched


@pytest.mark.parametrize(
    "op",
    [
        "take",
        "gather_elements",
        "gather_nd",
        "index_tensor",
        "scatter_elements",
        "scatter_nd",
        "index_put",
        "cumsum",
        "cumprod",
        "grad.nll_loss_backward_weights",
        "image.grid_sample",
        pytest.param("vision.roi_align", marks=REGIONS),
        pytest.param("vision.roi_pool", marks=REGIONS),
    ],
)
def test_default_schedule_leaves_nothing_to_the_host(op):
    """TVM's GPU rules keep such kernels unchanged, and bind the rest of the function to threads."""
    sample = samples(f"relax.{op}")[0]
    name, function = resolve(sample.function or sample.op)
    arguments = _program.make_arguments(sample.inputs, "float32", {})
    program = _program.first_order(function, arguments, sample.attrs, rng)
    module = _program.differentiate(program, select_wrt(program.arguments, sample.wrt))
    with tvm.target.Target(GPU):
        module = relax.transform.LegalizeOps()(module)
        functions = {
            name: function
            for name, function in module.functions_items()
            if isinstance(function, tirx.PrimFunc) and threads_of(function)
        }
        module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(tvm.IRModule(functions))
    assert functions
    for name in functions:
        assert not stores_outside_threads(module[name]), name
