"""Kernels of the forward pass return the values that gradients would otherwise recompute."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import check_dispatch, kernels_in, run_both
from programs import build, tensor
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad

import relax_grad

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def derivative(body, *shapes):
    """Return the module of a function and its gradients, and arrays to call it with."""
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
    module = relax_grad.vjp(build(params, body), "main")
    module = relax.transform.DeadCodeElimination(["main_vjp"])(module)
    del module["main"]
    shapes = [
        [int(extent) if isinstance(extent, tirx.IntImm) else 3 for extent in param.ty.shape.values]
        for param in module["main_vjp"].params
    ]
    return module, [RNG.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("batch", [3, N])
def test_batch_norm(batch):
    def normalize(bb, *args):
        return bb.emit(op.nn.batch_norm(*args, axis=1, epsilon=1e-3))[0]

    module, values = derivative(normalize, (batch, 6, 5, 4), *[(6,)] * 4)
    kernels = ["nn_batch_norm", "grad_batch_norm_backward_gamma", "grad_batch_norm_backward_data"]
    check_dispatch(module, "main_vjp", values, [f"{name}_kernel" for name in kernels], 1e-4)


@pytest.mark.parametrize("axes", [[-1], [1, 2]])
@pytest.mark.parametrize("batch", [3, N])
def test_layer_norm(batch, axes):
    shape = (batch, 5, 12)
    module, values = derivative(
        lambda _bb, *args: op.nn.layer_norm(*args, axes=axes, epsilon=1e-3),
        shape,
        *[tuple(shape[axis] for axis in axes)] * 2,
    )
    kernels = ["nn_layer_norm", "grad_layer_norm_backward_gamma", "grad_layer_norm_backward_data"]
    check_dispatch(module, "main_vjp", values, [f"{name}_kernel" for name in kernels], 1e-4)


@pytest.mark.parametrize("groups", [None, 1, 2, 6])
@pytest.mark.parametrize("batch", [3, N])
def test_norms_of_groups(batch, groups):
    attrs = {"channel_axis": 1, "axes": [2, 3], "epsilon": 1e-3}

    def normalize(_bb, *args):
        if groups is None:
            return op.nn.instance_norm(*args, **attrs)
        return op.nn.group_norm(*args, num_groups=groups, **attrs)

    module, values = derivative(normalize, (batch, 6, 5, 4), (6,), (6,))
    forward = "nn_instance_norm" if groups is None else "nn_group_norm"
    backward = ["grad_instance_norm_backward_gamma", "grad_instance_norm_backward_data"]
    names = [name for name in kernels_in(module) if "norm" in name]
    assert names == [f"{name}_kernel" for name in (forward, *backward)]
    for ours, stock in zip(
        *(outputs for _, outputs in run_both(module, "main_vjp", values)), strict=True
    ):
        np.testing.assert_allclose(ours, stock, 1e-3, 1e-4)


def test_batch_norm_in_inference_leaves_the_statistics_to_training():
    """A call without a kernel returns no statistics, but a later one of the same data does."""

    def normalize(bb, x, *parameters):
        both = [
            bb.emit(op.nn.batch_norm(x, *parameters, axis=1, training=training))
            for training in (False, True)
        ]
        results = [bb.emit(relax.TupleGetItem(norm, 0)) for norm in both]
        statistics = bb.emit(grad.batch_norm_statistics(x, axis=1))
        return bb.emit(relax.Tuple([*results, bb.emit(relax.TupleGetItem(statistics, 1))]))

    params = [tensor("x", (3, 6, 8), "float32")]
    params += [tensor(f"p{i}", (6,), "float32") for i in range(4)]
    values = [RNG.normal(size=(3, 6, 8)), *RNG.uniform(0.5, 1.5, (4, 6))]
    values = [value.astype("float32") for value in values]
    check_dispatch(build(params, normalize), "main", values, ["nn_batch_norm_kernel"], 1e-4)


def test_rms_norm():
    module, values = derivative(
        lambda _bb, *args: op.nn.rms_norm(*args, axes=[-1], epsilon=1e-3), (N, 5, 12), (12,)
    )
    kernels = ["nn_rms_norm", "grad_rms_norm_backward_weight", "grad_rms_norm_backward_data"]
    check_dispatch(module, "main_vjp", values, [f"{name}_kernel" for name in kernels], 1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_pool(rank):
    """The numbers agree for ties within a window and for NaN too."""
    pool = getattr(op.nn, f"max_pool{rank}d")
    shape = (N, 4, *(7, 8, 19)[-rank:])
    module, values = derivative(
        lambda _bb, x: pool(x, pool_size=3, strides=2, padding=1, ceil_mode=True), shape
    )
    kernels = [f"nn_max_pool{rank}d_kernel", f"grad_max_pool{rank}d_backward_kernel"]
    assert sorted(_types_saved(module)) == ["int8"]
    check_dispatch(module, "main_vjp", values, kernels)
    some = [-np.inf, 0, 1, np.nan]
    values[0] = RNG.choice(some, values[0].shape, p=[0.45, 0.25, 0.25, 0.05]).astype("float32")
    # TVM's own pooling ignores NaN, and pads with the lowest finite number.
    (_, ours), (_, stock) = run_both(module, "main_vjp", values)
    np.testing.assert_allclose(ours[0], stock[0], rtol=1e-5, atol=1e-5)


def test_statistics_with_other_operands_are_computed():
    """Statistics with another epsilon, of other data, or from before the normalization are not
    replaced."""
    shape = (4, 16)

    def body(epsilon, first):
        def normalize(bb, dy, x, other, gamma):
            def compute():
                data = other if epsilon is None else x
                both = grad.layer_norm_statistics(data, axes=[-1], epsilon=epsilon or 1e-3)
                return bb.emit(both)

            both = compute() if first else None
            y = bb.emit(op.nn.layer_norm(x, gamma, gamma, axes=[1], epsilon=1e-3))
            both = both if first else compute()
            mean, rstd = (bb.emit(relax.TupleGetItem(both, i)) for i in range(2))
            dx = bb.emit(grad.layer_norm_backward_data(dy, x, gamma, mean, rstd, axes=[1]))
            return bb.emit(op.add(y, dx))

        return normalize

    params = [tensor(name, shape, "float32") for name in ("dy", "x", "other")]
    params.append(tensor("gamma", (16,), "float32"))
    for epsilon, first in [(1e-3, False), (2e-3, False), (None, False), (1e-3, True)]:
        kernels = [
            name.rstrip("0123456789") for name in kernels_in(build(params, body(epsilon, first)))
        ]
        is_saved = epsilon == 1e-3 and not first
        assert ("grad_layer_norm_statistics_kernel" not in kernels) == is_saved, (epsilon, first)


def _types_saved(module):
    dispatched = relax_grad.transform.DispatchKernels(relax_grad.target.host())(module)
    return [
        str(field.dtype)
        for _, function in dispatched.functions_items()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(binding.var.ty, relax.TupleType)
        for field in binding.var.ty.fields[1:]
    ]


@pytest.mark.parametrize("place", ["before", "after", "before, with a use between"])
def test_the_gradient_of_beta_is_found_on_either_side_of_that_of_gamma(place):
    """The kernel for gamma returns the sum, whichever comes first, unless the sum is used
    before."""

    def body(bb, dy, x, mean, rstd):
        def summed():
            return bb.emit(op.sum(dy, axis=[0]))

        beta = summed() if place != "after" else None
        used = bb.emit(op.exp(beta)) if "use" in place else None
        gamma = bb.emit(grad.layer_norm_backward_gamma(dy, x, mean, rstd, axes=[1]))
        beta = summed() if beta is None else beta
        results = [gamma, beta] if used is None else [op.add(gamma, used), beta]
        return bb.emit(relax.Tuple([bb.emit(value) for value in results]))

    shapes = {"dy": (6, 16), "x": (6, 16), "mean": (6, 1), "rstd": (6, 1)}
    module = build([tensor(name, shape, "float32") for name, shape in shapes.items()], body)
    names = [name.rstrip("0123456789") for name in kernels_in(module)]
    assert ("sum_kernel" in names) == ("use" in place)
    assert "grad_layer_norm_backward_gamma_kernel" in names
    values = [RNG.normal(size=shape).astype("float32") for shape in shapes.values()]
    for ours, stock in zip(
        *(outputs for _, outputs in run_both(module, "main", values)), strict=True
    ):
        np.testing.assert_allclose(ours, stock, 1e-4, 1e-4)
