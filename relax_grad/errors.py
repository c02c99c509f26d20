"""The exceptions that relax_grad raises."""

from __future__ import annotations


class GradientError(ValueError):
    """A gradient rule cannot be right for this call.

    The message names the operator, the binding and the reason.
    """


class GradientCheckError(AssertionError):
    """A gradient disagrees with the numbers that it was checked against."""
