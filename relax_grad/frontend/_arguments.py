"""Arguments that the imports of all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._validation import described

#: The names or patterns of weights to train, or a function of the name.
Trainable = str | Sequence[str] | Callable[[str], bool]


def check_trainable(trainable: object) -> None:
    """Raise TypeError if a value is neither names or patterns, nor a function of the name, nor
    None."""
    is_names = isinstance(trainable, Sequence) and all(isinstance(name, str) for name in trainable)
    if not (trainable is None or callable(trainable) or is_names):
        raise TypeError(
            "trainable must be names or patterns, a function of the name, or None, but it is "
            f"{described(trainable)}; names are such as [name for name, _ in "
            "model.named_parameters()]"
        )
