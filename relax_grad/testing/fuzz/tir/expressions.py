"""Random expressions with bounds on their values, so that sums and products are exact and do not
overflow."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import language as ir
from .operations import CAST, CHOICE

#: The largest magnitudes that programs compute, by dtype.
LIMITS = {
    "float16": 200.0,
    "bfloat16": 60.0,
    "float32": 4096.0,
    "float64": 1e6,
    "int8": 100.0,
    "int32": 1e6,
    "int64": 1e9,
    "uint8": 200.0,
    "bool": 1.0,
}

#: The bits of the significand, by dtype.
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}

#: The dtypes of programs, with their weights.
DTYPES = {
    "float32": 10,
    "float64": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 3,
    "int64": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

#: The fractional bits of values that depend on rounding.
ROUNDED = math.inf


def is_float(dtype: str) -> bool:
    """Tell whether numbers of a dtype have fractions."""
    return dtype in _BITS


@dataclass(frozen=True)
class Range:
    """Bounds on the magnitude of values and on the number of their fractional bits."""

    bound: float
    bits: float = 0

    def is_exact(self, dtype: str) -> bool:
        if dtype not in _BITS:
            return True
        return math.log2(max(1.0, self.bound)) + self.bits <= _BITS[dtype]

    def rounded(self, dtype: str) -> Range:
        """Return the bounds of the values after conversion to a dtype."""
        return self if self.is_exact(dtype) else Range(self.bound, ROUNDED)

    def joined(self, other: Range) -> Range:
        return Range(max(self.bound, other.bound), max(self.bits, other.bits))


@dataclass
class Readable:
    """A buffer whose elements may all be read.

    Attributes
    ----------
    below : int or None
        The exclusive upper bound of its values, if they are indices.
    """

    buffer: ir.Buffer
    range: Range
    below: int | None = None


@dataclass(frozen=True)
class Index:
    """A variable that runs from 0 to an extent."""

    name: str
    extent: int


@dataclass
class Scope:
    """The names, buffers and axes that an expression may use."""

    rng: random.Random
    names: Iterator[str]
    readable: Sequence[Readable]
    axes: Sequence[Index]
    kinds: set[str]
    bound: dict = field(default_factory=dict)  # names of values, with their dtypes and ranges

    # Numbers

    def expr(self, dtype: str, depth: int = 3) -> tuple[ir.Expr, Range]:
        """Return an expression and the bounds of its values."""
        if depth <= 0 or self.rng.random() < 0.15:
            return self.leaf(dtype)
        if dtype == "bool":
            return self.condition(depth), Range(1)
        ways = [self.arithmetic] * 8 + [self.choice] * 2 + [self.padded] * 2 + [self.let]
        if dtype in ("float32", "float64"):
            ways += [self.function]
        if dtype.startswith("int"):
            ways += [self.division] * 2
        if self.rng.random() < 0.1:
            ways = [self.cast]
        expr, known = self.rng.choice(ways)(dtype, depth - 1)
        return limited(expr, known, dtype)

    def leaf(self, dtype: str) -> tuple[ir.Expr, Range]:
        known = [
            name
            for name, (kind, _) in self.bound.items()
            if kind == dtype and self.rng.random() < 0.7
        ]
        if known:
            name = self.rng.choice(known)
            return ir.Name(name, dtype), self.bound[name][1]
        readable = [item for item in self.readable if item.buffer.dtype == dtype]
        if readable and self.rng.random() < 0.85:
            # The last ones have not been read yet.
            chosen = self.rng.choice(readable[-3:] if self.rng.random() < 0.6 else readable)
            return self.load(chosen), chosen.range
        if self.readable and dtype != "bool" and self.rng.random() < 0.3:
            return self.cast(dtype, 0)
        return self.number(dtype)

    def number(self, dtype: str) -> tuple[ir.Expr, Range]:
        if dtype == "bool":
            return constant(self.rng.randrange(2), dtype), Range(1)
        if is_float(dtype):
            value = self.rng.choice([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0])
            return constant(value, dtype), Range(abs(value), 1)
        value = self.rng.randrange(0 if dtype == "uint8" else -3, 5)
        return constant(value, dtype), Range(abs(value))

    def load(self, readable: Readable) -> ir.Load:
        return ir.Load(readable.buffer.name, self.indices(readable.buffer), readable.buffer.dtype)

    def arithmetic(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        (x, x_range), (y, y_range) = self.expr(dtype, depth), self.expr(dtype, depth)
        names = ["add", "add", "subtract", "multiply", "max", "min"]
        if dtype == "uint8":
            names.remove("subtract")
        name = self.rng.choice(names)
        if name in ("add", "subtract"):
            known = Range(x_range.bound + y_range.bound, max(x_range.bits, y_range.bits))
        elif name == "multiply":
            known = Range(x_range.bound * y_range.bound, x_range.bits + y_range.bits)
        else:
            known = x_range.joined(y_range)
        if known.bound > LIMITS[dtype]:
            # An intermediate result must not overflow before it is clamped.
            return ir.Op("max", (x, y), dtype), x_range.joined(y_range)
        return ir.Op(name, (x, y), dtype), known

    def division(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        x, known = self.expr(dtype, depth)
        divisor = self.rng.randint(2, 5)
        name = self.rng.choice(["floordiv", "floormod"])
        bound = known.bound if name == "floordiv" else divisor
        return ir.Op(name, (x, constant(divisor, dtype)), dtype), Range(max(1, bound))

    def function(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        self.kinds.add("function")
        x, known = self.expr(dtype, depth)
        x, _ = limited(x, known, dtype, 8.0)
        name = self.rng.choice(["exp", "tanh", "sigmoid"])
        if name == "exp":
            x = ir.Op("min", (x, constant(2.0, dtype)), dtype)
        return ir.Op(name, (x,), dtype), Range(8.0, ROUNDED)

    def choice(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        (x, x_range), (y, y_range) = self.expr(dtype, depth), self.expr(dtype, depth)
        name = self.rng.choice(["select", CHOICE])
        self.kinds.add(name)
        return ir.Op(name, (self.condition(depth), x, y), dtype), x_range.joined(y_range)

    def padded(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        """Return an expression that reads a neighbouring element if it exists, else a constant."""
        readable = [
            item for item in self.readable if item.buffer.dtype == dtype and item.buffer.shape
        ]
        pairs = [
            (item, i, axis)
            for item in readable
            for i, size in enumerate(item.buffer.shape)
            for axis in self.axes
            if axis.extent == size and size > 1
        ]
        if not pairs:
            return self.leaf(dtype)
        self.kinds.add("padding")
        chosen, i, axis = self.rng.choice(pairs)
        indices = list(self.indices(chosen.buffer))
        name = ir.Name(axis.name)
        if self.rng.random() < 0.5:
            condition = ir.Op("less_equal", (index(1), name), "bool")
            indices[i] = ir.Op("subtract", (name, index(1)), ir.INDEX)
        else:
            last = ir.Op("subtract", (ir.Size(axis.extent), index(1)), ir.INDEX)
            condition = ir.Op("less", (name, last), "bool")
            indices[i] = ir.Op("add", (name, index(1)), ir.INDEX)
        other, known = self.number(dtype)
        load = ir.Load(chosen.buffer.name, tuple(indices), dtype)
        return ir.Op(CHOICE, (condition, load, other), dtype), known.joined(chosen.range)

    def let(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        self.kinds.add("let")
        value, known = self.expr(dtype, depth)
        name = next(self.names)
        self.bound[name] = (dtype, known)
        body, body_range = self.arithmetic(dtype, depth)
        del self.bound[name]
        return ir.Let(name, value, body), body_range

    def cast(self, dtype: str, depth: int) -> tuple[ir.Expr, Range]:
        dtypes = {item.buffer.dtype for item in self.readable} - {dtype}
        if self.axes and self.rng.random() < 0.3 and dtype not in ("bool", "uint8", "int8"):
            axis = self.rng.choice(self.axes)
            return ir.Op(CAST, (ir.Name(axis.name),), dtype), Range(axis.extent)
        if not dtypes:
            return self.leaf(dtype) if depth > 0 else self.number(dtype)
        other = self.rng.choice(sorted(dtypes))
        x, known = self.expr(other, depth) if depth > 0 else self.leaf(other)
        return self.converted(x, known, other, dtype)

    def converted(self, x: ir.Expr, known: Range, other: str, dtype: str) -> tuple[ir.Expr, Range]:
        """Return a value converted to another dtype."""
        if other == dtype:
            return x, known
        if dtype == "bool":
            return ir.Op("not_equal", (x, constant(0, other)), "bool"), Range(1)
        if is_float(other) and not is_float(dtype):
            if not known.is_exact(other):
                return self.number(dtype)
            known = Range(known.bound)
        x, known = limited(x, known, other, LIMITS[dtype])
        if dtype == "uint8" and other != "bool":
            x = ir.Op("max", (x, constant(0, other)), other)
        return ir.Op(CAST, (x,), dtype), known.rounded(dtype)

    # Conditions

    def condition(self, depth: int) -> ir.Expr:
        """Return a condition that does not depend on rounding."""
        if self.axes and self.rng.random() < 0.5:
            axis = self.rng.choice(self.axes)
            name = self.rng.choice(["less", "less_equal", "equal", "not_equal"])
            bound = index(self.rng.randrange(max(1, axis.extent)))
            if self.rng.random() < 0.3:
                return ir.Op(
                    "equal",
                    (ir.Op("floormod", (ir.Name(axis.name), index(2)), ir.INDEX), index(0)),
                    "bool",
                )
            return ir.Op(name, (ir.Name(axis.name), bound), "bool")
        if depth > 1 and self.rng.random() < 0.2:
            left, right = self.condition(depth - 1), self.condition(depth - 1)
            return ir.Op(self.rng.choice(["and", "or"]), (left, right), "bool")
        dtypes = sorted({item.buffer.dtype for item in self.readable})
        if dtypes:
            dtype = self.rng.choice(dtypes)
            x, known = self.leaf(dtype)
            if dtype == "bool":
                return x if self.rng.random() < 0.5 else ir.Op("not", (x,), "bool")
            if known.is_exact(dtype):
                y, _ = self.number(dtype)
                name = self.rng.choice(["less", "less_equal", "equal"])
                return ir.Op(name, (x, y), "bool")
        return ir.Op("less", (index(0), index(1)), "bool")

    # Indices

    def indices(self, buffer: ir.Buffer) -> tuple:
        """Return in-bounds indices of a buffer, mostly the axes in order."""
        is_plain = self.rng.random() < 0.6
        free = list(self.axes)
        expressions: list[ir.Expr] = []
        for size in buffer.shape:
            same = [axis for axis in free if axis.extent == size]
            if same and is_plain:
                free.remove(same[0])
                expressions.append(ir.Name(same[0].name))
            else:
                expressions.append(self.index(size))
        return tuple(expressions)

    def index(self, size: int) -> ir.Expr:
        """Return an index below an extent."""
        ways: list[tuple[str, ir.Expr]] = []
        for axis in self.axes:
            ways += self.ways(axis, size)
        gathered = [
            item
            for item in self.readable
            if item.below is not None and _fits(item.below, size) and item.buffer.shape
        ]
        if gathered and self.rng.random() < 0.4:
            self.kinds.add("gather")
            chosen = self.rng.choice(gathered)
            inner = [self.plain(extent) for extent in chosen.buffer.shape]
            return ir.Load(chosen.buffer.name, tuple(inner), chosen.buffer.dtype)
        if not ways or self.rng.random() < 0.05:
            low = min(ir.extent_at(size, n) for n in ir.BATCHES)
            return index(self.rng.randrange(low))
        kind, expression = self.rng.choice(ways)
        self.kinds.add(kind)
        return expression

    def plain(self, size: int) -> ir.Expr:
        """Return an index below an extent that reads no buffer."""
        ways = [way for axis in self.axes for way in self.ways(axis, size)]
        return self.rng.choice(ways)[1] if ways else index(0)

    def ways(self, axis: Index, size: int) -> Iterator[tuple[str, ir.Expr]]:
        """Yield the kinds and expressions of indices below an extent that depend on an axis."""
        name = ir.Name(axis.name)
        if _fits(axis.extent, size):
            last = ir.Op("subtract", (ir.Size(axis.extent), index(1)), ir.INDEX)
            yield "plain", name
            yield "reversed", ir.Op("subtract", (last, name), ir.INDEX)
            for shift in (1, 2):
                if _fits(axis.extent, size, shift=shift):
                    yield "shifted", ir.Op("add", (name, index(shift)), ir.INDEX)
            for factor in (2, 3):
                if _fits(axis.extent, size, factor=factor):
                    yield "strided", ir.Op("multiply", (name, index(factor)), ir.INDEX)
            down = ir.Op("subtract", (name, index(1)), ir.INDEX)
            yield "shifted", ir.Op("max", (down, index(0)), ir.INDEX)
        else:
            yield "modulo", ir.Op("floormod", (name, ir.Size(size)), ir.INDEX)
            last = ir.Op("subtract", (ir.Size(size), index(1)), ir.INDEX)
            yield "clamped", ir.Op("min", (name, last), ir.INDEX)


def _fits(extent: int, size: int, shift: int = 0, factor: int = 1) -> bool:
    """Tell whether ``i * factor + shift`` is below a size for all ``i`` below an extent, for every
    batch."""
    return all(
        (ir.extent_at(extent, n) - 1) * factor + shift < ir.extent_at(size, n) for n in ir.BATCHES
    )


def limited(
    expr: ir.Expr, known: Range, dtype: str, limit: float | None = None
) -> tuple[ir.Expr, Range]:
    """Return an expression clamped to a limit if its bounds exceed it, and the bounds of its
    values."""
    limit, known = limit or LIMITS[dtype], known.rounded(dtype)
    if known.bound <= limit:
        return expr, known
    limit = min(limit, 8.0)
    low = 0 if dtype == "uint8" else -limit
    expr = ir.Op("min", (expr, constant(limit, dtype)), dtype)
    expr = ir.Op("max", (expr, constant(low, dtype)), dtype)
    return expr, Range(max(1.0, math.floor(limit)), known.bits)


def constant(value: float, dtype: str) -> ir.Const:
    """Return a number of a dtype."""
    return ir.Const(float(value) if is_float(dtype) else int(value), dtype)


def index(value: int) -> ir.Const:
    """Return a constant index."""
    return ir.Const(value, ir.INDEX)
