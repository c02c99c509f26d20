"""Gradient checks against central differences (:func:`check_gradients`) and PyTorch
(:func:`check_against_torch`).

The samples of every operator are in :mod:`relax_grad.testing.samples`.
"""

from .check import GradientCase, GradientReport, check_gradients
from .many import check_many_gradients
from .parity import TorchCase, check_against_torch, check_many_against_torch

__all__ = [
    "GradientCase",
    "GradientReport",
    "TorchCase",
    "check_against_torch",
    "check_gradients",
    "check_many_against_torch",
    "check_many_gradients",
]
