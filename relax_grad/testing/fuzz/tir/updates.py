"""Stages of random functions that write or update some elements of a tensor."""

from __future__ import annotations

from . import language as ir
from .expressions import LIMITS, Range, Readable, index
from .nests import Nest
from .parts import Parts, names_of, plus


class Updates(Parts):
    """Draws blocks that write to a tensor that already has values."""

    def partial(self, readable: Readable) -> Range:
        """Overwrite some elements."""
        buffer = readable.buffer
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes, buffer).expr(buffer.dtype, 2)
        statement: ir.Statement = ir.Store(buffer.name, names_of(axes), value)
        if not self.is_plain and self.rng.random() < 0.25:
            self.kinds.add("if")
            statement = ir.If(self.scope(axes, buffer).condition(2), (statement,))
        nest = self.loops.nest(axes, is_partial=True)
        self.emit(nest.block(next(self.blocks), [statement]))
        return known

    def partial_copy(self, readable: Readable) -> Range:
        """Write to a corner of a tensor by a block whose domain has the shape of that corner."""
        buffer = readable.buffer
        inner = [self.rng.randint(1, size) if size % ir.BATCH else size for size in buffer.shape]
        axes = self.spatial(inner)
        value, known = self.scope(axes, buffer).expr(buffer.dtype, 2)
        indices = [
            plus(name, self.rng.choice([0, size - extent]) if size % ir.BATCH else 0)
            for name, size, extent in zip(names_of(axes), buffer.shape, inner, strict=True)
        ]
        store = ir.Store(buffer.name, tuple(indices), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        return known

    def rewrite(self, readable: Readable) -> Range:
        """Overwrite all elements, possibly by a function of their old values."""
        axes = self.spatial(readable.buffer.shape)
        load = ir.Load(readable.buffer.name, names_of(axes), readable.buffer.dtype)
        scope = self.scope(axes, readable.buffer)
        value, known = scope.expr(readable.buffer.dtype, 2)
        if readable.buffer.dtype != "bool" and self.rng.random() < 0.5:
            value = ir.Op("min", (load, value), readable.buffer.dtype)
        store = ir.Store(readable.buffer.name, names_of(axes), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        return known

    def accumulate(self, readable: Readable) -> Range:
        """Accumulate into all or some of the elements, by a sum, a maximum or a logical or."""
        buffer = readable.buffer
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes, buffer).expr(buffer.dtype, 2)
        load = ir.Load(buffer.name, names_of(axes), buffer.dtype)
        if buffer.dtype == "bool":
            value = ir.Op("or", (load, value), "bool")
        elif readable.range.bound + known.bound <= LIMITS[buffer.dtype]:
            value = ir.Op("add", (load, value), buffer.dtype)
            known = Range(readable.range.bound + known.bound, known.bits)
        else:
            value = ir.Op("max", (load, value), buffer.dtype)
        nest = self.loops.nest(axes, is_partial=self.rng.random() < 0.5)
        self.emit(nest.block(next(self.blocks), [ir.Store(buffer.name, names_of(axes), value)]))
        return known

    def shift_within(self, readable: Readable) -> Range:
        """Read and write different elements of one tensor in an order that affects the result."""
        buffer = readable.buffer
        along = self.rng.randrange(len(buffer.shape))
        axes = self.spatial(buffer.shape)
        nest = Nest()
        for k, (name, kind, size) in enumerate(axes):
            count = ir.Op("subtract", (ir.Size(size), index(int(k == along))), ir.INDEX)
            i = self.loops.loop(nest, 0, count)
            nest.axes.append(ir.Axis(name, kind, index(0), ir.Size(size), i))
        indices: list[ir.Expr] = [*names_of(axes)]
        indices[along] = plus(indices[along], 1)
        moved = ir.Load(buffer.name, tuple(indices), buffer.dtype)
        store = ir.Store(buffer.name, names_of(axes), moved)
        if self.rng.random() < 0.5:
            here = ir.Load(buffer.name, names_of(axes), buffer.dtype)
            store = ir.Store(buffer.name, tuple(indices), here)
        self.emit(nest.block(next(self.blocks), [store]))
        return readable.range
