"""Connectionist temporal classification as elementary functions, which torch.export can trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return the loss of ``torch.nn.functional.ctc_loss``, by the forward algorithm.

    Its gradient is PyTorch's, which includes ``log_softmax`` before it, also for numbers that are
    no logarithms of probabilities: ``exp(log_probs)`` minus the expected counts of the labels.
    """
    single = log_probs.ndim == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.unsqueeze(0) if targets.ndim == 1 else targets
    sizes, counts = (
        torch.as_tensor(lengths, dtype=torch.int64).reshape(-1)
        for lengths in (input_lengths, target_lengths)
    )
    targets = (_padded(targets, counts) if targets.ndim == 1 else targets).long()
    losses = _losses(log_probs, targets, sizes, counts, blank)
    power = log_probs.exp()
    inside = torch.arange(log_probs.shape[0]).unsqueeze(1) < sizes
    # The value of these terms is zero.
    losses = losses + torch.where(inside, (power - power.detach()).sum(2), 0.0).sum(0)
    impossible = losses > -_lowest(log_probs.dtype) / 2
    losses = torch.where(impossible, 0.0 if zero_infinity else torch.inf, losses)
    if reduction in ("mean", 1):
        return (losses / counts.clamp(min=1).to(losses)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses.squeeze(0) if single else losses


def _lowest(dtype: torch.dtype) -> float:
    """Return a finite number that is the logarithm of no probability."""
    return -1e300 if dtype == torch.float64 else -1e30


def _padded(targets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return joined targets as a matrix with a row for each sequence."""
    width = targets.shape[0]
    places = (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(width)
    return targets[places.clamp(max=width - 1)]


def _losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    sizes: torch.Tensor,
    counts: torch.Tensor,
    blank: int,
) -> torch.Tensor:
    """Return the negative logarithm of the probability of each sequence; a large number for those
    that are impossible."""
    low = _lowest(log_probs.dtype)
    batch, labels = targets.shape
    blanks = torch.full((batch, labels, 1), blank, dtype=torch.int64)
    states = torch.cat([blanks, targets.unsqueeze(2)], 2).flatten(1)
    states = torch.nn.functional.pad(states, (0, 1), value=blank)
    # A label may follow the one before it without a blank, if it is another one.
    skips = torch.cat(
        [
            torch.zeros(batch, min(2, states.shape[1]), dtype=torch.bool),
            (states[:, 2:] != states[:, :-2]) & (states[:, 2:] != blank),
        ],
        1,
    )
    known = log_probs.clamp(min=low)
    chance = torch.where(torch.arange(states.shape[1]) < 2, known[0].gather(1, states), low)
    for time in range(1, log_probs.shape[0]):
        own = known[time].gather(1, states)
        terms = [
            chance,
            _shifted(chance, 1, low),
            torch.where(skips, _shifted(chance, 2, low), low),
        ]
        reached = torch.stack(terms).logsumexp(0) + own
        chance = torch.where((sizes > time).unsqueeze(1), reached, chance)
    last = (2 * counts).unsqueeze(1)
    ends = [
        chance.gather(1, last),
        torch.where(last > 0, chance.gather(1, (last - 1).clamp(min=0)), low),
    ]
    return -torch.cat(ends, 1).logsumexp(1)


def _shifted(data: torch.Tensor, steps: int, fill: float) -> torch.Tensor:
    """Return rows whose elements are those some steps before."""
    width = data.shape[1]
    return torch.nn.functional.pad(data, (steps, 0), value=fill)[:, :width]
