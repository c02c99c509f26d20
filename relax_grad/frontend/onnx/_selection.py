"""The tensors of a model to train, and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..._validation import alternatives, matches
from .._arguments import Trainable
from .._explanation import Explanation, Role

if TYPE_CHECKING:
    from .graph.weights import Roles


def wanted(trainable: Trainable | None) -> Callable[[str], bool]:
    """Return the function that tells whether a tensor may be trained on request only."""
    if trainable is None or callable(trainable):
        return lambda name: False
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    return lambda name: any(matches(name, pattern) for pattern in patterns)


def chosen(trainable: Trainable | None, roles: Roles) -> list[str]:
    """Return the weights to train, in the order of the model."""
    weights, others = roles.weights, [*roles.frozen, *roles.optional]
    if trainable is None:
        return list(weights)
    if callable(trainable):
        return [name for name in weights if trainable(name)]
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    selected = set()
    for pattern in patterns:
        matching = [name for name in weights if matches(name, pattern)]
        matching += [name for name in others if name == pattern]
        matching = matching or [name for name in others if matches(name, pattern)]
        if not matching:
            raise ValueError(f"trainable: {_why_not(pattern, roles)}")
        selected.update(matching)
    return [name for name in [*weights, *others] if name in selected]


def _why_not(pattern: str, roles: Roles) -> str:
    """Return why no weight matches a pattern."""
    if pattern in roles.statistics:
        return f"{pattern} is a running statistic of a normalisation, which no gradient reaches"
    if pattern in roles.settings:
        return (
            f"{pattern} is a shape, a bound or a scale of the node {roles.settings[pattern]}, "
            "which stays a constant"
        )
    if pattern in roles.cut:
        return (
            f"no gradient reaches {pattern}, because its way to the outputs ends at the "
            f"{roles.cut[pattern]}, whose gradient is 0"
        )
    if pattern in roles.copies:
        original = roles.copies[pattern].original
        return f"{pattern} is {roles.copies[pattern]}; select {original}, or give tied=False"
    integers = [name for name in roles.integers if matches(name, pattern)]
    if integers:
        return f"{integers[0]} cannot be trained: {_of_integers(roles.integers[integers[0]])}"
    known = [*roles.weights, *roles.frozen, *roles.optional]
    return f"no weight matches {pattern!r}; {alternatives(pattern, known)}"


def _of_integers(user: str) -> str:
    """Return why a weight of integers is not trained; ``user`` is the node that takes it."""
    return (
        f"it holds integers, as operand of {user}; quantise with float weights after "
        "QuantizeLinear to train it"
    )


def explained(roles: Roles, params: Sequence[str], trainable: Trainable | None) -> Explanation:
    """Return the roles of all constants with the reasons."""
    explanation = Explanation()
    for name, choice in roles.choices.items():
        kind, reason = "constant", choice.reason
        if name in params:
            kind = "trained"
            reason = reason if choice.is_trained else "trainable selects it"
        elif name in roles.weights:
            kind, reason = "frozen", "trainable does not select it"
        elif name in roles.frozen:
            kind = "frozen"
        if name in params and name in roles.equal:
            other = roles.equal[name]
            reason += (
                f"; it has the values of {other}, and trains apart: to train them as one, give "
                f"tied={{{name!r}: {other.original!r}}}"
            )
        explanation[name] = Role(kind, reason)
    for name in roles.statistics:
        kind = "state" if name in roles.states else "frozen"
        explanation[name] = Role(kind, "it is a running statistic of a normalisation")
    for name, user in roles.settings.items():
        explanation.setdefault(
            name, Role("constant", f"it is a shape, a bound or a scale of {user}")
        )
    for name, copy in roles.copies.items():
        if copy.original in explanation:
            explanation[name] = Role(explanation[copy.original].kind, f"it is {copy}: they are one")
    for name, end in roles.cut.items():
        explanation.setdefault(name, Role("constant", f"no gradient passes the {end}"))
    for name, user in roles.integers.items():
        explanation.setdefault(name, Role("constant", _of_integers(user)))
    return explanation
