"""PyTorch functions that check values of tensors before they compute, which torch.export cannot
trace.

The import leaves such a check out: it only raises an error.
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


def is_validation(function: Callable, caller: str) -> bool:
    """Tell whether a function decides for a file of torch.distributions whether values are
    valid."""
    return function is torch._is_all_true and caller.startswith(_DISTRIBUTIONS)


def gaussian_nll_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the loss of ``torch.nn.functional.gaussian_nll_loss`` without a look for negative
    variances."""
    with mock.patch.object(torch, "any", return_value=False):
        return torch.nn.functional.gaussian_nll_loss(*args, **kwargs)


def _adaptive_softmax(module: nn.AdaptiveLogSoftmaxWithLoss, data, target):
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
    patch = mock.patch.object
    with (
        patch(distributions.Distribution, "_validate_args", False),
        patch(nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_softmax),
    ):
        yield
