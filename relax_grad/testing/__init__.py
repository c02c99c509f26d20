"""Checking gradients: :func:`check_gradients` and the samples of every operator."""

from .check import GradientReport, check_gradients
from .parity import TorchCase, check_against_torch, check_many_against_torch

__all__ = [
    "GradientReport",
    "TorchCase",
    "check_against_torch",
    "check_gradients",
    "check_many_against_torch",
]
