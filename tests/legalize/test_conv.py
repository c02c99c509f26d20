"""Legalization of the backward operators of convolution, and of the convolutions in every
layout."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tvm
from programs import run
from tvm import relax, tirx
from tvm.relax.op import grad as backward

NHWC = {"data_layout": "NHWC", "kernel_layout": "HWIO"}


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def module(build, *params):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(bb.emit(build(*params)))
        bb.emit_func_output(result)
    return bb.get()


def transpose(array, plain, layout):
    return np.ascontiguousarray(array.transpose([plain.index(name) for name in layout]))


@pytest.mark.parametrize("batch", [2, None], ids=["static", "symbolic"])
def test_one_function_named_after_the_operator(batch):
    n = tirx.Var("n", "int64") if batch is None else batch
    grad, data = tensor("dy", n, 6, 6, 4), tensor("x", n, 8, 8, 3)
    weight = tensor("w", 3, 3, 3, 4)
    for build, name in (
        (lambda g, x, w: backward.conv2d_backward_data(g, x.ty.shape, w, **NHWC), "data"),
        (lambda g, x, w: backward.conv2d_backward_weight(g, x, w.ty.shape, **NHWC), "weight"),
    ):
        before = module(build, grad, data, weight)
        after = relax.transform.LegalizeOps()(before)
        tvm.ir.assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty, True)
        assert f"conv2d_backward_{name}" in [gv.name_hint for gv in after.get_global_vars()]
        assert "R.grad." not in after["main"].script()


def reference(data, weight, strides, padding, dilation, groups):
    """Compute conv2d in NCHW and OIHW, window by window."""
    top, left, bottom, right = padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    batch, _, height, width = padded.shape
    channels, in_group, rows, columns = weight.shape
    reach = [(k - 1) * d + 1 for k, d in zip((rows, columns), dilation, strict=True)]
    out = [(e - r) // s + 1 for e, r, s in zip((height, width), reach, strides, strict=True)]
    result = np.zeros((batch, channels, *out))
    for o in range(channels):
        first = o // (channels // groups) * in_group
        for y, x in np.ndindex(*out):
            top, left = y * strides[0], x * strides[1]
            window = padded[
                :,
                first : first + in_group,
                top : top + reach[0] : dilation[0],
                left : left + reach[1] : dilation[1],
            ]
            result[:, o, y, x] = (window * weight[o]).sum((1, 2, 3))
    return result


@pytest.mark.parametrize(
    ("data_layout", "kernel_layout", "out_layout"),
    [
        ("NCHW", "OIHW", None),
        ("NHWC", "HWIO", None),
        ("CNHW", "IHWO", None),
        ("NCWH", "OIHW", None),
        ("NCHW", "OIWH", None),
        ("WNHC", "WIOH", None),
        ("NCHW", "OIHW", "NHWC"),
        ("WCHN", "HIOW", "CHNW"),
    ],
)
def test_conv2d_takes_axes_by_name(data_layout, kernel_layout, out_layout):
    """Strides and kernel axes belong to H and W at any position, as in type inference."""
    attrs = {"strides": (2, 1), "padding": (1, 0, 2, 1), "dilation": (1, 2), "groups": 2}
    rng = np.random.default_rng(0)
    data, weight = rng.normal(size=(2, 4, 6, 7)), rng.normal(size=(4, 2, 3, 2))
    inputs = transpose(data, "NCHW", data_layout), transpose(weight, "OIHW", kernel_layout)
    mod = module(
        lambda x, w: relax.op.nn.conv2d(
            x,
            w,
            **attrs,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_layout=out_layout,
        ),
        tensor("x", *inputs[0].shape, dtype="float64"),
        tensor("w", *inputs[1].shape, dtype="float64"),
    )
    expected = transpose(reference(data, weight, **attrs), "NCHW", out_layout or data_layout)
    np.testing.assert_allclose(run(mod, "main", *inputs), expected, 1e-12, 1e-12)


def pads(padding):
    """Return the padding in PyTorch's order: before and after each axis, the last axis first."""
    rank = len(padding) // 2
    return [padding[axis + end] for axis in reversed(range(rank)) for end in (0, rank)]


