"""Imports of packages of PyTorch models."""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch


def torchvision():
    """Return torchvision, which timm and transformers import.

    Where its binary library does not fit PyTorch, the operators are missing that its import takes
    as given.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it exists
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            )
    return importlib.import_module("torchvision")
