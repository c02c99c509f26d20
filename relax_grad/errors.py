"""The exceptions that relax_grad raises.

Each class is stable, and has the place of its description in the documentation of relax_grad as its
attribute ``page``. From Python 3.11 on, a traceback ends with it.
"""

from __future__ import annotations

from typing import ClassVar

from tvm_ffi import register_error

__all__ = [
    "BrokenTrainerError",
    "GradientCheckError",
    "GradientError",
    "NotWellFormedError",
    "ScheduleWarning",
    "UnsupportedOperatorError",
]


class _Explained(Exception):
    """An exception that a page of the documentation explains.

    Attributes
    ----------
    page : str
        The file and the section of the sources of relax_grad.
    """

    page: ClassVar[str] = "docs/errors.md"

    def __init__(self, *args: object):
        super().__init__(*args)
        if hasattr(self, "add_note"):  # Python 3.11
            self.add_note(f"See {self.page} of relax_grad.")


@register_error  # keeps its class when it passes through TVM's C++ code
class GradientError(_Explained, ValueError):
    """A gradient cannot be computed for a call, or cannot be right.

    The message names the operator, the binding and the reason.
    """

    page = "docs/errors.md#gradienterror"


class GradientCheckError(_Explained, AssertionError):
    """A gradient disagrees with its reference values."""

    page = "docs/errors.md#gradientcheckerror"


class UnsupportedOperatorError(_Explained, NotImplementedError):
    """A model of another framework has operators that cannot be imported.

    The message lists all operators without a converter, with their nodes, or gives the reason for
    one node.
    """

    page = "docs/errors.md#unsupportedoperatorerror"


@register_error
class NotWellFormedError(_Explained, ValueError):
    """A function uses a variable that is not defined, or binds one twice.

    The message names the function and the variables, and ends with TVM's diagnosis.
    """

    page = "docs/errors.md#notwellformederror"


class BrokenTrainerError(_Explained, RuntimeError):
    """A step of a trainer did not end, so that its state may be incomplete.

    The trainer takes no call but :meth:`relax_grad.training.Trainer.load`.
    """

    page = "docs/errors.md#brokentrainererror"


class ScheduleWarning(RuntimeWarning):
    """A tensor function is compiled without the schedules of the pipeline.

    The message names the function and the reason.
    """
