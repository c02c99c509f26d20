"""The gradient of a cross entropy against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.reduction.lines import Lines
from relax_grad.cpu.kernel.reduction.loss import Loss, cross_entropy_backward
from relax_grad.cpu.target import CPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

RNG = np.random.default_rng(0)
IGNORED = -7


def check(cases, target):
    """Compare ``(batch, classes, inner, reduction, weighted, symbolic)``, compiled together, with
    PyTorch."""
    runs, wanted = [], []
    for batch, classes, inner, reduction, weighted, symbolic in cases:
        n, k = (tirx.Var(name, "int32") for name in "nk") if symbolic else (batch, inner)
        x = torch.from_numpy(RNG.normal(0, 3, (batch, classes, inner))).requires_grad_()
        y = torch.log_softmax(x, 1).detach().numpy().astype("float32")
        targets = RNG.integers(0, classes, (batch, inner))
        targets[RNG.random(targets.shape) < 0.2] = IGNORED
        targets[0, 0] = RNG.integers(classes)
        weights = RNG.uniform(0.5, 2, classes).astype("float32")
        weight = torch.from_numpy(weights).double() if weighted else None
        loss = torch.nn.functional.cross_entropy(
            x, torch.from_numpy(targets), weight, ignore_index=IGNORED, reduction=reduction
        )
        dy = RNG.normal(size=tuple(loss.shape)).astype("float32")
        (gradient,) = torch.autograd.grad(loss, x, torch.from_numpy(dy).double())
        shapes = [(n, k) if reduction == "none" else (), (n, classes, k), (n, k)]
        shapes += [(classes,)] * weighted
        function = cross_entropy_backward(
            Loss(reduction, IGNORED, weighted),
            Lines(n, classes, k),
            shapes,
            "int64",
            CPU.of(target),
        )
        inputs = [dy, y, targets, *([weights] if weighted else [])]
        runs.append(Run(function, inputs, [y.shape]))
        wanted.append(gradient.numpy())
    for case, exact, (result,) in zip(cases, wanted, run_kernels(runs, target), strict=True):
        assert largest_error(result, exact) < 1e-5, case


REDUCTIONS = ["none", "sum", "mean"]


@each_target
def test_reductions(target):
    check([(9, 21, 1, kind, kind == "mean", kind == "sum") for kind in REDUCTIONS], target)
    check([(2, 5, 75, kind, kind != "none", kind == "sum") for kind in REDUCTIONS], target)


@each_target
@pytest.mark.parametrize("inner", [1, 5])
def test_targets_outside_of_the_classes(target, inner):
    """A target that names no class gives NaN at its own position and reads nothing; an ignored one
    gives 0."""
    targets = np.array([-1, 3, 2**40, -(2**40), 2**32 + 1, IGNORED, 2**31])
    shape = (len(targets), 3, inner)
    targets = np.repeat(targets[:, None], inner, 1)
    dy, y = np.ones(targets.shape, "float32"), np.full(shape, -1.0, "float32")
    function = cross_entropy_backward(
        Loss("none", IGNORED, True),
        Lines(*shape),
        [targets.shape, shape, targets.shape, (3,)],
        "int64",
        CPU.of(target),
    )
    inputs = [dy, y, targets, np.ones(3, "float32")]
    ((result,),) = run_kernels([Run(function, inputs, [shape])], target)
    assert np.isnan(result[targets[:, 0] != IGNORED]).all()
    assert (result[targets[:, 0] == IGNORED] == 0).all()


@each_target
@pytest.mark.parametrize("classes", [5, 70])
def test_gathered(target, classes):
    """Negative targets count from the end, and targets out of bounds contribute nothing."""
    targets = np.array([[0], [classes - 1], [-1], [-classes], [classes], [-classes - 1], [2**33]])
    x = torch.from_numpy(RNG.normal(0, 3, (len(targets), classes))).requires_grad_()
    y = torch.log_softmax(x, 1)
    dy = RNG.normal(size=targets.shape).astype("float32")
    inside = (targets >= -classes) & (targets < classes)
    at = torch.from_numpy(np.where(inside, targets % classes, 0))
    wanted = torch.gather(y, 1, at) * torch.from_numpy(np.where(inside, dy, 0))
    (exact,) = torch.autograd.grad(wanted.sum(), x)
    shapes = [targets.shape, tuple(y.shape), targets.shape]
    lines = Lines(len(targets), classes, 1)
    function = cross_entropy_backward(Loss("gather"), lines, shapes, "int64", CPU.of(target))
    inputs = [dy, y.detach().numpy().astype("float32"), targets]
    ((result,),) = run_kernels([Run(function, inputs, [tuple(y.shape)])], target)
    assert largest_error(result, exact.numpy()) < 1e-5


@pytest.mark.slow
@each_target
@at_length(100)
@given(
    cases=batches(
        st.tuples(
            st.integers(1, 40),
            st.integers(2, 90),
            st.one_of(st.just(1), st.integers(1, 150)),
            st.sampled_from(REDUCTIONS),
            st.booleans(),
            st.booleans(),
        )
    )
)
def test_any_cross_entropy(target, cases):
    check(cases, target)
