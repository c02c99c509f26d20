"""Gradients of reductions: random shapes, large counts, large means, and the backward operator."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import params_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal

from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch


def torch_prod(torch, x, axis, keep):
    for a in sorted((a % x.ndim for a in axis), reverse=True):
        x = x.prod(a, keepdim=keep)
    return x


FORWARD = {
    "relax.max": lambda torch, x, axis, keep: x.amax(axis, keepdim=keep),
    "relax.min": lambda torch, x, axis, keep: x.amin(axis, keepdim=keep),
    "relax.prod": torch_prod,
    "relax.std": lambda torch, x, axis, keep: x.std(axis, correction=0, keepdim=keep),
    "relax.sum": lambda torch, x, axis, keep: x.sum(axis, keepdim=keep),
    "relax.mean": lambda torch, x, axis, keep: x.mean(axis, keepdim=keep),
    "relax.variance": lambda torch, x, axis, keep: x.var(axis, correction=0, keepdim=keep),
}


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    axes = [axis - len(shape) * draw(st.integers(0, 1)) for axis in axes]
    return draw(st.sampled_from(sorted(FORWARD))), shape, axes, draw(st.booleans())


def torch_case(case):
    op, shape, axis, keepdims = case
    # Small integers: ties, zeros, and rows of equal elements.
    return TorchCase(
        op,
        [np.random.default_rng(0).integers(-1, 2, shape).astype("float64")],
        lambda torch, x: FORWARD[op](torch, x, axis, keepdims),
        {"axis": axis, "keepdims": keepdims},
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=cases())
def test_reduction(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(cases()))
def test_reduction_at_length(torch, batch):
    check_many_against_torch(list(map(torch_case, batch)), target=TARGET)


def program(build, *values):
    """Return a module whose ``main`` returns ``build(bb, *params)``, its parameters and their
    values."""
    params = params_of(values)
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb, *params))
        bb.emit_func_output(out)
    return bb.get(), params, [tvm.runtime.tensor(value) for value in values]


@pytest.mark.parametrize("op", ["relax.max", "relax.min"])
def test_extremum_of_nan_and_infinity(torch, op):
    """TVM's maximum of -inf alone is the least finite number, which is not an element."""
    for rows in ([[np.inf, np.inf], [-np.inf, -np.inf], [np.inf, 1.0]], [[np.nan, np.nan]]):
        x = np.array(rows)
        cotangent = np.random.default_rng(0).normal(size=len(rows))
        slope = gradient(lambda x: getattr(relax.op, op[6:])(x, [1]), x, cotangent)
        leaf = torch.tensor(x, requires_grad=True)
        (FORWARD[op](torch, leaf, (1,), False) * torch.tensor(cotangent)).sum().backward()
        np.testing.assert_allclose(slope, leaf.grad.numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["relax.max", "relax.min"])
def test_extremum_of_infinity_in_half_precision(op, dtype):
    """TVM's least number of bfloat16 is that of float32, which is rounded to minus infinity."""
    x = np.array([[np.inf, np.inf], [-np.inf, -np.inf], [np.inf, 1]], "float32")

    def extremum(x):
        half = relax.op.astype(x, dtype)
        return relax.op.astype(getattr(relax.op, op[6:])(half, [1]), "float32")

    slope = gradient(extremum, x, np.array([1, 2, 3], "float32"))
    last = [3, 0] if op == "relax.max" else [0, 3]
    np.testing.assert_array_equal(slope, [[0.5, 0.5], [1, 1], last])


def test_median_gives_its_gradient_to_the_element_that_the_index_names():
    x = np.array([[2.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 3.0, 3.0, 3.0]])

    def median(bb, x):
        return relax.op.median(x, [1])

    module, _, values = program(median, x)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    index = machine["main"](*values)[1].numpy()
    expected = np.zeros_like(x)
    np.put_along_axis(expected, index[:, None], [[5.0], [7.0]], 1)

    module, params, values = program(
        lambda bb, x, g: relax.op.sum(
            bb.emit(relax.op.multiply(relax.TupleGetItem(bb.emit(median(bb, x)), 0), g))
        ),
        x,
        np.array([5.0, 7.0]),
    )
    module = relax.transform.Gradient("main", params[:1])(module)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    np.testing.assert_array_equal(machine["main_adjoint"](*values)[1][0].numpy(), expected)


