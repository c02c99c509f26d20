"""Samples of the normalisations."""

from __future__ import annotations

from tvm import relax

from ._sample import Sample, register_samples

_BATCH_NORM = {
    "training": ((3, 2, 2, 3), {"axis": 1, "training": True}),
    "training, channels last, no scale": (
        (2, 3, 4),
        {"axis": 2, "training": True, "scale": False, "epsilon": 0.1, "momentum": 0.3},
    ),
    "training, channels first, no center": ((3, 4), {"axis": 0, "training": True, "center": False}),
    "training, nothing to average over": ((4,), {"axis": 0, "training": True}),
    "training, negative axis": ((2, 3, 4), {"axis": -2, "training": True}),
    "running statistics": ((2, 3, 2, 2), {"axis": 1, "training": False}),
    "running statistics, negative axis, neither scale nor center": (
        (2, 2, 2, 3),
        {"axis": -1, "training": False, "scale": False, "center": False, "epsilon": 1e-2},
    ),
}


@register_samples("relax.nn.batch_norm")
def batch_norm(rng):
    for note, (shape, attrs) in _BATCH_NORM.items():
        inputs = _batch_norm_inputs(rng, shape, attrs["axis"])
        yield Sample(inputs, attrs, note=note)
    for training in (True, False):
        attrs = {"axis": 1, "training": training, "momentum": 0.2}
        yield Sample(
            _batch_norm_inputs(rng, (3, 2, 4), 1),
            attrs,
            function=_statistics_first,
            symbolic={0: {0: "n", 2: "w"}},
            note="symbolic extents around the channels",
        )
        yield Sample(
            _batch_norm_inputs(rng, (3, 2, 3, 2), 1),
            attrs,
            function=_first_result,
            wrt=[0, 1, 2],
            symbolic={0: {0: "n"}},
            torch=_torch_batch_norm(training),
            note="only the normalized data is used",
        )


def _batch_norm_inputs(rng, shape, axis):
    """Data with a mean, then gamma, beta, moving mean and moving variance."""
    channels = shape[axis]
    gamma = rng.choice([-1.0, 1.0], channels) * rng.uniform(0.5, 1.5, channels)
    beta, moving_mean = rng.normal(size=channels), rng.normal(size=channels)
    moving_var = rng.uniform(0.5, 1.5, channels)
    return [rng.normal(0.5, 1.0, shape), gamma, beta, moving_mean, moving_var]


def _first_result(*args, **attrs):
    return relax.TupleGetItem(relax.op.nn.batch_norm(*args, **attrs), 0)


def _statistics_first(*args, **attrs):
    """All results, the normalized data last.

    The stock pass starts the gradient of a tuple at the last use of an element, with zeros for the
    others; it cannot differentiate zeros of a symbolic shape again.
    """
    result = relax.op.nn.batch_norm(*args, **attrs)
    return relax.Tuple([relax.TupleGetItem(result, i) for i in (1, 2, 0)])


def _torch_batch_norm(training):
    def forward(torch, data, gamma, beta, moving_mean, moving_var):
        return torch.nn.functional.batch_norm(
            data, moving_mean.detach().clone(), moving_var.detach().clone(), gamma, beta, training
        )

    return forward
