"""Pooling over regions of interest and its gradients against loops over bins and samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, one_by_one
from tvm import te
from versions import REGIONS

from relax_grad.topi import roi_align as topi_roi_align
from relax_grad.topi import roi_pool as topi_roi_pool


def align_weights(shape, roi, pooled, scale, ratio, aligned):
    """Yield for each bin its samples; a sample is a dict from an element ``(n, y, x)`` to its
    weight."""
    n, height, width = shape
    batch = int(roi[0])
    x1, y1, x2, y2 = roi[1:] * scale
    lengths = [(y2 - y1), (x2 - x1)]
    if not aligned:
        lengths = [max(length, 1.0) for length in lengths]
    bins = [length / count for length, count in zip(lengths, pooled, strict=True)]
    counts = [ratio if ratio > 0 else max(math.ceil(length), 0) for length in bins]

    def taps(at, extent):
        if not -1 <= at <= extent:
            return []
        at = min(max(at, 0), extent - 1)
        first = math.floor(at)
        return [(first, 1 - (at - first)), (first + 1, at - first)]

    for ph, pw in np.ndindex(*pooled):
        samples = []
        for i, j in np.ndindex(*counts):
            y = y1 + ph * bins[0] + (i + 0.5) * bins[0] / counts[0]
            x = x1 + pw * bins[1] + (j + 0.5) * bins[1] / counts[1]
            sample = {}
            for row, wy in taps(y, height):
                for column, wx in taps(x, width):
                    if 0 <= batch < n and row < height and column < width:
                        sample[batch, row, column] = sample.get((batch, row, column), 0) + wy * wx
            samples.append(sample)
        yield (ph, pw), samples


def pool_elements(shape, roi, pooled, scale):
    """Yield the elements of each bin."""
    n, height, width = shape
    batch = int(roi[0])
    x1, y1, x2, y2 = (math.floor(value * scale + 0.5) for value in roi[1:])
    for ph, pw in np.ndindex(*pooled):
        rows, columns = (
            range(
                min(max(math.floor(i * size / count) + first, 0), extent),
                min(max(math.ceil((i + 1) * size / count) + first, 0), extent),
            )
            for i, count, first, size, extent in (
                (ph, pooled[0], y1, max(y2 - y1 + 1, 1), height),
                (pw, pooled[1], x1, max(x2 - x1 + 1, 1), width),
            )
        )
        inside = 0 <= batch < n
        yield (ph, pw), [(batch, y, x) for y in rows for x in columns if inside]


def expected(data, rois, grad, direction, op, mode, pooled, scale, **others):
    """Return the result, the gradient of the data, and the derivative along a direction; NCHW."""
    n, channels, height, width = data.shape
    result = np.zeros((len(rois), channels, *pooled))
    jvp, data_grad = np.zeros_like(result), np.zeros_like(data)

    def value(image, c, sample):
        return sum(weight * image[i, c, y, x] for (i, y, x), weight in sample.items())

    for r, roi in enumerate(rois):
        if op == "roi_pool":
            bins = (
                (at, [{element: 1.0} for element in elements])
                for at, elements in pool_elements((n, height, width), roi, pooled, scale)
            )
        else:
            bins = align_weights((n, height, width), roi, pooled, scale, **others)
        for at, samples in bins:
            for c in range(channels):
                values = [value(data, c, sample) for sample in samples]
                if not values:
                    continue
                taken = [(1 / len(samples), sample) for sample in samples]
                if mode == "max":
                    taken = [(1.0, samples[int(np.argmax(values))])]
                for factor, sample in taken:
                    result[(r, c, *at)] += factor * value(data, c, sample)
                    jvp[(r, c, *at)] += factor * value(direction, c, sample)
                    for (i, y, x), weight in sample.items():
                        data_grad[i, c, y, x] += factor * weight * grad[(r, c, *at)]
    return result, data_grad, jvp


def run(function, inputs, shape, **attrs):
    tensors = [te.placeholder(v.shape, str(v.dtype), f"x{i}") for i, v in enumerate(inputs)]
    kernel = tvm.compile(
        te.create_prim_func([*tensors, function(*tensors, **attrs)]), target=TARGET
    )
    out = tvm.runtime.empty(shape, str(inputs[0].dtype))
    kernel(*(tvm.runtime.tensor(np.ascontiguousarray(v)) for v in inputs), out)
    return out.numpy()


def check(op, mode, pooled, scale, seed, layout="NCHW", **others):
    rng = np.random.default_rng(seed)
    channels = 2
    data, direction = rng.normal(size=(2, 2, channels, *rng.integers(1, 6, 2)))
    corners = rng.uniform(-3, 8, (6, 4))
    if seed % 2:  # no region has its corners exchanged
        corners.sort(axis=1)
    rois = np.concatenate([rng.integers(-1, 3, (6, 1)), corners], 1)
    grad = rng.normal(size=(6, channels, *pooled))
    wanted = expected(data, rois, grad, direction, op, mode, pooled, scale, **others)
    attrs = {"pooled_size": list(pooled), "spatial_scale": scale, "layout": layout}
    if op == "roi_align":
        attrs.update(sample_ratio=others["ratio"], aligned=others["aligned"], mode=mode)

    def laid_out(value):
        return value if layout == "NCHW" else np.moveaxis(value, 1, -1)

    module = topi_roi_align if op == "roi_align" else topi_roi_pool
    functions = {name: getattr(module, op + name) for name in ("", "_backward_data", "_jvp")}
    first = {"": [], "_backward_data": [laid_out(grad)], "_jvp": [laid_out(direction)]}
    for (name, function), result in zip(functions.items(), wanted, strict=True):
        result = laid_out(result)
        inputs = [*first[name], laid_out(data), rois]
        output = run(function, inputs, result.shape, **attrs)
        np.testing.assert_allclose(output, result, rtol=1e-9, atol=1e-9, err_msg=op + name)


ALIGN = {
    "mode": st.sampled_from(["avg", "max"]),
    "pooled": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "scale": st.sampled_from([0.25, 0.7, 1.0, 1.5]),
    "ratio": st.sampled_from([-1, 0, 1, 3]),
    "aligned": st.booleans(),
    "layout": st.sampled_from(["NCHW", "NHWC"]),
    "seed": st.integers(0, 1000),
}
POOL = {"pooled": ALIGN["pooled"], "scale": ALIGN["scale"], "seed": ALIGN["seed"]}


@REGIONS
@settings(max_examples=6, deadline=None, derandomize=True)
@given(**ALIGN)
def test_roi_align(**case):
    check("roi_align", **case)


@REGIONS
@pytest.mark.slow
@one_by_one(30)  # TVM compiles each kernel slowly
@given(**ALIGN)
def test_roi_align_many(**case):
    check("roi_align", **case)


@REGIONS
@settings(max_examples=6, deadline=None, derandomize=True)
@given(**POOL)
def test_roi_pool(**case):
    check("roi_pool", "max", **case)


@REGIONS
@pytest.mark.slow
@one_by_one(200)
@given(**POOL)
def test_roi_pool_many(**case):
    check("roi_pool", "max", **case)


def test_half_precision_is_accumulated_in_float32():
    rois = np.zeros((4100, 5), "float16")
    inputs = [np.ones((4100, 1, 1, 1), "float16"), np.ones((1, 1, 1, 1), "float16"), rois]
    attrs = {"pooled_size": [1, 1], "spatial_scale": 1.0, "layout": "NCHW"}
    output = run(topi_roi_pool.roi_pool_backward_data, inputs, (1, 1, 1, 1), **attrs)
    assert output.item() == 4100
    attrs.update(sample_ratio=1, aligned=False, mode="avg")
    output = run(topi_roi_align.roi_align_backward_data, inputs, (1, 1, 1, 1), **attrs)
    assert output.item() == 4100