def test_std_in_half_precision_whose_squares_do_not_fit():
    x = np.array([1000, -1000, 0, 0], "float16")
    slope = gradient(relax.op.std, x, np.ones((), "float16"))
    wide = x.astype("float64")
    expected = (wide - wide.mean()) / (wide.size * wide.std())
    np.testing.assert_allclose(slope, expected, rtol=1e-3)


def test_prod_of_many_elements_with_a_zero():
    x = np.random.default_rng(0).uniform(0.9, 1.1, 2000)
    x[[700, 1500]] = 0
    assert not gradient(relax.op.prod, x, np.ones(())).any()
    x[700] = 1
    slope = gradient(relax.op.prod, x, np.ones(()))
    assert slope[1500] == pytest.approx(np.delete(x, 1500).prod(), rel=1e-9)
    assert np.count_nonzero(slope) == 1


@pytest.mark.parametrize("op", ["max", "min", "prod", "std", "median", "sum", "mean"])
def test_integers_have_no_gradient(op):
    def through_integers(x):
        return relax.op.astype(getattr(relax.op, op)(relax.op.astype(x, "int32")), "float32")

    x = np.arange(4, dtype="float32")
    assert not gradient(through_integers, x, np.ones((), "float32")).any()


def gradient(op, x, cotangent):
    """Run the gradient of ``sum(cotangent * op(x))``."""
    module, params, values = program(
        lambda bb, x, g: relax.op.sum(bb.emit(relax.op.multiply(op(x), g))), x, cotangent
    )
    module = relax.transform.Gradient("main", params[:1])(module)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    return machine["main_adjoint"](*values)[1][0].numpy()


@pytest.mark.parametrize("count", [4097, 70000])
def test_mean_backward_x_with_a_count_that_half_precision_does_not_hold(count):
    grad = np.full(1, 1024, "float16")
    module, _, values = program(lambda bb, g: backward.mean_backward_x(g, (count, 1), [0]), grad)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    expected = np.full((count, 1), np.float32(1024) / np.float32(count)).astype("float16")
    np.testing.assert_array_equal(machine["main"](*values).numpy(), expected)


def test_variance_in_half_precision_with_many_elements():
    x = np.random.default_rng(0).normal(3, 1, 4096).astype("float16")
    slope = gradient(relax.op.variance, x, np.full((), 512, "float16")).astype("float64")
    wide = x.astype("float64")
    expected = 512 * 2 / wide.size * (wide - wide.mean())
    np.testing.assert_allclose(slope, expected, rtol=2e-3, atol=1e-5)


def test_variance_does_not_cancel_for_a_large_mean():
    x = (np.random.default_rng(0).normal(size=64) + 1e4).astype("float32")
    slope = gradient(relax.op.variance, x, np.ones((), "float32"))
    wide = x.astype("float64")
    expected = 2 / wide.size * (wide - wide.mean())
    np.testing.assert_allclose(slope, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_symbolic_count_to_second_order():
    x = np.random.default_rng(0).normal(size=(3, 2))
    for op in ("relax.mean", "relax.variance"):
        check_gradients(op, [x], order=2, symbolic={0: {0: "n", 1: "m"}}, axis=[0, -1])


@pytest.mark.parametrize(
    ("attrs", "shape"),
    [
        ({}, ()),
        ({"axis": [-1]}, (2,)),
        ({"axis": [0], "keepdims": True}, (1, 3)),
        ({"axis": []}, (2, 3)),
    ],
)
def test_mean_backward_x(attrs, shape):
    def function(grad):
        return backward.mean_backward_x(grad, (2, 3), **attrs)

    grad = np.random.default_rng(0).normal(size=shape)
    check_gradients(function, [grad], order=2)
    check_gradients(function, [grad.astype("float16")], order=2)

    module, _, _ = program(lambda bb, grad: function(grad), grad.astype("float16"))
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_mean_backward_x_refuses_mismatched_arguments():
    bb = relax.BlockBuilder()
    grad = relax.Var("g", relax.TensorType((2,), "float32"))
    with pytest.raises(ValueError, match=r"relax\.grad\.mean_backward_x: output_grad must have"):
        bb.normalize(backward.mean_backward_x(grad, (2, 3), axis=0))
    with pytest.raises(TypeError, match="x_shape must be a shape"):
        bb.normalize(backward.mean_backward_x(grad, grad, axis=0))
