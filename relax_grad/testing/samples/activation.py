"""Samples of the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ._sample import DTYPES, Sample, register_samples

_N = {0: {0: "n"}}
_KINK = np.array([0.0, -0.0, np.inf, -np.inf, 5e-324, -5e-324])
_LARGE = np.array([0.0, 30.0, -30.0, 800.0, -800.0, 1e30, -1e30])


@register_samples("relax.nn.relu")
def relu(rng: np.random.Generator) -> Iterator[Sample]:
    def forward(torch: Any, x: Any) -> Any:
        return torch.relu(x)

    yield Sample([_away_from_0(rng, (3, 4))], symbolic=_N, torch=forward, note="plain")
    yield Sample([_away_from_0(rng, ())], torch=forward, note="0-d")
    yield Sample([np.zeros((2, 0))], torch=forward, note="empty")
    yield Sample(
        [_KINK],
        torch=forward,
        smooth=False,
        note="the kink, infinities and the smallest numbers",
    )


@register_samples("relax.nn.leakyrelu")
def leakyrelu(rng: np.random.Generator) -> Iterator[Sample]:
    for alpha in (0.01, 0.0, 2.5):

        def forward(torch: Any, x: Any, alpha: Any = alpha) -> Any:
            return torch.nn.functional.leaky_relu(x, alpha)

        yield Sample(
            [_away_from_0(rng, (2, 3))],
            {"alpha": alpha},
            symbolic=_N,
            torch=forward,
            note=f"slope {alpha}",
        )
    yield Sample(
        [_KINK[[0, 1, 4, 5]]], {"alpha": 2.5}, torch=forward, smooth=False, note="the kink"
    )


@register_samples("relax.nn.prelu")
def prelu(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(shape: Sequence[int], slopes: Any, axis: int, note: str, **settings: Any) -> Sample:
        def forward(torch: Any, x: Any, alpha: Any) -> Any:
            if len(alpha) == 1:
                return torch.nn.functional.prelu(x, alpha)
            return torch.nn.functional.prelu(x.movedim(axis, 1), alpha).movedim(1, axis)

        alpha = rng.uniform(0.1, 1, slopes)
        settings = {"dtypes": ("float32", "float16"), **settings}  # TVM refuses bfloat16
        return Sample(
            [_away_from_0(rng, shape), alpha],
            {"axis": axis},
            torch=forward,
            note=note,
            **settings,
        )

    yield sample((2, 3, 2), 3, 1, "a slope for each channel", symbolic={0: {0: "n", 2: "m"}})
    yield sample((2, 3), 1, 1, "one slope for all, on a symbolic axis", symbolic={0: {1: "c"}})
    yield sample((2, 3), 3, -1, "a symbolic channel", symbolic={0: {1: "c"}, 1: {0: "c"}})
    yield sample((3, 2, 2), 2, -2, "another axis, counted from the end", dtypes=())
    yield sample((2, 1), 1, 1, "one channel", dtypes=())
    yield Sample(
        [_away_from_0(rng, (4,)), np.array([0.3, 0.2, 0.0, -1.0])],
        {"axis": 0},
        torch=lambda torch, x, alpha: torch.where(x > 0, x, alpha * x),
        dtypes=(),
        note="one axis",
    )
    yield sample((0, 3), 3, 1, "an empty batch")
    yield Sample(
        [np.array([[0.0, -0.0, 1.0, -1.0]]), np.array([0.3, -2.0, 0.0, 0.0])],
        torch=lambda torch, x, alpha: torch.nn.functional.prelu(x, alpha),
        smooth=False,
        note="the kink",
    )


def _register(name: str, forward: Any, points: Any = _LARGE, **attrs: Any) -> None:
    @register_samples(f"relax.nn.{name}")
    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([rng.normal(size=(2, 3))], attrs, symbolic=_N, torch=forward, note="plain")
        yield Sample([rng.normal(size=())], attrs, torch=forward, dtypes=(), note="0-d")
        yield Sample([np.zeros((2, 0))], attrs, torch=forward, dtypes=(), note="empty")
        yield Sample([points], attrs, torch=forward, smooth=False, note="0 and large numbers")


_register("gelu", lambda torch, x: torch.nn.functional.gelu(x))
_register("gelu_tanh", lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh"))
_register("selu", lambda torch, x: torch.selu(x))
_register("silu", lambda torch, x: torch.nn.functional.silu(x))


@register_samples("relax.nn.softplus")
def softplus(rng: np.random.Generator) -> Iterator[Sample]:
    for beta, threshold in ((1.0, 20.0), (2.5, 1.0), (0.5, 0.0)):

        def forward(torch: Any, x: Any, beta: Any = beta, threshold: Any = threshold) -> Any:
            return torch.nn.functional.softplus(x, beta, threshold)

        attrs = {"beta": beta, "threshold": threshold}
        x = rng.uniform(0.1, 2, (2, 3)) * rng.choice([-1.0, 1.0], (2, 3))
        yield Sample(
            [x],
            attrs,
            symbolic=_N,
            torch=forward,
            dtypes=DTYPES if beta == 1 else (),
            smooth=beta == 1,  # a threshold between the values is a jump
            note=f"{beta=}, {threshold=}",
        )
        yield Sample(
            [np.array([threshold / beta, 40.0, -40.0, 800.0, -800.0])],
            attrs,
            torch=forward,
            smooth=False,
            note=f"on the threshold and beyond, {beta=}",
        )


def _away_from_0(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return rng.uniform(0.2, 1, shape) * rng.choice([-1.0, 1.0], shape)


def _softmax_samples(name: str) -> Callable[..., Any]:
    def maker(rng: np.random.Generator) -> Iterator[Sample]:
        for shape, axis in (((3, 5), -1), ((3, 5), 0), ((2, 3, 2), 1), ((4,), 0), ((3, 1), -1)):
            yield Sample(
                [rng.normal(size=shape)],
                {"axis": axis},
                symbolic={0: {0: "n"}},
                torch=lambda torch, x, axis=axis: getattr(torch, name)(x, axis),
                note=f"axis {axis} of {len(shape)}",
            )
        yield Sample(
            [100 * rng.normal(size=(3, 4))],
            {"axis": -1},
            torch=lambda torch, x: getattr(torch, name)(x, -1),
            smooth=False,
            note="saturated: finite differences see a corner",
        )
        masked = np.where([[0, 0, 1, 1], [1, 0, 1, 0]], rng.normal(size=(2, 4)), -np.inf)
        yield Sample(
            [masked],
            {"axis": 1},
            torch=lambda torch, x: getattr(torch, name)(x, 1),
            smooth=False,
            note="masked by minus infinity",
        )

    return maker


register_samples("relax.nn.log_softmax")(_softmax_samples("log_softmax"))
register_samples("relax.nn.softmax")(_softmax_samples("softmax"))


@register_samples("relax.grad.log_softmax_backward")
@register_samples("relax.grad.softmax_backward")
def softmax_backward(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, axis in (((3, 4), -1), ((3, 4), 0), ((2, 3, 2), -2)):
        yield Sample(
            [rng.normal(size=shape), rng.normal(size=shape)],
            {"axis": axis},
            symbolic={0: {0: "n"}, 1: {0: "n"}},
            note=f"axis {axis} of {len(shape)}",
        )
