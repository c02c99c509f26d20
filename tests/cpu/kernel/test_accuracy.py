"""Errors against float64, compared with PyTorch's float32 errors (oneDNN and MKL) on the same
numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machines import largest_error
from programs import build, tensor, to_numpy
from sweep import share
from tvm import relax
from tvm.relax import op

from relax_grad.cpu.target import host
from relax_grad.op import norm
from relax_grad.op.activation import log_softmax_backward, softmax_backward

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")
F = torch.nn.functional

#: The largest accepted ratio to PyTorch's error, and an error of a few roundings that is always
#: accepted.
FACTOR, ROUNDINGS = 8.0, 4e-7

#: The factor for Winograd kernels, which transform their operands; oneDNN may not.
WINOGRAD = 16.0

#: The number of draws of random numbers for each case.
DRAWS = 7

IMAGES, WEIGHT = (4, 64, 28, 28), (64, 64, 3, 3)
VOLUMES, CUBES = (2, 32, 8, 28, 28), (32, 32, 3, 3, 3)
_BN = [(64,)] * 4


def gradient_of(function, which):
    """Return a function that runs PyTorch's gradient; its last argument is the gradient of the
    result."""

    def run(*tensors):
        *inputs, dy = tensors
        inputs = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(function(*inputs), inputs[which], dy)[0]

    return run


def conv(x, w):
    function = F.conv2d if x.ndim == 4 else F.conv3d
    return function(x, w, padding=(w.shape[-1] - 1) // 2)


def convolutions(name, data, weight, factor):
    """Return the cases of a convolution by Winograd's filtering, of images or volumes, and of its
    gradients."""
    kind, kwargs = name.split()[0], {"padding": (weight[-1] - 1) // 2}
    forward = getattr(op.nn, kind)
    backward_data, backward_weight = (
        getattr(op.grad, f"{kind}_backward_{operand}") for operand in ("data", "weight")
    )
    return {
        f"{name} (Winograd)": (
            [data, weight],
            lambda x, w: forward(x, w, **kwargs),
            conv,
            factor,
        ),
        f"{name} data gradient (Winograd)": (
            [data, weight, data],
            lambda x, w, dy: backward_data(dy, data, w, **kwargs),
            gradient_of(conv, 0),
            factor,
        ),
        f"{name} weight gradient (Winograd)": (
            [data, weight, data],
            lambda x, w, dy: backward_weight(dy, x, weight, **kwargs),
            gradient_of(conv, 1),
            factor,
        ),
    }


def layer_norm(x, gamma, beta):
    return F.layer_norm(x, x.shape[-1:], gamma, beta)


def statistics(x):
    """Return the mean along the last axis and the reciprocal standard deviation for the backward
    operators."""
    variance = op.add(op.variance(x, [-1], True), relax.const(1e-5, "float32"))
    return op.mean(x, [-1], True), op.rsqrt(variance)


#: Shapes of the arguments, the Relax call, its PyTorch equivalent, and the accepted factor.
CASES = {
    **convolutions("conv2d 3x3", IMAGES, WEIGHT, WINOGRAD),
    **convolutions("conv3d 3x3x3", VOLUMES, CUBES, WINOGRAD),
    **convolutions("conv2d 5x5", IMAGES, (64, 64, 5, 5), FACTOR),
    "conv2d 1x1": ([IMAGES, (64, 64, 1, 1)], lambda x, w: op.nn.conv2d(x, w), conv, FACTOR),
    "matmul": ([(256, 1000), (1000, 256)], op.matmul, torch.matmul, FACTOR),
    "batch_norm": (
        [IMAGES, *_BN],
        lambda *a: relax.TupleGetItem(op.nn.batch_norm(*a, axis=1), 0),
        lambda x, g, b, m, v: F.batch_norm(x, m, v, g, b, True),
        FACTOR,
    ),
    "layer_norm": (
        [(256, 768), (768,), (768,)],
        lambda *a: op.nn.layer_norm(*a, axes=-1),
        layer_norm,
        FACTOR,
    ),
    "layer_norm data gradient": (
        [(256, 768), (768,), (768,), (256, 768)],
        lambda x, g, b, dy: norm.layer_norm_backward_data(dy, x, g, *statistics(x), axes=[-1]),
        gradient_of(layer_norm, 0),
        FACTOR,
    ),
    "softmax": ([(256, 1000)], op.nn.softmax, lambda x: x.softmax(-1), FACTOR),
    "log_softmax": ([(256, 1000)], op.nn.log_softmax, lambda x: x.log_softmax(-1), FACTOR),
    "softmax gradient": (
        [(256, 1000), (256, 1000)],
        lambda x, dy: softmax_backward(dy, op.nn.softmax(x)),
        gradient_of(lambda x: x.softmax(-1), 0),
        FACTOR,
    ),
    "log_softmax gradient": (
        [(256, 1000), (256, 1000)],
        lambda x, dy: log_softmax_backward(dy, op.nn.log_softmax(x)),
        gradient_of(lambda x: x.log_softmax(-1), 0),
        FACTOR,
    ),
    "avg_pool2d gradient": (
        [IMAGES, (4, 64, 14, 14)],
        lambda x, dy: op.grad.avg_pool2d_backward(dy, x, (2, 2), (2, 2)),
        gradient_of(lambda x: F.avg_pool2d(x, 2), 0),
        FACTOR,
    ),
    "sum of all": ([(1000, 1000)], lambda x: op.sum(x), lambda x: x.sum(), FACTOR),
    "sum of columns": ([(5000, 64)], lambda x: op.sum(x, [0]), lambda x: x.sum(0), FACTOR),
    "mean of rows": ([(64, 5000)], lambda x: op.mean(x, [1]), lambda x: x.mean(1), FACTOR),
    "exp": ([(10000,)], op.exp, torch.exp, FACTOR),
    "tanh": ([(10000,)], op.tanh, torch.tanh, FACTOR),
    "sigmoid": ([(10000,)], op.sigmoid, torch.sigmoid, FACTOR),
    "erf": ([(10000,)], op.erf, torch.erf, FACTOR),
    "max_pool2d gradient": (
        [IMAGES, (4, 64, 14, 14)],
        lambda x, dy: op.grad.max_pool2d_backward(dy, x, (2, 2), (2, 2)),
        gradient_of(lambda x: F.max_pool2d(x, 2), 0),
        FACTOR,
    ),
    "rms_norm": (
        [(256, 768), (768,)],
        lambda *a: op.nn.rms_norm(*a, axes=-1, epsilon=1e-5),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
        FACTOR,
    ),
    "gelu": ([(10000,)], op.nn.gelu, F.gelu, FACTOR),
    "silu": ([(10000,)], op.nn.silu, F.silu, FACTOR),
}


def measure(names):
    """Yield for each case its name, our error and PyTorch's, relative to the largest number of the
    result.

    Each is the median of several draws: a sum of normal numbers may cancel, or be exact by luck.
    """
    modules = {}
    for i, name in enumerate(names):
        shapes, body, *_ = CASES[name]
        params = [tensor(f"x{k}", shape, "float32") for k, shape in enumerate(shapes)]
        module = build(params, lambda bb, *a, body=body: bb.emit(body(*a)))
        modules[f"main{i}"] = module["main"].with_attr("global_symbol", f"main{i}")
    executable = tvm.compile(tvm.IRModule(modules), host(), relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    for i, name in enumerate(names):
        errors = [errors_of(name, machine[f"main{i}"], seed) for seed in range(DRAWS)]
        yield name, *np.median(errors, axis=0)


def errors_of(name, function, seed):
    """Return our error and PyTorch's on random numbers."""
    shapes, _, reference, _ = CASES[name]
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    if "batch" in name:
        arrays = [np.abs(array) for array in arrays]
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    exact = reference(*(factor.double() for factor in tensors)).detach().numpy()
    theirs = reference(*(factor.clone() for factor in tensors)).detach().numpy()
    ours = to_numpy(function(*map(tvm.runtime.tensor, arrays)))
    # Scale results of small numbers, such as those of softmax, by their own maximum.
    scale = 1 / np.abs(exact).max()
    return [largest_error(result * scale, exact * scale) for result in (ours, theirs)]


@pytest.mark.slow
def test_errors_are_those_of_pytorch():
    measured = list(measure(share(list(CASES))))
    for name, ours, theirs in measured:
        print(f"{name:40} {ours:9.1e} {theirs:9.1e} {ours / theirs if theirs else 1:6.1f}")
    larger = [
        (name, ours, theirs)
        for name, ours, theirs in measured
        if ours > max(CASES[name][3] * theirs, ROUNDINGS)
    ]
    assert larger == []


def test_some_errors_are_those_of_pytorch():
    names = ["matmul", "softmax", "sum of all", "exp", "tanh", "erf", "gelu"]
    for name, ours, theirs in measure(names):
        assert ours <= max(CASES[name][3] * theirs, ROUNDINGS), name
