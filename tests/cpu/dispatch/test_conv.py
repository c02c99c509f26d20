"""Which convolutions become kernels, and that the kernels compute the numbers of the replaced
calls."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST, check_dispatch, flat, kernels_in
from machines import of_halves
from programs import build, tensor, to_numpy
from tvm import relax, tirx
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.transform import DispatchKernels

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")

CASES = {
    "plain": ({"padding": 1}, (8, 9, 9), (12, 8, 3, 3), (12, 9, 9)),
    "strided": ({"strides": (2, 1), "padding": (0, 1, 2, 1)}, (8, 9, 8), (12, 8, 2, 3), (12, 5, 8)),
    "product": ({}, (8, 23, 23), (12, 8, 1, 1), (12, 23, 23)),
    "small product": ({}, (8, 13, 13), (12, 8, 1, 1), (12, 13, 13)),
    "grouped": ({"groups": 2, "dilation": 2}, (8, 9, 9), (12, 4, 3, 3), (12, 5, 5)),
    "few channels": (
        {"groups": 4, "padding": 1},
        (8, 9, 40),
        (8, 2, 3, 3),
        (8, 9, 40),
    ),
    "volumes": (
        {"strides": (1, 2, 1), "padding": (1, 0, 1, 1, 2, 1)},
        (4, 5, 9, 8),
        (6, 4, 3, 3, 3),
        (6, 5, 5, 8),
    ),
    "rows of volumes": ({"padding": (1, 0, 0)}, (4, 5, 9, 8), (6, 4, 3, 1, 1), (6, 5, 9, 8)),
    "product of volumes": ({}, (8, 8, 9, 9), (12, 8, 1, 1, 1), (12, 8, 9, 9)),
    "one axis": ({"strides": 2, "padding": (1, 3)}, (6, 20), (10, 6, 5), (10, 10)),
}


def of_two(shapes, body):
    """Return the module of a function of two tensors."""
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
    return build(params, lambda _, *arguments: body(*arguments))


def values(*shapes):
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("batch", [3, N], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_replace_convolutions(case, batch):
    attrs, data, weight, out = CASES[case]
    rank = len(data) - 1
    forward = getattr(relax.op.nn, f"conv{rank}d")
    backward = getattr(relax.op.grad, f"conv{rank}d_backward_data")
    module = of_two([(batch, *data), weight], lambda x, w: forward(x, w, **attrs))
    check_dispatch(module, "main", values((3, *data), weight), [f"nn_conv{rank}d_kernel"], 1e-4)
    module = of_two([(batch, *out), weight], lambda dy, w: backward(dy, (batch, *data), w, **attrs))
    kernel = f"grad_conv{rank}d_backward_data_kernel"
    check_dispatch(module, "main", values((3, *out), weight), [kernel], 1e-4)


@pytest.mark.parametrize("batch", [3, N], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_replace_transposed_convolutions(case, batch):
    attrs, result, weight, data = CASES[case]
    rank = len(result) - 1
    transposed = getattr(relax.op.nn, f"conv{rank}d_transpose")
    arguments = [(batch, *data), weight]
    least = of_two(arguments, lambda x, w: transposed(x, w, **attrs))["main"].ret_ty.shape.values
    added = [size - int(other) for size, other in zip(result[1:], least[2:], strict=True)]
    module = of_two(arguments, lambda x, w: transposed(x, w, output_padding=added, **attrs))
    kernel = f"nn_conv{rank}d_transpose_kernel"
    check_dispatch(module, "main", values((3, *data), weight), [kernel], 1e-4)


@pytest.mark.parametrize(
    ("mcpu", "sides"),
    [("emeraldrapids", (8, 10, 12, 13)), ("znver4", (12, 13)), ("haswell", (12, 13))],
)
def test_which_images_are_factors_of_products(mcpu, sides):
    """Those of many pixels, most of which fill vectors; the fewer ones if the images are in float32
    and their number is known."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})

    def is_product(side: int, batch=8, dtype="float32", stride=1) -> bool:
        params = [tensor("x", (batch, 8, side, side), dtype), tensor("w", (12, 8, 1, 1), dtype)]
        module = build(params, lambda _, x, w: relax.op.nn.conv2d(x, w, strides=stride))
        functions = dict(DispatchKernels(target)(module).functions_items()).values()
        (kernel,) = (f for f in functions if isinstance(f, tirx.PrimFunc))
        return '"matmul"' in kernel.script()

    assert tuple(side for side in (7, 8, 9, 10, 12, 13) if is_product(side)) == sides
    assert [is_product(side, N) for side in (22, 23)] == [False, True]
    assert [is_product(side, dtype="float16") for side in (22, 23)] == [False, True]
    assert not is_product(23, stride=2)


