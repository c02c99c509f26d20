"""The names of the optimizer's state and of hyperparameters.

A slot is ``KIND/PARAMETER``, such as ``exp_avg/fc.weight``, or ``KIND`` alone for a scalar of the
step. A hyperparameter is ``KIND``, or ``KIND:PATTERN`` for a group of parameters. Names of
parameters may have slashes and colons, kinds have none.
"""

from __future__ import annotations

from typing import NamedTuple

#: The scalars of every step: the number of updates, and the two of dynamic loss scaling, which a
#: step that is not finite changes.
STEP, LOSS_SCALE, GOOD_STEPS = "step", "loss_scale", "good_steps"
SCALE_SLOTS = (LOSS_SCALE, GOOD_STEPS)

#: The kinds of slots that optimizers do not define: the copy in float32 of a parameter in half
#: precision, the moving average of a parameter, and the sum of gradients of several batches.
MASTER, EMA, GRADIENT = "master", "ema", "gradient"

#: The kinds of hyperparameters that groups of parameters have.
LR, WEIGHT_DECAY = "lr", "weight_decay"


class Slot(NamedTuple):
    """A tensor of the optimizer's state.

    Attributes
    ----------
    kind : str
        The kind.
    param : str or None
        The name of the parameter; None for a scalar of the step.
    """

    kind: str
    param: str | None = None

    @classmethod
    def parse(cls, name: str) -> Slot:
        """Return the slot of a name."""
        kind, slash, param = name.partition("/")
        return cls(kind, param if slash else None)

    def __str__(self) -> str:
        return self.kind if self.param is None else f"{self.kind}/{self.param}"


class Hyperparameter(NamedTuple):
    """A scalar that a step takes.

    Attributes
    ----------
    kind : str
        The kind, such as ``lr``.
    pattern : str or None
        The pattern of the names of a group of parameters; None if all parameters have the same
        optimizer.
    """

    kind: str
    pattern: str | None = None

    @classmethod
    def parse(cls, name: str) -> Hyperparameter:
        """Return the hyperparameter of a name."""
        kind, colon, pattern = name.partition(":")
        return cls(kind, pattern if colon else None)

    def __str__(self) -> str:
        return self.kind if self.pattern is None else f"{self.kind}:{self.pattern}"
