"""Stages of random functions that write all elements of a tensor."""

from __future__ import annotations

from . import language as ir
from .expressions import LIMITS, Range, Readable, constant, index, limited
from .nests import Nest
from .parts import names_of, plus
from .updates import Updates


class Whole(Updates):
    """Draws blocks that write a new tensor."""

    def map(self, buffer: ir.Buffer) -> Range:
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype)
        indices: tuple[ir.Expr, ...] = names_of(axes)
        if axes and self.rng.random() < 0.2:
            self.kinds.add("store_reversed")
            k = self.rng.randrange(len(axes))
            last = ir.Op("subtract", (ir.Size(axes[k][2]), index(1)), ir.INDEX)
            mirrored = ir.Op("subtract", (last, indices[k]), ir.INDEX)
            indices = (*indices[:k], mirrored, *indices[k + 1 :])
        elif len(axes) > 1 and not self.is_plain and self.rng.random() < 0.2:
            self.kinds.add("store_transposed")
            axes = axes[::-1]
        statements: list[ir.Statement] = [ir.Store(buffer.name, indices, value)]
        if not self.is_plain and self.rng.random() < 0.15:
            self.kinds.add("bind")
            name = next(self.names)
            statements = [
                ir.Bind(name, value),
                ir.Store(buffer.name, indices, ir.Name(name, buffer.dtype)),
            ]
        self.emit(self.loops.nest(axes).block(next(self.blocks), statements))
        return known

    def filled(self, buffer: ir.Buffer) -> Range:
        """Fill with a number, and overwrite some elements."""
        value, known = self.scope([]).number(buffer.dtype)
        self.fill(buffer, value)
        readable = Readable(buffer, known)
        for _ in range(self.rng.randint(1, 2)):
            readable.range = readable.range.joined(self.partial(readable))
        return readable.range

    def pad(self, buffer: ir.Buffer) -> Range:
        """Fill with a number, and copy into the middle."""
        value, known = self.scope([]).number(buffer.dtype)
        self.fill(buffer, value)
        inner = [size - 1 if size > 1 and size % ir.BATCH else size for size in buffer.shape]
        axes = self.spatial(inner)
        value, value_range = self.scope(axes).expr(buffer.dtype, 2)
        indices = [
            plus(name, size - extent)
            for name, size, extent in zip(names_of(axes), buffer.shape, inner, strict=True)
        ]
        store = ir.Store(buffer.name, tuple(indices), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        return known.joined(value_range)

    def concat(self, buffer: ir.Buffer) -> Range:
        """Write two parts along an axis by separate blocks."""
        along = self.rng.randrange(len(buffer.shape))
        size = buffer.shape[along]
        if size % ir.BATCH == 0 or size < 2:
            return self.map(buffer)
        first = self.rng.randint(1, size - 1)
        known = Range(0)
        parts = [(0, first), (first, size - first)]
        self.rng.shuffle(parts)
        for start, extent in parts:
            shape = [extent if k == along else s for k, s in enumerate(buffer.shape)]
            axes = self.spatial(shape)
            value, value_range = self.scope(axes).expr(buffer.dtype, 2)
            indices: list[ir.Expr] = [*names_of(axes)]
            indices[along] = plus(indices[along], start)
            store = ir.Store(buffer.name, tuple(indices), value)
            self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
            known = known.joined(value_range)
        return known

    def opaque(self, buffer: ir.Buffer) -> Range:
        """Write by loops within one block."""
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype)
        store = ir.Store(buffer.name, names_of(axes), value)
        inner = self.loops.opaque(axes).around([store])
        self.emit([ir.Block(next(self.blocks), (), tuple(inner))])
        return known

    def branches(self, buffer: ir.Buffer) -> Range:
        """Write one of two values."""
        axes = self.spatial(buffer.shape)
        scope = self.scope(axes)
        condition = scope.condition(2)
        stores, known = [], Range(0)
        for _ in range(2):
            value, value_range = scope.expr(buffer.dtype, 2)
            stores.append((ir.Store(buffer.name, names_of(axes), value),))
            known = known.joined(value_range)
        statement = ir.If(condition, *stores)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [statement]))
        return known

    def nested(self, buffer: ir.Buffer) -> Range:
        """Write by a block within a block."""
        if len(buffer.shape) < 2:
            return self.map(buffer)
        outer = self.spatial(buffer.shape[:1])
        inner = self.spatial(buffer.shape[1:])
        value, known = self.scope([*outer, *inner]).expr(buffer.dtype)
        store = ir.Store(buffer.name, names_of([*outer, *inner]), value)
        statements = self.loops.nest(inner).block(next(self.blocks), [store])
        self.emit(self.loops.nest(outer).block(next(self.blocks), statements))
        return known

    def inner_buffer(self, buffer: ir.Buffer) -> Range:
        """Write by a block that allocates a local tensor."""
        axes = self.spatial(buffer.shape)
        scope = self.scope(axes)
        temporary = ir.Buffer(f"K{next(self.names)}", (2,), buffer.dtype)
        stores, known = [], Range(0)
        for i in range(2):
            value, value_range = scope.expr(buffer.dtype, 2)
            stores.append(ir.Store(temporary.name, (index(i),), value))
            known = known.joined(value_range)
        loads = [ir.Load(temporary.name, (index(i),), buffer.dtype) for i in range(2)]
        value = ir.Op("max", tuple(loads), buffer.dtype) if buffer.dtype != "bool" else loads[1]
        stores.append(ir.Store(buffer.name, names_of(axes), value))
        nest = self.loops.nest(axes)
        self.emit(nest.block(next(self.blocks), stores, allocated=(temporary,)))
        return known

    def several(self, buffer: ir.Buffer) -> Range:
        """Write by a block with two stores, the second to another tensor."""
        axes = self.spatial(buffer.shape)
        scope = self.scope(axes)
        other = self.allocate(buffer.shape, self.dtype())
        stores = []
        value, known = scope.expr(buffer.dtype, 2)
        stores.append(ir.Store(buffer.name, names_of(axes), value))
        value, value_range = scope.expr(other.dtype, 2)
        stores.append(ir.Store(other.name, names_of(axes), value))
        self.emit(self.loops.nest(axes).block(next(self.blocks), stores))
        self.add(other, value_range)
        return known

    def scan(self, buffer: ir.Buffer) -> Range:
        """Write by a loop whose iterations read the previous element."""
        if buffer.dtype == "bool":
            return self.map(buffer)
        along = self.rng.randrange(len(buffer.shape))
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype, 1)
        value, known = limited(value, known, buffer.dtype, 8.0)
        self.fill(buffer, constant(1, buffer.dtype))
        name, _, size = axes[along]
        kind = self.rng.choice(["spatial", "opaque"])
        axes[along] = (name, kind, size)
        nest = Nest()
        for axis_name, axis_kind, extent in axes:
            start = int(axis_name == name)
            count = ir.Op("subtract", (ir.Size(extent), index(start)), ir.INDEX)
            i = self.loops.loop(nest, start, count if start else ir.Size(extent))
            nest.axes.append(ir.Axis(axis_name, axis_kind, index(0), ir.Size(extent), i))
        indices: list[ir.Expr] = [*names_of(axes)]
        indices[along] = ir.Op("subtract", (indices[along], index(1)), ir.INDEX)
        before = ir.Load(buffer.name, tuple(indices), buffer.dtype)
        total = known.bound * size + 1
        if total <= LIMITS[buffer.dtype]:
            value, known = ir.Op("add", (before, value), buffer.dtype), Range(total, known.bits)
        else:
            value = ir.Op("max", (before, value), buffer.dtype)
            known = known.joined(Range(1))
        store = ir.Store(buffer.name, names_of(axes), value)
        self.emit(nest.block(next(self.blocks), [store]))
        return known

    def counted(self, buffer: ir.Buffer) -> Range:
        """Write by a ``while`` loop over the first axis."""
        counter = ir.Buffer(f"K{next(self.names)}", (1,), "int32")
        self.allocated.append(counter)
        at = (index(0),)
        load = ir.Load(counter.name, at, "int32")
        axes = self.spatial(buffer.shape[1:])
        value, known = self.scope(axes).expr(buffer.dtype, 2)
        store = ir.Store(buffer.name, (load, *names_of(axes)), value)
        step = ir.Op("add", (load, constant(1, "int32")), "int32")
        body = (*self.loops.opaque(axes).around([store]), ir.Store(counter.name, at, step))
        condition = ir.Op("less", (load, ir.Size(buffer.shape[0])), "bool")
        start = ir.Store(counter.name, at, constant(0, "int32"))
        self.emit([ir.Block(next(self.blocks), (), (start, ir.While(condition, body)))])
        return known

    def ping_pong(self, buffer: ir.Buffer) -> Range:
        """Alternate between two tensors, each computed from the other, several times."""
        other = self.allocate(buffer.shape, buffer.dtype)
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype, 1)
        value, known = limited(value, known, buffer.dtype, 8.0)
        store = ir.Store(buffer.name, names_of(axes), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        for source, target in [(buffer, other), (other, buffer)] * self.rng.randint(1, 2):
            axes = self.spatial(buffer.shape)
            scope = self.scope(axes)
            scope.readable = [Readable(source, known)]
            load = scope.load(scope.readable[0])
            value, value_range = scope.number(buffer.dtype)
            name = self.rng.choice(["add", "max"])
            known = Range(known.bound + value_range.bound, max(known.bits, value_range.bits))
            store = ir.Store(target.name, names_of(axes), ir.Op(name, (load, value), buffer.dtype))
            self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        self.add(other, known)
        return known