@pytest.mark.parametrize(
    ("data_layout", "kernel_layout", "out_layout"),
    [
        ("NCW", "OIW", "WNC"),
        ("NWC", "WIO", None),
        ("NDHWC", "DHWIO", "NCDHW"),
        ("NCHDW", "OIDHW", None),
        ("NWHDC", "OIHWD", None),
        ("WCHND", "DIWHO", "HNWDC"),
    ],
)
def test_conv_of_other_ranks_takes_axes_by_name(torch, data_layout, kernel_layout, out_layout):
    rank = len(data_layout) - 2
    spatial = "DHW"[-rank:]
    attrs = {"strides": (2, 1, 3)[:rank], "dilation": (1, 2, 1)[:rank], "groups": 2}
    padding = (1, 0, 2, 0, 1, 0)[: 2 * rank]
    rng = np.random.default_rng(0)
    data = rng.normal(size=(2, 4, *(4, 5, 6)[:rank]))
    weight = rng.normal(size=(6, 2, *(2, 1, 3)[:rank]))
    padded = torch.nn.functional.pad(torch.from_numpy(data), pads(padding))
    conv = getattr(torch.nn.functional, f"conv{rank}d")
    expected = conv(
        padded,
        torch.from_numpy(weight),
        None,
        attrs["strides"],
        0,
        attrs["dilation"],
        attrs["groups"],
    )
    inputs = (
        transpose(data, f"NC{spatial}", data_layout),
        transpose(weight, f"OI{spatial}", kernel_layout),
    )
    mod = module(
        lambda x, w: getattr(relax.op.nn, f"conv{rank}d")(
            x,
            w,
            **attrs,
            padding=padding,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_layout=out_layout,
        ),
        tensor("x", *inputs[0].shape, dtype="float64"),
        tensor("w", *inputs[1].shape, dtype="float64"),
    )
    expected = transpose(expected.numpy(), f"NC{spatial}", out_layout or data_layout)
    np.testing.assert_allclose(run(mod, "main", *inputs), expected, 1e-12, 1e-12)


