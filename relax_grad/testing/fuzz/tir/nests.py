"""Random loop nests around a block: the bindings of its axes, the order of loops, and
annotations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import language as ir
from .expressions import Index, index


@dataclass
class Nest:
    """Loops and the axes that they bind.

    Attributes
    ----------
    loops : list[For]
        The loops without their bodies, the outer ones first.
    axes : list[Axis]
        The axes of the block.
    where : expression or None
        The predicate of the block.
    """

    loops: list[ir.For] = field(default_factory=list)
    axes: list[ir.Axis] = field(default_factory=list)
    where: ir.Expr | None = None

    def around(self, statements: Sequence) -> tuple[ir.Statement, ...]:
        """Return the loops around statements."""
        body: tuple[ir.Statement, ...] = tuple(statements)
        for loop in reversed(self.loops):
            body = (ir.For(loop.name, loop.start, loop.extent, body, loop.kind),)
        return body

    def block(
        self, name: str, body: Sequence, init: Sequence = (), allocated: tuple[ir.Buffer, ...] = ()
    ) -> tuple:
        """Return the loops around a block of statements."""
        block = ir.Block(
            name,
            tuple(self.axes),
            tuple(body),
            init=tuple(init),
            where=self.where,
            allocated=allocated,
        )
        return self.around([block])


@dataclass
class Loops:
    """Draws loops.

    Attributes
    ----------
    names : Iterator[str]
        Unused names.
    kinds : set[str]
        The set to which the kinds of the drawn constructs are added.
    is_plain : bool
        Whether all loops have the form of TVM's tensor expressions; some may be shorter than their
        axis.
    """

    rng: random.Random
    names: Iterator[str]
    kinds: set[str]
    is_plain: bool = False

    def nest(
        self,
        axes: Sequence[tuple[str, str, int]],
        *,
        is_partial: bool = False,
        is_independent: bool = True,
    ) -> Nest:
        """Return the loops of a block.

        Parameters
        ----------
        axes : Sequence[tuple[str, str, int]]
            The name, the kind and the extent of each axis.
        is_partial : bool
            Whether the loops may omit some of the elements.
        is_independent : bool
            Whether the iterations may run in any order, except in reductions.
        """
        nest = Nest()
        if self.is_plain:
            for name, kind, size in axes:
                self.bind(nest, name, kind, size, is_partial and self.rng.random() < 0.3)
            return nest
        is_fused = len(axes) > 1 and self.rng.random() < 0.12
        if is_fused and all(size % ir.BATCH for _, _, size in axes):
            self.fused(nest, axes)
        else:
            for name, kind, size in axes:
                self.bind(nest, name, kind, size, is_partial and self.rng.random() < 0.6)
            if is_independent and self.rng.random() < 0.25:
                self.rng.shuffle(nest.loops)
                self.kinds.add("loop_order")
        if is_partial and nest.loops and self.rng.random() < 0.25:
            self.restrict(nest, nest.loops[-1])
        if is_independent and self.rng.random() < 0.35:
            self.annotate(nest)
        return nest

    def opaque(self, axes: Sequence[tuple[str, str, int]]) -> Nest:
        """Return plain loops that bind no axes, for use within a block."""
        zero = index(0)
        return Nest([ir.For(name, zero, ir.Size(size), ()) for name, _, size in axes])

    def loop(self, nest: Nest, start: int, extent: ir.Expr) -> ir.Name:
        name = next(self.names)
        nest.loops.append(ir.For(name, index(start), extent, ()))
        return ir.Name(name)

    def bind(self, nest: Nest, name: str, kind: str, size: int, is_partial: bool) -> None:
        """Add an axis with its loops."""
        least = min(ir.extent_at(size, n) for n in ir.BATCHES) if size % ir.BATCH == 0 else size
        ways = [self.plain] * 6 + [self.reversed, self.moved]
        if size % ir.BATCH or size == ir.BATCH:
            ways += [self.predicated]
        if size > 3 and _divisors(size):
            ways += [self.split] * 2
        if size == 1:
            ways = [self.plain, self.unit]
        if is_partial and least > 1:
            ways = [self.short, self.late, self.offset, self.late_domain, self.strided]
        if self.is_plain:
            ways = [self.short] if is_partial and least > 1 else [self.plain]
        way = self.rng.choice(ways)
        if way != self.plain:
            self.kinds.add(f"bind_{way.__name__}")
        start, extent, value = way(nest, size)
        nest.axes.append(ir.Axis(name, kind, index(start), extent, value))

    def plain(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        return 0, ir.Size(size), self.loop(nest, 0, ir.Size(size))

    def unit(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        return 0, ir.Size(size), index(0)

    def reversed(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        i = self.loop(nest, 0, ir.Size(size))
        last = _op("subtract", ir.Size(size), index(1))
        return 0, ir.Size(size), _op("subtract", last, i)

    def moved(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        """Add a loop that does not start at 0, and a binding that subtracts its start."""
        start = self.rng.randint(1, 3)
        i = self.loop(nest, start, ir.Size(size))
        return 0, ir.Size(size), _op("subtract", i, index(start))

    def split(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        inner = self.rng.choice(_divisors(size))
        i, j = self.loop(nest, 0, ir.Size(size // inner)), self.loop(nest, 0, ir.Size(inner))
        return 0, ir.Size(size), _op("add", _op("multiply", i, index(inner)), j)

    def predicated(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        """Add two loops that may have more iterations than the axis, and a predicate."""
        inner = self.rng.choice([2, 3, 4])
        outer = _op("floordiv", _op("add", ir.Size(size), index(inner - 1)), index(inner))
        i, j = self.loop(nest, 0, outer), self.loop(nest, 0, index(inner))
        value = _op("add", _op("multiply", i, index(inner)), j)
        _require(nest, ir.Op("less", (value, ir.Size(size)), "bool"))
        return 0, ir.Size(size), value

    # Loops over some of the elements

    def short(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        i = self.loop(nest, 0, _op("subtract", ir.Size(size), index(1)))
        return 0, ir.Size(size), i

    def late(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        i = self.loop(nest, 1, _op("subtract", ir.Size(size), index(1)))
        return 0, ir.Size(size), i

    def offset(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        i = self.loop(nest, 0, _op("subtract", ir.Size(size), index(1)))
        return 0, ir.Size(size), _op("add", i, index(1))

    def late_domain(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        extent = _op("subtract", ir.Size(size), index(1))
        return 1, extent, _op("add", self.loop(nest, 0, extent), index(1))

    def strided(self, nest: Nest, size: int) -> tuple[int, ir.Expr, ir.Expr]:
        i = self.loop(nest, 0, _op("floordiv", _op("add", ir.Size(size), index(1)), index(2)))
        return 0, ir.Size(size), _op("multiply", i, index(2))

    def restrict(self, nest: Nest, loop: ir.For) -> None:
        """Add a predicate on a loop."""
        self.kinds.add("where")
        name = ir.Name(loop.name)
        if self.rng.random() < 0.5:
            condition = ir.Op("less_equal", (index(1), name), "bool")
        else:
            condition = ir.Op("equal", (_op("floormod", name, index(2)), index(0)), "bool")
        _require(nest, condition)

    # All axes

    def fused(self, nest: Nest, axes: Sequence[tuple[str, str, int]]) -> None:
        """Bind all axes by one loop."""
        self.kinds.add("bind_fused")
        total = 1
        for _, _, size in axes:
            total *= size
        i = self.loop(nest, 0, index(total))
        inner = total
        for k, (name, kind, size) in enumerate(axes):
            inner //= size
            value = i if inner == 1 else _op("floordiv", i, index(inner))
            if k:
                value = _op("floormod", value, index(size))
            nest.axes.append(ir.Axis(name, kind, index(0), ir.Size(size), value))

    def annotate(self, nest: Nest) -> None:
        """Mark the outermost loop as parallel, or the innermost loop as vectorized or unrolled."""
        reduced = {
            node.name
            for axis in nest.axes
            if axis.kind != "spatial"
            for node in ir.nodes(axis.value)
            if isinstance(node, ir.Name)
        }
        at, kind = self.rng.choice([(0, "parallel"), (-1, "vectorized"), (-1, "unroll")])
        if not nest.loops or nest.loops[at].name in reduced:
            return
        loop = nest.loops[at]
        is_constant = isinstance(loop.extent, ir.Const) or (
            isinstance(loop.extent, ir.Size) and loop.extent.size % ir.BATCH
        )
        if kind == "parallel" or is_constant:
            self.kinds.add(kind)
            nest.loops[at] = ir.For(loop.name, loop.start, loop.extent, (), kind)


def axes_of(names: Sequence[str], kind: str, shape: Sequence[int]) -> list[tuple[str, str, int]]:
    """Return axes of the same kind."""
    return [(name, kind, size) for name, size in zip(names, shape, strict=True)]


def indices_of(axes: Sequence[tuple[str, str, int]]) -> list[Index]:
    """Return the variables of axes."""
    return [Index(name, size) for name, _, size in axes]


def _require(nest: Nest, condition: Any) -> None:
    nest.where = condition if nest.where is None else ir.Op("and", (nest.where, condition), "bool")


def _divisors(size: int) -> list[int]:
    return [d for d in range(2, size) if size % d == 0 and d % ir.BATCH]


def _op(name: str, x: Any, y: Any) -> ir.Op:
    return ir.Op(name, (x, y), ir.INDEX)
