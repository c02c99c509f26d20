"""The tensor expressions of the losses against NumPy, including targets that name no class."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Kernel, check_kernels
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad.topi import loss as topi_loss

NOT_A_CLASS = (-(2**31), -101, -1, 255, 2**31 - 1)


def run(function, *inputs, symbolic=False, **attrs):
    """Compile and run a tensor expression for the inputs; None stands for an omitted argument."""
    bb = relax.BlockBuilder()
    arrays = [value for value in inputs if value is not None]
    names = {size: tvm.tirx.Var(f"n{size}", "int64") for a in arrays for size in a.shape}
    variables = [
        relax.Var(
            f"x{i}",
            relax.TensorType([names[size] if symbolic else size for size in a.shape], a.dtype.name),
        )
        for i, a in enumerate(arrays)
    ]
    remaining = iter(variables)
    arguments = [None if value is None else next(remaining) for value in inputs]
    with bb.function("main", variables):
        bb.emit_func_output(bb.emit(bb.call_te(function, *arguments, **attrs)))
    machine = relax.VirtualMachine(tvm.compile(bb.get(), target=TARGET), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def reference(output_grad, predictions, targets, weights, reduction, ignore_index):
    """Return the loss and its two gradients, computed position by position."""
    x = np.moveaxis(predictions, 0 if predictions.ndim == 1 else 1, -1).astype("float64")
    num_classes = x.shape[-1]
    w = np.ones(num_classes) if weights is None else weights.astype("float64")
    positions = [p for p in np.ndindex(targets.shape) if targets[p] != ignore_index]
    invalid = [p for p in positions if not 0 <= targets[p] < num_classes]
    valid = [p for p in positions if p not in invalid]
    nan = np.nan if invalid else 0.0

    losses = np.zeros(targets.shape)
    weight_sum, dx, dw = nan, np.zeros(x.shape), np.full(num_classes, nan)
    for p in invalid:
        losses[p], dx[p] = np.nan, np.nan
    for p in valid:
        losses[p] = -w[targets[p]] * x[p][targets[p]]
        weight_sum += w[targets[p]]
    with np.errstate(invalid="ignore", divide="ignore"):
        divisor = np.float64(weight_sum if reduction == "mean" else 1)
        loss = losses if reduction == "none" else losses.sum() / divisor
        for p in valid:
            c = targets[p]
            dy = output_grad[p] if reduction == "none" else output_grad / divisor
            dx[p][c] = -w[c] * dy
            dw[c] += -(x[p][c] + (loss if reduction == "mean" else 0)) * dy
    return loss, np.moveaxis(dx, -1, 0 if predictions.ndim == 1 else 1), dw


@st.composite
def cases(draw, invalid: bool):
    num_classes = draw(st.integers(1, 5))
    batch = draw(st.none() | st.integers(0, 4))
    spatial = () if batch is None else tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    positions = () if batch is None else (batch, *spatial)
    reduction = draw(st.sampled_from(["none", "sum", "mean"]))
    ignore_index = draw(st.sampled_from([-100, -1, 0, num_classes - 1, 255, *NOT_A_CLASS]))
    special = [ignore_index, *((num_classes, *NOT_A_CLASS) if invalid else ())]
    dtype = draw(st.sampled_from(["int32", "int64"]))
    weighted = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    targets = np.where(
        rng.random(positions) < 0.3,
        rng.choice(special, positions),
        rng.integers(0, num_classes, positions),
    ).astype(dtype)
    shape = (num_classes,) if batch is None else (batch, num_classes, *spatial)
    predictions = rng.normal(size=shape)
    weights = rng.uniform(0.5, 1.5, num_classes) if weighted else None
    output_grad = rng.normal(size=positions if reduction == "none" else ())
    return np.asarray(output_grad), predictions, targets, weights, reduction, ignore_index


def kernels(case, symbolic=False):
    output_grad, *forward, reduction, ignore_index = case
    loss, dx, dw = reference(*case)
    attrs = {"reduction": reduction, "ignore_index": ignore_index}

    def kernel(function, inputs, expected):
        expression = functools.partial(function, **attrs)
        return Kernel(expression, inputs, np.asarray(expected), "float64", 1e-10, symbolic)

    yield kernel(topi_loss.nll_loss, forward, loss)
    yield kernel(topi_loss.nll_loss_backward, [output_grad, *forward], dx)
    if forward[2] is not None:
        yield kernel(topi_loss.nll_loss_backward_weights, [output_grad, *forward], dw)


def check(case, symbolic=False):
    check_kernels(kernels(case, symbolic))


SWEEP = {"deadline": None, "derandomize": True}


@settings(max_examples=12, **SWEEP)
@given(cases(invalid=False))
def test_against_numpy(case):
    check(case)


@settings(max_examples=12, **SWEEP)
@given(cases(invalid=True))
def test_a_target_that_names_no_class_gives_nan(case):
    check(case)


@settings(max_examples=4, **SWEEP)
@given(cases(invalid=True))
def test_symbolic_shapes(case):
    check(case, symbolic=True)


@pytest.mark.slow
@at_length(1000)
@given(batches(st.tuples(cases(invalid=True), st.booleans())))
def test_against_numpy_at_length(batch):
    check_kernels((k for case in batch for k in kernels(*case)), TARGET)


@pytest.mark.parametrize("invalid", [*NOT_A_CLASS, 3, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_an_invalid_target_is_neither_read_nor_written(invalid, reduction):
    targets = np.array([1, invalid, 0, -100, 1])
    rng = np.random.default_rng(0)
    output_grad = rng.normal(size=targets.shape if reduction == "none" else ())
    predictions, weights = rng.normal(size=(5, 3)), rng.uniform(0.5, 1.5, 3)
    check((np.asarray(output_grad), predictions, targets, weights, reduction, -100))


def test_unsigned_targets():
    """An unsigned 255 is not equal to -1, although the bits are the same."""
    targets = np.array([0, 255, 2], "uint8")
    predictions, weights = np.arange(9.0).reshape(3, 3), np.array([1.0, 2.0, 3.0])
    check((np.asarray(1.0), predictions, targets, weights, "mean", 255))
    check((np.asarray(1.0), predictions, targets, weights, "mean", -1))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_an_empty_batch(reduction, symbolic):
    """An empty batch: the mean of no losses is NaN, and the gradients of all weights are 0."""
    output_grad = np.zeros((0,) if reduction == "none" else ())
    case = (output_grad, np.zeros((0, 3)), np.zeros(0, "int64"), np.ones(3), reduction, -100)
    check(case, symbolic)


def test_a_class_that_occurs_often_is_summed_in_float32():
    """5000 terms of 0.5: a float16 sum stops growing at 2048."""
    count = 5000
    predictions = np.full((count, 2), 0.5, "float16")
    targets, weights = np.zeros(count, "int64"), np.ones(2, "float16")
    attrs = {"reduction": "sum", "ignore_index": -100}
    dy = np.ones((), "float16")
    result = run(topi_loss.nll_loss_backward_weights, dy, predictions, targets, weights, **attrs)
    np.testing.assert_array_equal(result, np.array([-2500, 0], "float16"))
    result = run(topi_loss.nll_loss, predictions, targets, weights, **attrs)
    np.testing.assert_array_equal(result, np.float16(-2500))
    attrs["reduction"] = "mean"
    for w in (weights, None):
        result = run(topi_loss.nll_loss_backward, dy, predictions, targets, w, **attrs)
        np.testing.assert_array_equal(result[:, 0], np.full(count, -1 / count, "float16"))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4)])
def test_cross_entropy_with_logits_backward(shape):
    factor = np.random.default_rng(0).normal(size=shape)
    batch = shape[0] if len(shape) > 1 else None
    result = run(
        lambda dz, y: topi_loss.cross_entropy_with_logits_backward(
            dz, y, None if batch is None else y.shape[0]
        ),
        np.asarray(3.0),
        factor,
    )
    np.testing.assert_allclose(result, -3.0 * factor / (batch or 1), rtol=1e-14)