def test_depthwise_volumes_are_left():
    module = of_two(
        [(2, 8, 5, 6, 7), (8, 1, 3, 3, 3)], lambda x, w: relax.op.nn.conv3d(x, w, groups=8)
    )
    assert kernels_in(module) == []


@pytest.mark.parametrize("channels", [15, 16])
def test_volumes_of_bfloat16_are_in_tiles(channels):
    """With at least 16 channels, where Winograd's filtering computes those of float32 (AMX). Weight
    gradients widen their elements."""

    def body(bb, data, weight):
        y = bb.emit(relax.op.nn.conv3d(data, weight, padding=1))
        return relax.op.sum(bb.emit(relax.op.astype(y, "float32")))

    shapes = (2, channels, 4, 9, 8), (channels, channels, 3, 3, 3)
    params = [tensor(name, shape, "bfloat16") for name, shape in zip("xw", shapes, strict=True)]
    module = DispatchKernels(of_halves("amx"))(relax_grad.value_and_grad(build(params, body)))
    found = {
        variable.name_hint.rstrip("0123456789"): "relax_grad_tiles_add" in str(function)
        for variable, function in module.functions_items()
        if "conv3d" in variable.name_hint
    }
    assert found == {
        "nn_conv3d_kernel": channels >= 16,
        "grad_conv3d_backward_data_kernel": channels >= 16,
        "grad_conv3d_backward_weight_kernel": False,
    }


@pytest.mark.parametrize(
    ("data", "attrs"),
    [
        ((2, 9, 9, 8), {"data_layout": "NHWC", "out_layout": "NCHW"}),
        ((2, 8, N, 9), {}),
        ((2, 8, 2, 9), {}),
    ],
    ids=["layout", "symbolic height", "no window"],
)
def test_mixed_layouts_symbolic_heights_and_empty_results_have_no_kernel(data, attrs):
    module = of_two([data, (12, 8, 3, 3)], lambda x, w: relax.op.nn.conv2d(x, w, **attrs))
    assert kernels_in(module) == []


def of_squares(tile):
    """Return the module of a convolution and its gradients, without and with kernels of a Winograd
    tile size."""
    x, w = (2, 32, 7, 6), (32, 32, 3, 3)

    def body(bb, data, weight):
        y = bb.emit(relax.op.nn.conv2d(data, weight, padding=1))
        return relax.op.sum(bb.emit(relax.op.multiply(y, y)))

    params = [tensor("x", x, "float32"), tensor("w", w, "float32")]
    module = relax_grad.value_and_grad(build(params, body))
    del module["main"]
    return module, DispatchKernels(HOST, winograd_tile=tile)(module)


def test_winograd_tiles_have_kernels_of_their_own():
    """Each tile size has kernels of its own, None equals 0, and the error stays within the bound of
    the size."""
    kernels = {}
    for tile in (0, 2, 4, None):
        module, kernels[tile] = of_squares(tile)
    assert not any(structural_equal(kernels[a], kernels[b]) for a, b in [(0, 2), (2, 4), (0, 4)])
    assert structural_equal(kernels[0], kernels[None])
    inputs = [tvm.runtime.tensor(array) for array in values((2, 32, 7, 6), (32, 32, 3, 3))]
    results = {}
    for tile in (0, 2, 4):
        pipeline = relax_grad.pipeline(HOST, winograd_tile=tile)
        executable = tvm.compile(module, HOST, relax_pipeline=pipeline)
        machine = relax.VirtualMachine(executable, tvm.cpu())
        results[tile] = flat(to_numpy(machine["main_adjoint"](*inputs)))
    for tile, tolerance in [(2, 1e-5), (4, 1e-4)]:
        for direct, other in zip(results[0], results[tile], strict=True):
            assert np.abs(other - direct).max() < tolerance * np.abs(direct).max()


@pytest.mark.parametrize("tile", [1, 3, -2, "4"])
def test_unknown_winograd_tiles_are_refused(tile):
    for make in (DispatchKernels, relax_grad.pipeline):
        with pytest.raises(ValueError, match="winograd_tile must be one of 2, 4"):
            make(HOST, winograd_tile=tile)
