"""Samples of the losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

# The shape of the predictions, targets instead of random ones, the attributes, and whether it
# has weights.
_NLL_LOSS = {
    "plain": ((4, 3), (), {}, False),
    "weights": ((4, 3), (), {}, True),
    "weights and an ignored target outside of the classes": ((5, 3), (-100, -100), {}, True),
    "an ignored target above the classes": ((4, 3), (255,), {"ignore_index": 255}, True),
    "an ignored class": ((6, 3), (1, 1), {"ignore_index": 1, "reduction": "sum"}, True),
    "no reduction": ((5, 3), (-1,), {"ignore_index": -1, "reduction": "none"}, True),
    "no weights, no reduction": ((3, 2, 2), (-100,), {"reduction": "none"}, False),
    "an image": ((2, 4, 2, 3), (-100, -100), {}, True),
    "one class": ((3, 1), (), {}, True),
}


@register_samples("relax.nn.nll_loss")
def nll_loss(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, special, attrs, weighted) in _NLL_LOSS.items():
        yield _nll_loss(rng, shape, special, attrs, weighted, note)
    for reduction in ("mean", "sum", "none"):
        yield _nll_loss(
            rng, (4,), (), {"reduction": reduction}, True, f"no batch, {reduction}", None
        )
    yield _nll_loss(
        rng, (3, 4), (), {}, True, "int32 targets, used repeatedly", targets=np.int32([2, 2, 0])
    )
    yield _nll_loss(rng, (2, 3), (-100, -100), {"reduction": "sum"}, True, "nothing but ignored")


def _nll_loss(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    special: Any,
    attrs: Any,
    weighted: bool,
    note: str,
    batch: Any = "n",
    targets: Any = None,
) -> Sample:
    if targets is None:
        targets = rng.integers(0, shape[0 if len(shape) == 1 else 1], shape[:1] + shape[2:])
        targets = np.asarray(targets if len(shape) > 1 else targets[0])
        targets.reshape(-1)[: len(special)] = special
    inputs = [rng.normal(size=shape), targets]
    if weighted:
        inputs.append(rng.uniform(0.5, 1.5, shape[0 if len(shape) == 1 else 1]))
    return Sample(
        inputs,
        attrs,
        symbolic={0: {0: batch}, 1: {0: batch}} if batch else None,
        torch=_torch_weighted(**attrs) if weighted else _torch_nll_loss(**attrs),
        note=note,
    )


def _torch_nll_loss(**attrs: Any) -> Callable[..., Any]:
    def forward(torch: Any, predictions: Any, targets: Any) -> Any:
        return torch.nn.functional.nll_loss(predictions, targets, **attrs)

    return forward


def _torch_weighted(reduction: str = "mean", ignore_index: Any = -100) -> Callable[..., Any]:
    """Return nll_loss composed of operators, since PyTorch cannot differentiate its own by the
    weights."""

    def forward(torch: Any, predictions: Any, targets: Any, weights: Any) -> Any:
        counted = targets != ignore_index
        classes = torch.where(counted, targets, 0).long()
        by_class = predictions.movedim(0 if predictions.ndim == 1 else 1, -1)
        factors = weights[classes] * counted
        losses = -by_class.gather(-1, classes[..., None])[..., 0] * factors
        if reduction == "none":
            return losses
        return losses.sum() / (factors.sum() if reduction == "mean" else 1)

    return forward


@register_samples("relax.nn.cross_entropy_with_logits")
def cross_entropy_with_logits(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in ((4, 3), (2, 3, 2), (5,), (1, 3)):
        batch = {0: "n"}
        yield Sample(
            [rng.normal(size=shape), rng.uniform(size=shape)],
            symbolic={0: batch, 1: batch},
            torch=_torch_cross_entropy_with_logits,
            note=f"{len(shape)} dimensions",
        )


def _torch_cross_entropy_with_logits(torch: Any, predictions: Any, labels: Any) -> Any:
    return -(predictions * labels).sum() / (len(predictions) if predictions.ndim > 1 else 1)


@register_samples("relax.grad.nll_loss_backward")
def nll_loss_backward(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (grad, inputs, attrs) in _backward_cases(rng).items():
        yield Sample([grad, *inputs], attrs, wrt=[0, 3], note=note)


@register_samples("relax.grad.nll_loss_backward_weights")
def nll_loss_backward_weights(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (grad, inputs, attrs) in _backward_cases(rng).items():
        yield Sample([grad, *inputs], attrs, wrt=[0, 1, 3], note=note)


def _backward_cases(rng: np.random.Generator) -> dict[str, tuple]:
    """Return the gradient of the loss, its inputs and its attributes, for two reductions."""
    weights, targets = rng.uniform(0.5, 1.5, 3), np.array([0, 2, -100, 2])
    inputs = [rng.normal(size=(4, 3)), targets, weights]
    return {
        "mean": (rng.normal(size=()), inputs, {"reduction": "mean"}),
        "no reduction": (rng.normal(size=4), inputs, {"reduction": "none"}),
    }


@register_samples("relax.grad.cross_entropy_with_logits_backward")
def cross_entropy_with_logits_backward(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample(
        [rng.normal(size=()), rng.normal(size=(3, 2))], symbolic={1: {0: "n"}}, note="a batch"
    )
    yield Sample([rng.normal(size=()), rng.normal(size=4)], note="a vector")