@pytest.mark.parametrize(
    ("data_layout", "kernel_layout", "out_layout"),
    [
        ("NWC", "WOI", None),
        ("NCW", "IOW", "WNC"),
        ("NHWC", "HWOI", None),
        ("CNWH", "OHIW", "WHCN"),
        ("NDHWC", "DHWOI", "NCDHW"),
        ("WCHND", "DIWHO", None),
    ],
)
def test_transposes_in_every_layout(torch, data_layout, kernel_layout, out_layout):
    rank = len(data_layout) - 2
    spatial = "DHW"[-rank:]
    strides, dilation, more = (2, 1, 3)[:rank], (1, 2, 1)[:rank], (1, 0, 2)[:rank]
    padding = (1, 0, 0, 0, 1, 0)[: 2 * rank]
    rng = np.random.default_rng(0)
    data = rng.normal(size=(2, 4, *(3, 2, 2)[:rank]))
    weight = rng.normal(size=(4, 3, *(2, 3, 1)[:rank]))
    conv = getattr(torch.nn.functional, f"conv_transpose{rank}d")
    full = conv(torch.from_numpy(data), torch.from_numpy(weight), None, strides, 0, 0, 2, dilation)
    full = torch.nn.functional.pad(full, pads((0,) * rank + more))
    expected = torch.nn.functional.pad(full, [-size for size in pads(padding)]).numpy()
    inputs = (
        transpose(data, f"NC{spatial}", data_layout),
        transpose(weight, f"IO{spatial}", kernel_layout),
    )
    mod = module(
        lambda x, w: getattr(relax.op.nn, f"conv{rank}d_transpose")(
            x,
            w,
            strides=strides,
            padding=padding,
            dilation=dilation,
            output_padding=more,
            groups=2,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            out_layout=out_layout,
        ),
        tensor("x", *inputs[0].shape, dtype="float64"),
        tensor("w", *inputs[1].shape, dtype="float64"),
    )
    expected = transpose(expected, f"NC{spatial}", out_layout or data_layout)
    np.testing.assert_allclose(run(mod, "main", *inputs), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("layouts", [{}, NHWC], ids=["NCHW", "NHWC"])
def test_conv2d_is_left_to_tvm_where_tvm_is_right(layouts):
    """Legalization adds no transposition, and the function is TVM's own."""
    shapes = ((2, 8, 8, 3), (3, 3, 3, 4)) if layouts else ((2, 3, 8, 8), (4, 3, 3, 3))
    before = module(
        lambda x, w: relax.op.nn.conv2d(x, w, **layouts, out_dtype="float64"),
        tensor("x", *shapes[0]),
        tensor("w", *shapes[1]),
    )
    after = relax.transform.LegalizeOps()(before)
    assert [gv.name_hint for gv in after.get_global_vars() if gv.name_hint != "main"] == ["conv2d"]
    assert len(after["main"].body.blocks[0].bindings) == len(before["main"].body.blocks[0].bindings)


@pytest.mark.parametrize("packed", ["data", "kernel", "out", "all"])
@pytest.mark.parametrize("suffix", ["", "_transpose"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_packed_convolution_stays_as_it_is(rank, suffix, packed):
    """TVM infers its type but does not legalize it, so there is nothing to differentiate."""
    spatial, kernel = "DHW"[-rank:], "IO" if suffix else "OI"
    layouts = {
        "data_layout": f"NC{spatial}4c" if packed in ("data", "all") else f"NC{spatial}",
        "kernel_layout": f"{kernel}{spatial}{'4i4o' if packed in ('kernel', 'all') else ''}",
        "out_layout": f"NC{spatial}4c" if packed in ("out", "all") else f"NC{spatial}",
    }
    data = (1, 1, *(8,) * rank, 4) if packed in ("data", "all") else (1, 4, *(8,) * rank)
    weight = (1, 1, *(3,) * rank, 4, 4) if packed in ("kernel", "all") else (4, 4, *(3,) * rank)
    before = module(
        lambda x, w: getattr(relax.op.nn, f"conv{rank}d{suffix}")(x, w, **layouts),
        tensor("x", *data),
        tensor("w", *weight),
    )
    tvm.ir.assert_structural_equal(relax.transform.LegalizeOps()(before), before)


def test_out_dtype():
    """Each result has the dtype of its inferred type, whatever the dtypes of the arguments."""
    grad, data, weight = (
        tensor("dy", 1, 2, 3, 3, dtype="float16"),
        tensor("x", 1, 2, 4, 4, dtype="float16"),
        tensor("w", 2, 2, 2, 2, dtype="float16"),
    )
    ones = [np.ones([int(d) for d in v.ty.shape.values], "float16") for v in (grad, data, weight)]
    for dtype in ("float16", "float32", "float64"):
        mod = module(
            lambda g, x, w, t=dtype: backward.conv2d_backward_data(g, x.ty.shape, w, out_dtype=t),
            grad,
            data,
            weight,
        )
        result = run(mod, "main", *ones)
        assert result.dtype == dtype
        assert result.max() == 8
        mod = module(
            lambda g, x, w, t=dtype: backward.conv2d_backward_weight(g, x, w.ty.shape, out_dtype=t),
            grad,
            data,
            weight,
        )
        result = run(mod, "main", *ones)
        assert result.dtype == dtype
        assert result.max() == 9


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="TVM compiles for CUDA with nvcc")
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("strides", [1, 2])
def test_gradients_compile_for_cuda(strides, groups):
    """The gradients go through TVM's default pipeline for GPUs. No GPU is needed."""
    data = relax.Var("data", relax.TensorType((1, 4, 6, 6), "float32"))
    weight = relax.Var("weight", relax.TensorType((4, 4 // groups, 3, 3), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [data, weight]):
        with bb.dataflow():
            result = bb.emit(relax.op.nn.conv2d(data, weight, strides=strides, groups=groups))
            loss = bb.emit_output(relax.op.sum(result))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    tvm.compile(module, tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm"))
