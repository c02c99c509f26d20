"""The modes of modules during a trace: training or evaluation, and the statistics of batch
normalisations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def modes(owners: Mapping[str, nn.Module], training: bool) -> Iterator[None]:
    """Put modules into training or evaluation mode, and restore them at the end."""
    with contextlib.ExitStack() as stack:
        for module in owners.values():
            stack.enter_context(_mode(module, training))
        yield


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode, and restore the flags of its submodules at the
    end.

    A module in training mode keeps the flags of its submodules, some of which may be in evaluation
    mode.
    """
    flags = [(submodule, submodule.training) for submodule in module.modules()]
    if not (training and module.training):
        module.train(training)
    try:
        yield
    finally:
        for submodule, flag in flags:
            submodule.training = flag


def flags_of(owners: Mapping[str, nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Return the modes of all submodules."""
    modules = (submodule for module in owners.values() for submodule in module.modules())
    return [(submodule, submodule.training) for submodule in modules]


@contextlib.contextmanager
def with_flags(
    owners: Mapping[str, nn.Module], flags: list[tuple[nn.Module, bool]]
) -> Iterator[None]:
    """Put submodules into these modes, and restore theirs at the end."""
    old = flags_of(owners)
    for submodule, flag in flags:
        submodule.training = flag
    try:
        yield
    finally:
        for submodule, flag in old:
            submodule.training = flag


@contextlib.contextmanager
def frozen_statistics(owners: Mapping[str, nn.Module], batch_norm: str) -> Iterator[None]:
    """Put batch normalisations with running statistics into evaluation mode, if that is asked
    for."""
    norms = [
        submodule
        for module in owners.values()
        for submodule in module.modules()
        if isinstance(submodule, _BatchNorm)
        and submodule.running_mean is not None
        and submodule.training
    ]
    norms = norms if batch_norm == "frozen" else []
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


@contextlib.contextmanager
def averaging_statistics() -> Iterator[None]:
    """Let batch normalisations whose momentum is None compute it as a tensor, and not as a number
    of Python.

    A subclass that defines a forward function, which may call this one, keeps it.
    """
    forward = _BatchNorm.forward

    def averaging(norm: _BatchNorm, data: torch.Tensor) -> torch.Tensor:
        is_average = norm.momentum is None and norm.running_mean is not None
        return _average(norm, data) if is_average else forward(norm, data)

    with mock.patch.object(_BatchNorm, "forward", averaging):
        yield


def _average(norm: _BatchNorm, data: torch.Tensor) -> torch.Tensor:
    """Normalise with running statistics that are the averages over all batches."""
    norm._check_input_dim(data)
    functional = torch.nn.functional.batch_norm
    if not norm.training:
        statistics = norm.running_mean, norm.running_var
        return functional(data, *statistics, norm.weight, norm.bias, False, 0.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    old = norm.running_mean.clone(), norm.running_var.clone()
    result = functional(
        data, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 1.0, norm.eps
    )
    # With momentum 1, the running statistics are the batch's.
    with torch.no_grad():
        share = 1.0 / norm.num_batches_tracked.to(norm.running_mean.dtype)
        for running, before in zip((norm.running_mean, norm.running_var), old, strict=True):
            running.copy_(running * share + before * (1.0 - share))
    return result
