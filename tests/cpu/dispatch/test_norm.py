"""Normalisations become kernels, forward and backward, and compute the numbers of the default
build."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in, run_both
from tvm import relax, tirx

from relax_grad.op import norm

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def module(body, *shapes):
    return build([tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)], body)


def check(kernel, body, *shapes):
    """Assert that a call becomes a kernel with the right numbers; a symbolic first extent is 3 at
    run time."""
    values = [
        np.abs(RNG.normal(size=[3 if extent is N else extent for extent in shape])) + 0.1
        for shape in shapes
    ]
    values = [value.astype("float32") for value in values]
    check_dispatch(module(body, *shapes), "main", values, [kernel])


#: A shape, and whether the call has gamma and beta.
CASES = [((N, 6, 5, 4), True), ((3, 6, 5, 4), False)]


@pytest.mark.parametrize(("data", "parameters"), CASES)
def test_batch_norm(data, parameters):
    check(
        "nn_batch_norm_kernel",
        lambda *args: relax.op.nn.batch_norm(
            *args, axis=1, epsilon=1e-3, momentum=0.3, center=parameters, scale=parameters
        ),
        data,
        *[(6,)] * 4,
    )
    check(
        "grad_batch_norm_backward_data_kernel",
        lambda *args: norm.batch_norm_backward_data(*args, axis=-3, scale=parameters),
        data,
        data,
        *[(6,)] * 5,
    )
    check(
        "grad_batch_norm_backward_gamma_kernel",
        lambda *args: norm.batch_norm_backward_gamma(*args, axis=1),
        data,
        data,
        (6,),
        (6,),
    )


@pytest.mark.parametrize(("data", "parameters"), CASES)
@pytest.mark.parametrize("axes", [(-1,), (2, 3)])
def test_layer_norm(data, axes, parameters):
    shape = data[-len(axes) :]
    rows = (*data[: -len(axes)], *[1] * len(axes))
    check(
        "nn_layer_norm_kernel",
        lambda *args: relax.op.nn.layer_norm(
            *args, axes=axes, epsilon=1e-3, center=parameters, scale=parameters
        ),
        data,
        shape,
        shape,
    )
    check(
        "grad_layer_norm_backward_data_kernel",
        lambda *args: norm.layer_norm_backward_data(*args, axes=axes, scale=parameters),
        data,
        data,
        shape,
        rows,
        rows,
    )
    check(
        "grad_layer_norm_backward_gamma_kernel",
        lambda *args: norm.layer_norm_backward_gamma(*args, axes=axes),
        data,
        data,
        rows,
        rows,
    )


@pytest.mark.parametrize("data", [CASES[0][0]])
def test_rms_norm(data):
    rows = (*data[:-1], 1)
    check("nn_rms_norm_kernel", lambda *a: relax.op.nn.rms_norm(*a, axes=-1), data, (4,))
    check(
        "grad_rms_norm_backward_data_kernel",
        lambda *args: norm.rms_norm_backward_data(*args, axes=[-1]),
        data,
        data,
        (4,),
        rows,
    )
    check(
        "grad_rms_norm_backward_weight_kernel",
        lambda *args: norm.rms_norm_backward_weight(*args, axes=[-1]),
        data,
        data,
        rows,
    )


@pytest.mark.parametrize(("data", "parameters"), CASES)
def test_group_and_instance_norm(data, parameters):
    attrs = {"channel_axis": 1, "axes": [2, 3], "center": parameters, "scale": parameters}
    rows = (*data[:2], 1, 1)
    check(
        "nn_group_norm_kernel",
        lambda *args: relax.op.nn.group_norm(*args, num_groups=2, **attrs),
        data,
        (6,),
        (6,),
    )
    check(
        "nn_instance_norm_kernel",
        lambda *args: relax.op.nn.instance_norm(*args, **attrs),
        data,
        (6,),
        (6,),
    )
    check(
        "grad_instance_norm_backward_data_kernel",
        lambda *args: norm.instance_norm_backward_data(*args, **attrs),
        data,
        data,
        (6,),
        *[rows] * 4,
    )
    check(
        "grad_instance_norm_backward_gamma_kernel",
        lambda *args: norm.instance_norm_backward_gamma(*args, **attrs),
        data,
        data,
        rows,
        rows,
    )


def test_unsupported_modes_and_axes_have_no_kernel():
    batch_norm = relax.op.nn.batch_norm
    for body, *shapes in [
        (lambda *a: batch_norm(*a, axis=1, training=False), (2, 6, 5, 4), *[(6,)] * 4),
        (lambda *a: batch_norm(*a, axis=-1), (2, 5, 4, 6), *[(6,)] * 4),
        (lambda *a: relax.op.nn.layer_norm(*a, axes=[1]), (2, 6, 5), (6,), (6,)),
        (lambda *a: relax.op.nn.layer_norm(*a, axes=[2, 1]), (2, 6, 5), (5, 6), (5, 6)),
    ]:
        assert kernels_in(module(body, *shapes)) == []


@pytest.mark.parametrize(
    ("backward", "data", "parameters"),
    [
        (lambda *args: norm.batch_norm_backward_gamma(*args, axis=1), (N, 4, 3, 4), (4,)),
        (lambda *args: norm.batch_norm_backward_gamma(*args, axis=1), (2, 4, N, 4), (4,)),
        (
            lambda *args: norm.instance_norm_backward_gamma(*args, channel_axis=1, axes=[2, 3]),
            (2, 4, N, 4),
            (2, 4, 1, 1),
        ),
    ],
    ids=["batch", "space", "instance"],
)
def test_gradient_of_gamma_without_elements(backward, data, parameters):
    """The gradient is an empty sum, that is 0, although the statistics of no elements are NaN."""
    sizes = [0 if extent is N else extent for extent in data]
    values = [np.zeros(sizes, "float32")] * 2 + [np.full(parameters, np.nan, "float32")] * 2
    mod = module(backward, data, data, parameters, parameters)
    (kernel,) = kernels_in(mod)
    assert "backward_gamma_kernel" in kernel
    for result in run_both(mod, "main", values):
        np.testing.assert_array_equal(result, np.zeros(parameters))
