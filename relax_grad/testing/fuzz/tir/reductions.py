"""Stages of random functions that reduce."""

from __future__ import annotations

from collections.abc import Sequence

from . import language as ir
from .expressions import LIMITS, Range, Readable, constant, limited
from .operations import CHOICE
from .parts import Parts, names_of, plus

#: The name, kind and extent of an axis of a block.
LoopAxis = tuple[str, str, int]


class Reductions(Parts):
    """Draws blocks that reduce."""

    def reduction(self, buffer: ir.Buffer) -> Range:
        """Reduce with ``T.init``, or after a separate block that initialises the result."""
        name, value, known, start, spatial, reduced = self.reduced(buffer)
        store, init = self.combined(buffer, name, value, names_of(spatial), start)
        if buffer.shape and self.rng.random() < 0.12:
            return self.reduce_inside(
                buffer, name, value, known, start, spatial=spatial, reduced=reduced
            )
        if self.rng.random() < (0.1 if self.is_plain else 0.3):
            self.kinds.add("separate_init")
            self.fill(buffer, start)
            init = ()
        self.emit(
            self.loops.nest([*spatial, *reduced], is_independent=True).block(
                next(self.blocks), [store], init
            )
        )
        if self.rng.random() < 0.2 and name != "multiply":
            self.kinds.add("two_reductions")
            return known.joined(self.reduce_more(Readable(buffer, known)))
        return known

    def reduced(
        self, buffer: ir.Buffer, name: str | None = None
    ) -> tuple[str, ir.Expr, Range, ir.Expr, list[LoopAxis], list[LoopAxis]]:
        """Return the operation, value, bounds, initial value, spatial axes and reduced axes of a
        reduction."""
        spatial = self.spatial(buffer.shape)
        count = self.rng.choice([1, 1, 2])
        extents = [self.rng.choice(self.sizes) for _ in range(count)]
        others = [s for item in self.readable for s in item.buffer.shape]
        extents = [
            self.rng.choice(others) if others and self.rng.random() < 0.7 else e for e in extents
        ]
        reduced = [(f"r{next(self.names)}", "reduce", extent) for extent in extents]
        number = 1
        for extent in extents:
            number *= extent
        names = ["add", "add", "max", "min"] + (["multiply"] if number <= 6 else [])
        name = name or self.rng.choice(names)
        self.kinds.add(f"reduce_{name}")
        dtype = buffer.dtype
        value, known = self.scope([*spatial, *reduced], buffer).expr(dtype, 2)
        if name == "add":
            value, known = limited(value, known, dtype, LIMITS[dtype] / number / 2)
            if known.bound * number > LIMITS[dtype]:
                value, known = constant(1, dtype), Range(1)
                if number > LIMITS[dtype]:
                    name = "max"
            known = Range(known.bound * number, known.bits)
        elif name == "multiply":
            value, known = limited(value, known, dtype, 2.0)
            if known.bound > 2:
                low = 0 if dtype == "uint8" else -2
                value = ir.Op(
                    "min",
                    (ir.Op("max", (value, constant(low, dtype)), dtype), constant(2, dtype)),
                    dtype,
                )
            known = Range(2.0**number, known.bits * number)
        start: float
        if name in ("add", "multiply"):
            start = 0 if name == "add" else 1
        else:
            least = 0 if dtype == "uint8" else -LIMITS[dtype]
            start = least if name == "max" else LIMITS[dtype]
            if self.rng.random() < 0.3:
                start = 1
            known = known.joined(Range(abs(start)))
        return name, value, known, constant(start, dtype), spatial, reduced

    def reduce_inside(
        self,
        buffer: ir.Buffer,
        name: str,
        value: ir.Expr,
        known: Range,
        start: ir.Expr,
        spatial: Sequence[LoopAxis],
        reduced: Sequence[LoopAxis],
    ) -> Range:
        """Fill a tensor and reduce into a corner of it, by a block whose indices have an offset."""
        self.kinds.add("reduce_inside")
        self.fill(buffer, start)
        inner, indices = [], []
        for axis, kind, size in spatial:
            extent = size - 1 if size > 1 and size % ir.BATCH else size
            inner.append((axis, kind, extent))
            indices.append(plus(ir.Name(axis), size - extent))
        store, init = self.combined(buffer, name, value, tuple(indices), start)
        nest = self.loops.nest([*inner, *reduced])
        self.emit(nest.block(next(self.blocks), [store], self.rng.choice([(), init])))
        return known

    def combined(
        self, buffer: ir.Buffer, name: str, value: ir.Expr, indices: tuple, start: ir.Expr
    ) -> tuple[ir.Store, tuple[ir.Store, ...]]:
        """Return the store of a reduction, and its init."""
        load = ir.Load(buffer.name, indices, buffer.dtype)
        args = (load, value) if self.rng.random() < 0.7 else (value, load)
        store = ir.Store(buffer.name, indices, ir.Op(name, args, buffer.dtype))
        return store, (ir.Store(buffer.name, indices, start),)

    def arg_reduction(self, buffer: ir.Buffer) -> Range:
        """Compute the largest value and its index by one block of two stores."""
        candidates = [
            item
            for item in self.readable
            if item.buffer.shape
            and item.buffer.dtype not in ("bool", "uint8")
            and item.range.is_exact(item.buffer.dtype)
        ]
        if not candidates:
            return self.map(buffer)
        chosen = self.rng.choice(candidates)
        dtype = chosen.buffer.dtype
        largest = self.allocate(buffer.shape, dtype)
        spatial = self.spatial(buffer.shape)
        size = chosen.buffer.shape[-1]
        axis = (f"r{next(self.names)}", "reduce", size)
        scope = self.scope(spatial)
        value = ir.Load(
            chosen.buffer.name,
            (*(scope.index(s) for s in chosen.buffer.shape[:-1]), ir.Name(axis[0])),
            dtype,
        )
        at = names_of(spatial)
        known, place = ir.Load(largest.name, at, dtype), ir.Load(buffer.name, at, buffer.dtype)
        is_larger = ir.Op("less", (known, value), "bool")
        here = ir.Op("cast", (ir.Name(axis[0]),), buffer.dtype)
        choice = self.rng.choice(["select", CHOICE])
        stores = [
            ir.Store(buffer.name, at, ir.Op(choice, (is_larger, here, place), buffer.dtype)),
            ir.Store(largest.name, at, ir.Op(choice, (is_larger, value, known), dtype)),
        ]
        init = [
            ir.Store(buffer.name, at, constant(-1, buffer.dtype)),
            ir.Store(largest.name, at, constant(-LIMITS[dtype], dtype)),
        ]
        self.emit(self.loops.nest([*spatial, axis]).block(next(self.blocks), stores, init))
        self.add(largest, Range(LIMITS[dtype], chosen.range.bits))
        return Range(size)

    def reduce_more(self, readable: Readable) -> Range:
        """Reduce into the existing values."""
        buffer = readable.buffer
        name, value, known, start, spatial, reduced = self.reduced(buffer)
        if name == "multiply":
            name, known = "max", known
        if name == "add" and readable.range.bound + known.bound > LIMITS[buffer.dtype]:
            name = "max"
        if name == "add":
            known = Range(readable.range.bound + known.bound, known.bits)
        store, _ = self.combined(buffer, name, value, names_of(spatial), start)
        nest = self.loops.nest([*spatial, *reduced], is_partial=self.rng.random() < 0.4)
        self.emit(nest.block(next(self.blocks), [store]))
        return known
