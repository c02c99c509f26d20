"""The outcome of a step: whether its results are kept, and which counters grow."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The outcome of a step, unless it raises an error.

    Attributes
    ----------
    raises : bool
        Whether the step is an error for a caller who skips no steps. Everything then stays as it
        was.
    takes_results : bool
        Whether parameters, states and the optimizer's state are those that the step returned.
    is_skipped : bool
        Whether it counts as a skipped step.
    is_applied : bool
        Whether its gradient had an effect: on the parameters, or on the sums of several batches.
    """

    raises: bool
    takes_results: bool
    is_skipped: bool
    is_applied: bool


#: The outcomes by three facts: the loss is finite; the metric ``applied`` is 1, as it is without
#: this metric; and the step has dynamic loss scaling. A scale takes its new value from every step.
#: runtime/outcome.h has the same table, and a test compares both.
OUTCOMES = {
    (True, True, False): Outcome(False, True, False, True),
    (True, True, True): Outcome(False, True, False, True),
    # A gradient is not finite: the scale was too large, or the batch is bad.
    (True, False, True): Outcome(False, True, True, False),
    (True, False, False): Outcome(True, False, True, False),
    # The loss is not finite, with finite gradients or not: no scale helps.
    (False, True, False): Outcome(True, False, True, False),
    (False, False, False): Outcome(True, False, True, False),
    (False, True, True): Outcome(True, True, True, False),
    (False, False, True): Outcome(True, True, True, False),
}


def is_update(steps: int, skipped: int, accumulate: int) -> bool:
    """Return whether the next step updates the parameters, and does not only add its gradient to a
    sum.

    Skipped batches do not count towards accumulation.

    Parameters
    ----------
    steps, skipped : int
        The numbers of steps and of skipped steps.
    accumulate : int
        The number of batches for each update.
    """
    return (steps - skipped + 1) % accumulate == 0
