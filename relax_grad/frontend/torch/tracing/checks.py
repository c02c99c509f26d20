"""PyTorch functions that check values of tensors before they compute, which torch.export cannot
trace, and functions that it traces with other gradients.

The import leaves a check out: it only raises an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import distributions, nn

_DISTRIBUTIONS = os.path.dirname(distributions.__file__) + os.sep

#: The function by which distributions of PyTorch 2.15 and later check values, also while they are
#: exported.
_ASSERTED = "_all_true_or_runtime_assert"


def is_validation(function: Callable, caller: str) -> bool:
    """Tell whether a function decides for a file of torch.distributions whether values are
    valid."""
    return function is torch._is_all_true and caller.startswith(_DISTRIBUTIONS)


class _Floor(torch.autograd.Function):
    """A lower bound whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, least: float) -> torch.Tensor:
        return data.clamp(min=least)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cotangent, None


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the loss of ``torch.nn.functional.gaussian_nll_loss`` without a look for negative
    variances.

    That function clamps a variance within ``no_grad``, so that the gradient passes. Within a
    function of PyTorch, torch.export does not see the region.
    """
    if isinstance(var, torch.Tensor):
        var = _Floor.apply(var, eps)
    with mock.patch.object(torch, "any", return_value=False):
        return torch.nn.functional.gaussian_nll_loss(
            input, target, var, full, 0.0 if isinstance(var, torch.Tensor) else eps, reduction
        )


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | int | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the loss of ``torch.nn.functional.multi_margin_loss``.

    The graph of torch.export has the gradient of a clamp, which a class at the margin passes.
    """
    if type(size_average) is int:  # the reduction, in the function below PyTorch's public one
        reduction = ("none", "mean", "sum")[size_average]
    elif size_average is not None or reduce is not None:
        is_sum = size_average is False
        reduction = "none" if reduce is False else "sum" if is_sum else "mean"
    is_single = input.dim() < 2
    # torch.export takes an element of a constant tensor for a number.
    data, places = torch.atleast_2d(input), torch.as_tensor(target).reshape(-1, 1)
    size = margin - data.gather(1, places) + data
    counts = (size > 0) & (torch.arange(data.shape[1]) != places)
    size = torch.where(counts, size, 0.0) ** p
    if weight is not None:
        size = size * weight[places]
    loss = size.mean(1)
    if reduction == "none":
        return loss.squeeze(0) if is_single else loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _adaptive_softmax(
    module: nn.AdaptiveLogSoftmaxWithLoss, data: torch.Tensor, target: torch.Tensor
) -> tuple:
    """Return the logarithms of the targets' probabilities and the loss, with the logits of all
    clusters for each row."""
    is_single = target.dim() == 0
    if target.dim() > 1 or data.dim() != 2 - is_single:
        raise RuntimeError(
            f"the target has shape {tuple(target.shape)}, and the input {tuple(data.shape)}; "
            "expected are (N,) and (N, in_features), or () and (in_features,)"
        )
    if is_single:
        data, target = data.unsqueeze(0), target.unsqueeze(0)
    chances = module.log_prob(data).gather(1, target.unsqueeze(1)).squeeze(1)
    loss = (-chances).mean()
    return nn.modules.adaptive._ASMoutput(chances.squeeze(0) if is_single else chances, loss)


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Trace in this context: distributions and adaptive softmax check no values."""
    patch, module = mock.patch.object, distributions.distribution
    patches: list[Any] = [
        patch(distributions.Distribution, "_validate_args", False),
        patch(nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_softmax),
    ]
    if hasattr(module, _ASSERTED):
        patches.append(patch(module, _ASSERTED, return_value=True))
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
