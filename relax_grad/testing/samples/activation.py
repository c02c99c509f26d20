"""Samples of the activations."""

from __future__ import annotations

import numpy as np

from ._sample import Sample, register_samples


@register_samples("relax.nn.relu")
def relu(rng):
    def forward(torch, x):
        return torch.relu(x)

    yield Sample([_away_from_0(rng, (3, 4))], symbolic={0: {0: "n"}}, torch=forward, note="plain")
    yield Sample([_away_from_0(rng, ())], torch=forward, note="0-d")
    yield Sample([np.zeros((2, 0))], torch=forward, note="empty")
    yield Sample(
        [np.array([0.0, -0.0, np.inf, -np.inf, 5e-324, -5e-324])],
        torch=forward,
        smooth=False,
        note="the kink, infinities and the smallest numbers",
    )


def _away_from_0(rng, shape):
    return rng.uniform(0.2, 1, shape) * rng.choice([-1.0, 1.0], shape)
