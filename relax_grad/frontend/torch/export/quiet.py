"""torch.export without its own warnings."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.export._trace

#: The loggers of PyTorch that repeat errors, which are raised too.
_LOGGERS = (
    *("torch.export", "torch._export", "torch.fx"),
    *("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"),
)


def _unprinted(*args: Any, **kwargs: Any) -> None:
    """Print nothing."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of torch.export, which are about torch.export itself, and the graph that it
    prints after an error."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            with mock.patch.object(torch.export._trace, "print", _unprinted, create=True):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
