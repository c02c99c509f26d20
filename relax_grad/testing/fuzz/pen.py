"""The writer of a random program's statements."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from .script import BATCH, Call, If, Kind, Let, Statement, Tensor, Value

#: A sine follows each value with a larger bound, so that rounding errors do not grow without limit.
LARGE = 6.0

#: The maximum number of elements of a tensor.
_MOST = 16 * BATCH


class Pen:
    """Writes the statements of one body.

    Parameters
    ----------
    rng : random.Random
        The random number generator.
    values : Sequence[Value]
        The values in scope.
    names : Iterator[str]
        Names for new variables.
    vocabulary : Sequence[tuple[Callable, int]]
        The entries that :func:`write` chooses from, with their weights.
    """

    def __init__(
        self,
        rng: random.Random,
        values: Sequence[Value],
        names: Iterator[str],
        vocabulary: Sequence,
    ):
        self.rng, self.names, self.vocabulary = rng, names, vocabulary
        self.values = list(values)
        self.statements: list[Statement] = []

    def name(self) -> str:
        return next(self.names)

    def add(self, statement: Let | Call | If, bound: float) -> Value:
        """Append a statement; its variable may be an operand of later statements."""
        self.statements.append(statement)
        value = Value(statement.name, statement.kind, bound)
        if bound > LARGE:
            return self.bind("R.sin({0})", lambda t, x: t.sin(x), [value], value.kind, 1.0)
        self.values.append(value)
        return value

    def try_bind(
        self,
        template: str,
        compute: Callable | None,
        operands: Sequence[Value],
        kind: Kind,
        bound: float,
        *,
        operators: tuple[str, ...] = (),
        is_smooth: bool = True,
    ) -> Value | None:
        """Bind a value, or return None if it is too large.

        ``operators`` and ``is_smooth`` are those of :class:`Let`.
        """
        if isinstance(kind, Tensor) and math.prod(kind.shape) > _MOST:
            return None
        return self.bind(
            template, compute, operands, kind, bound, operators=operators, is_smooth=is_smooth
        )

    def bind(
        self,
        template: str,
        compute: Callable | None,
        operands: Sequence[Value],
        kind: Kind,
        bound: float,
        *,
        operators: tuple[str, ...] = (),
        is_smooth: bool = True,
    ) -> Value:
        """Bind a value of any size; the arguments are as for :meth:`try_bind`."""
        let = Let(
            self.name(),
            template,
            compute,
            operands=tuple(operands),
            kind=kind,
            operators=operators,
            is_smooth=is_smooth,
        )
        return self.add(let, bound)

    def leaves(self, accept: Callable[[Tensor], object] = lambda tensor: True) -> list[Value]:
        """Return the accepted floating-point tensors, including elements of tuples."""
        return [
            leaf
            for value in self.values
            for leaf in value.leaves()
            if leaf.tensor.is_float and accept(leaf.tensor)
        ]

    def pick(self) -> Value:
        """Choose an operand, more often a recent one, so that programs become deep.

        Every program has floating-point tensors.
        """
        return self.choose(self.leaves())

    def pick_where(self, accept: Callable[[Tensor], object]) -> Value | None:
        """Choose an operand that is accepted, if there is one."""
        leaves = self.leaves(accept)
        return self.choose(leaves) if leaves else None

    def pick_like(self, tensor: Tensor) -> Value:
        """Choose an operand of the shape of one that is there."""
        return self.choose(self.leaves(lambda other: other.shape == tensor.shape))

    def choose(self, leaves: Sequence[Value]) -> Value:
        """Choose one of several values, more often a later one."""
        return self.rng.choice(leaves[-6:] if self.rng.random() < 0.6 else leaves)
