"""The exceptions that relax_grad raises."""

from __future__ import annotations

from tvm_ffi import register_error


@register_error  # keeps its class when it passes through TVM's C++ code
class GradientError(ValueError):
    """A gradient cannot be computed for a call, or cannot be right.

    The message names the operator, the binding and the reason.
    """


class GradientCheckError(AssertionError):
    """A gradient disagrees with its reference values."""


class UnsupportedOperatorError(NotImplementedError):
    """A model of another framework has operators that cannot be imported.

    The message lists all operators without a converter, with their nodes, or gives the reason for one node.
    """


class ScheduleWarning(RuntimeWarning):
    """A tensor function is compiled without the schedules of the pipeline.

    The message names the function and the reason.
    """
