"""Gradient checks against central differences (:func:`check_gradients`) and PyTorch (:func:`check_against_torch`).

The samples of every operator are in :mod:`relax_grad.testing.samples`.
"""

from .check import GradientReport, check_gradients
from .parity import TorchCase, check_against_torch, check_many_against_torch

__all__ = [
    "GradientReport",
    "TorchCase",
    "check_against_torch",
    "check_gradients",
    "check_many_against_torch",
]
