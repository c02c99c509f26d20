"""Parts of random functions that their stages share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import language as ir
from .expressions import DTYPES, Range, Readable, Scope, index
from .nests import Loops, axes_of, indices_of


@dataclass
class Parts:
    """The state of a function while it is drawn, and the parts that its stages share.

    Attributes
    ----------
    kinds : set[str]
        The set to which the kinds of the drawn constructs are added.
    sizes : Sequence[int]
        Extents to choose from.
    is_plain : bool
        Whether all blocks have one store and loops in the form of tensor expressions.
    """

    rng: random.Random
    kinds: set[str]
    sizes: Sequence[int]
    is_plain: bool = False
    readable: list[Readable] = field(default_factory=list)
    writable: list[Readable] = field(default_factory=list)
    allocated: list[ir.Buffer] = field(default_factory=list)
    body: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = (f"i{k}" for k in itertools.count())
        self.blocks = (f"b{k}" for k in itertools.count())
        self.loops = Loops(self.rng, self.names, self.kinds, self.is_plain)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> ir.Buffer:
        self.kinds.add("allocated")
        buffer = ir.Buffer(f"C{len(self.allocated)}", shape, dtype)
        self.allocated.append(buffer)
        return buffer

    def shape(self) -> tuple[int, ...]:
        known = [item.buffer.shape for item in self.readable if item.buffer.shape]
        if known and self.rng.random() < 0.7:
            return self.rng.choice(known)
        rank = self.rng.choice([0, 1, 1, 2, 2, 3])
        return tuple(self.rng.choice(self.sizes) for _ in range(rank))

    def dtype(self) -> str:
        known = [item.buffer.dtype for item in self.readable]
        if known and self.rng.random() < 0.6:
            return self.rng.choice(known)
        return self.rng.choices(list(DTYPES), list(DTYPES.values()))[0]

    def add(self, buffer: ir.Buffer, known: Range) -> Readable:
        """Make a tensor readable and writable in later stages."""
        readable = Readable(buffer, known.rounded(buffer.dtype))
        self.readable.append(readable)
        self.writable.append(readable)
        return readable

    def scope(self, axes: Sequence[tuple[str, str, int]], but: ir.Buffer | None = None) -> Scope:
        readable = [item for item in self.readable if item.buffer != but]
        return Scope(self.rng, self.names, readable, indices_of(axes), self.kinds)

    def spatial(self, shape: Sequence[int]) -> list[tuple[str, str, int]]:
        return axes_of([f"v{next(self.names)}" for _ in shape], "spatial", shape)

    def emit(self, statements: Sequence) -> None:
        self.body += statements

    def map(self, buffer: ir.Buffer) -> Range:
        """Write each element by itself; :class:`.whole.Whole` draws such blocks."""
        raise NotImplementedError

    def fill(self, buffer: ir.Buffer, value: ir.Expr, is_partial: bool = False) -> None:
        """Write one value to all elements."""
        axes = self.spatial(buffer.shape)
        store = ir.Store(buffer.name, names_of(axes), value)
        self.emit(self.loops.nest(axes, is_partial=is_partial).block(next(self.blocks), [store]))


def names_of(axes: Sequence[tuple[str, str, int]]) -> tuple[ir.Name, ...]:
    """Return the variables of axes as indices."""
    return tuple(ir.Name(name) for name, _, _ in axes)


def plus(name: ir.Expr, value: int) -> ir.Expr:
    """Return an index plus a constant."""
    return ir.Op("add", (name, index(value)), ir.INDEX) if value else name
