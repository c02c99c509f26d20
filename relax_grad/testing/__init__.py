"""Checking gradients: :func:`check_gradients` and the samples of every operator."""

from .check import GradientReport, check_gradients
from .parity import check_against_torch

__all__ = ["GradientReport", "check_against_torch", "check_gradients"]
