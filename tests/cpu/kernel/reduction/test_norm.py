"""Normalisations and their backward operators against PyTorch in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, at, each_target, largest_error, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.reduction import norm, norm_backward
from relax_grad.cpu.kernel.reduction.reduce import Channels
from relax_grad.cpu.target import CPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

RNG = np.random.default_rng(0)
EPSILON = 1e-3


def random(*shape):
    return (RNG.normal(size=shape) + 0.5).astype("float32")


def positive(*shape):
    return RNG.uniform(0.5, 2, size=shape).astype("float32")


@dataclass(frozen=True)
class Case:
    """A kernel of a normalization of ``[outer, channels, inner]``.

    ``outer`` may be symbolic, and a kernel may return additional results.
    """

    kind: str
    outer: int
    channels: int
    inner: int
    parameters: bool
    groups: int = 1
    symbolic: bool = False
    saves: bool = False

    def also(self, *shapes):
        """Return the shapes of the results that exist only if the kernel saves values."""
        return list(shapes) if self.saves else []

    def run(self, cpu):
        """Return the run of the kernel, and the float64 function of its inputs that gives the
        expected results."""
        outer = tirx.Var("n", "int32") if self.symbolic else self.outer
        make, *arguments = getattr(self, f"_{self.kind}")(outer)
        function, inputs, results = make(cpu)
        values = {"n": self.outer}
        inputs = [source(*at(shape, values)) for source, shape in inputs]
        return Run(function, inputs, [at(shape, values) for shape in results]), arguments[0]

    def _batch_norm(self, outer):
        of = Channels(outer, self.channels, self.inner)
        data, parameter = (outer, self.channels, self.inner), (self.channels,)

        def make(cpu):
            function = norm.batch_norm(
                of,
                [data, parameter],
                cpu,
                EPSILON,
                0.3,
                self.parameters,
                self.parameters,
                parameter if self.saves else None,
            )
            results = [data, *[parameter] * 2, *self.also(parameter, parameter)]
            return function, [(random, data), *[(random, parameter)] * 4], results

        def wanted(x, gamma, beta, mean, variance):
            axes = (0, 2)
            of_batch, spread = x.mean(axes), x.var(axes, unbiased=False)
            y = (
                torch.nn.functional.batch_norm(
                    x,
                    None,
                    None,
                    *((gamma, beta) if self.parameters else ()),
                    training=True,
                    eps=EPSILON,
                )
                if self.outer * self.inner > 1
                else torch.zeros_like(x) + (beta[:, None] if self.parameters else 0)
            )
            saved = self.also(of_batch, 1 / torch.sqrt(spread + EPSILON))
            return y, 0.7 * mean + 0.3 * of_batch, 0.7 * variance + 0.3 * spread, *saved

        return make, wanted

    def _channel_backward(self, outer):
        of = Channels(outer, self.channels, self.inner)
        data, row = (outer, self.channels, self.inner), (self.channels,)
        factors = (self.channels,)
        count = outer * self.inner

        def make(cpu):
            shapes = [data, data, factors, row, row, row, row, data]
            function = norm_backward.channel_norm_backward_data(
                of, shapes, cpu, self.channels, count, self.parameters
            )
            sources = (random, random, random, random, positive, random, random)
            return function, list(zip(sources, shapes, strict=False)), [data]

        def wanted(dy, x, gamma, mean, rstd, mean_grad, variance_grad):
            gamma = gamma if self.parameters else torch.ones_like(gamma)
            mean, slope, mean_grad, variance_grad = (
                value[:, None] for value in (mean, gamma * rstd, mean_grad, variance_grad)
            )
            number = self.outer * self.inner
            return [dy * slope + (mean_grad + 2 * variance_grad * (x - mean)) / number]

        return make, wanted

    def _channel_gamma(self, outer):
        of = Channels(outer, self.channels, self.inner)
        data, row = (outer, self.channels, self.inner), (self.channels,)

        def make(cpu):
            function = norm_backward.channel_norm_backward_gamma(
                of, [data, data, row, row, row], cpu, beta=row if self.saves else None
            )
            taken = [(random, data), (random, data), (random, row), (positive, row)]
            return function, taken, [row, *self.also(row)]

        def wanted(dy, x, mean, rstd):
            product = dy * (x - mean[:, None]) * rstd[:, None]
            return [product.sum((0, 2)), *self.also(dy.sum((0, 2)))]

        return make, wanted

    def _group_norm(self, outer):
        channels = self.groups * self.channels
        data, parameter = (outer, channels, self.inner), (channels,)
        statistics = (outer, channels, 1)

        def make(cpu):
            function = norm.row_norm(
                outer * self.groups,
                self.channels,
                self.inner,
                [data, parameter, parameter],
                cpu,
                EPSILON,
                self.groups,
                self.parameters,
                self.parameters,
                statistics=statistics if self.saves else None,
                copies=self.channels,
            )
            taken = [(random, data), (random, parameter), (random, parameter)]
            return function, taken, [data, *self.also(statistics, statistics)]

        def wanted(x, gamma, beta):
            mean, rstd = self._of_groups(x)
            y = (x - mean) * rstd
            y = y * gamma[:, None] + beta[:, None] if self.parameters else y
            return [y, *self.also(mean, rstd)]

        return make, wanted

    def _of_groups(self, x):
        """Return mean and rstd of groups of channels for each channel."""
        groups = x.reshape(self.outer, self.groups, -1)
        mean = groups.mean(2, keepdim=True)
        rstd = 1 / torch.sqrt(groups.var(2, keepdim=True, unbiased=False) + EPSILON)
        return [statistic.repeat_interleave(self.channels, 1) for statistic in (mean, rstd)]

    def _group_statistics(self, outer):
        channels = self.groups * self.channels
        data, result = (outer, channels, self.inner), (outer, channels, 1)

        def make(cpu):
            of = Channels(1, outer * self.groups, self.channels * self.inner)
            function = norm.statistics(of, [data, result], cpu, EPSILON, copies=self.channels)
            return function, [(random, data)], [result, result]

        return make, self._of_groups

    def _channel_statistics(self, outer):
        data, result = (outer, self.channels, self.inner), (self.channels,)

        def make(cpu):
            of = Channels(outer, self.channels, self.inner)
            function = norm.statistics(of, [data, result], cpu, EPSILON)
            return function, [(random, data)], [result, result]

        def wanted(x):
            variance, mean = torch.var_mean(x, (0, 2), correction=0)
            return [mean, 1 / torch.sqrt(variance + EPSILON)]

        return make, wanted

    def _rms_statistics(self, outer):
        data, result = (outer, self.channels * self.inner), (outer, 1)

        def make(cpu):
            of = Channels(1, outer, self.channels * self.inner)
            function = norm.statistics(of, [data, result], cpu, EPSILON, center=False)
            return function, [(random, data)], [result]

        def wanted(x):
            return [1 / torch.sqrt((x * x).mean(1, keepdim=True) + EPSILON)]

        return make, wanted

    def _rows(self, outer, kind):
        columns = self.channels * self.inner
        data, row, parameter = (outer, columns), (outer, 1), (columns,)
        if kind == "rms":

            def make(cpu):
                function = norm.rms_norm(
                    outer, columns, [data, parameter], cpu, EPSILON, row if self.saves else None
                )
                return function, [(random, data), (random, parameter)], [data, *self.also(row)]

            def wanted(x, weight):
                rstd = 1 / torch.sqrt((x * x).mean(1, keepdim=True) + EPSILON)
                return [x * weight * rstd, *self.also(rstd)]

            return make, wanted
        centered = self.groups == 1
        statistics = [(random, row)] * centered + [(positive, row)]
        shapes = [row] * (1 + centered)
        if kind == "gamma":

            def make(cpu):
                function = norm_backward.row_norm_backward_gamma(
                    outer,
                    columns,
                    [data, data, *shapes, parameter],
                    cpu,
                    centered,
                    parameter if self.saves else None,
                )
                taken = [(random, data), (random, data), *statistics]
                return function, taken, [parameter, *self.also(parameter)]

            def wanted(dy, x, *of_rows):
                *mean, rstd = of_rows
                product = dy * (x - (mean[0] if mean else 0)) * rstd
                return [product.sum(0), *self.also(dy.sum(0))]

            return make, wanted

        def make(cpu):
            function = norm_backward.row_norm_backward_data(
                outer,
                columns,
                [data, data, parameter, *shapes, data],
                cpu,
                centered,
                self.parameters,
            )
            taken = [(random, data), (random, data), (random, parameter), *statistics]
            return function, taken, [data]

        def wanted(dy, x, gamma, *of_rows):
            *mean, rstd = of_rows
            g = dy * gamma if self.parameters else dy
            z = (x - (mean[0] if mean else 0)) * rstd
            result = g - z * (g * z).mean(1, keepdim=True)
            return [rstd * (result - g.mean(1, keepdim=True) if mean else result)]

        return make, wanted

    _rms = functools.partialmethod(_rows, kind="rms")
    _row_gamma = functools.partialmethod(_rows, kind="gamma")
    _row_backward = functools.partialmethod(_rows, kind="data")


KINDS = [
    "batch_norm",
    "channel_backward",
    "channel_gamma",
    "channel_statistics",
    "group_norm",
    "group_statistics",
    "rms",
    "rms_statistics",
    "row_gamma",
    "row_backward",
]


def check(cases, target):
    """Compare kernels, compiled together, with the expected results."""
    made = [case.run(CPU.of(target)) for case in cases]
    results = run_kernels([run for run, _ in made], target)
    for case, (run, wanted), tensors in zip(cases, made, results, strict=True):
        inputs = [torch.from_numpy(array).double() for array in run.inputs]
        for ours, exact in zip(tensors, wanted(*inputs), strict=True):
            assert largest_error(ours, exact.numpy()) < 1e-5, case


@each_target
def test_sizes_around_vectors(target):
    sizes = [(1, 2, 1), (3, 5, 49), (70, 3, 19)]
    check(
        [
            Case(kind, *size, (i + j) % 2 == 0, 1 + 2 * (i % 2), i > 0, i != 1)
            for i, size in enumerate(sizes)
            for j, kind in enumerate(KINDS)
        ],
        target,
    )


@each_target
def test_gradients_of_gamma_with_sums_in_the_cache(target):
    """Rows of more columns than a block in registers has, one by one and several at a time."""
    sizes = [(45, 3, 59), (70, 5, 60), (101, 5, 421)]
    check(
        [
            Case("row_gamma", *size, True, groups, symbolic, saves)
            for size in sizes
            for groups, symbolic, saves in ((1, False, True), (1, True, False), (2, False, False))
        ],
        target,
    )


@st.composite
def case(draw):
    return Case(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(1, 70)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 90)),
        draw(st.booleans()),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@pytest.mark.slow
@each_target
@at_length(150)
@given(cases=batches(case()))
def test_any_norm(target, cases):
    check(cases, target)
