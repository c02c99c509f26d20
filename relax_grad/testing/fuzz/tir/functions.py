"""Random functions of TIR: stages that write tensors, one after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import language as ir
from .expressions import DTYPES, LIMITS, Range, Readable, Scope, constant, index, limited
from .nests import Loops, Nest, axes_of, indices_of
from .operations import CHOICE


@dataclass(frozen=True)
class Argument:
    """A tensor that a function takes, and what is known of its values."""

    shape: tuple[int, ...]
    dtype: str
    range: Range
    below: int | None = None
    is_written: bool = False


@dataclass
class Author:
    """Draws one function.

    Attributes
    ----------
    kinds : set[str]
        Where the kinds of what is drawn are added.
    sizes : Sequence[int]
        Extents to choose from.
    is_plain : bool
        Whether all blocks are of one store, in loops as those of tensor expressions.
    """

    rng: random.Random
    kinds: set[str]
    sizes: Sequence[int]
    is_plain: bool = False
    readable: list[Readable] = field(default_factory=list)
    writable: list[Readable] = field(default_factory=list)
    allocated: list[ir.Buffer] = field(default_factory=list)
    body: list = field(default_factory=list)

    def __post_init__(self):
        self.names = (f"i{k}" for k in itertools.count())
        self.blocks = (f"b{k}" for k in itertools.count())
        self.loops = Loops(self.rng, self.names, self.kinds, self.is_plain)

    def function(
        self,
        name: str,
        arguments: Sequence[Argument],
        outputs: Sequence[tuple[tuple[int, ...], str]],
    ) -> tuple[ir.PrimFunc, list[Range]]:
        """Return a function, and what is known of its arguments that it writes to and its results."""
        inputs = [ir.Buffer(f"A{i}", a.shape, a.dtype) for i, a in enumerate(arguments)]
        self.readable = [
            Readable(buffer, argument.range, argument.below)
            for buffer, argument in zip(inputs, arguments, strict=True)
        ]
        written = [
            each
            for each, argument in zip(self.readable, arguments, strict=True)
            if argument.is_written
        ]
        self.writable = list(written)
        results = [ir.Buffer(f"Y{i}", shape, dtype) for i, (shape, dtype) in enumerate(outputs)]
        for each in written:
            self.more(each)
        for result in results:
            for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3])):
                self.stage()
            self.whole(result)
        for _ in range(self.rng.choice([0, 0, 0, 1, 2])):
            if self.writable:
                self.more(self.rng.choice(self.writable))
        made = {each.buffer.name: each.range for each in self.readable}
        function = ir.PrimFunc(
            name, tuple(inputs), tuple(results), tuple(self.allocated), tuple(self.body)
        )
        found = [made[each.buffer.name] for each in written] + [made[r.name] for r in results]
        return function, found

    # Stages

    def stage(self) -> None:
        """Write to a tensor that is allocated, or to one that is there already."""
        if self.writable and self.rng.random() < 0.4:
            self.more(self.rng.choice(self.writable))
            return
        self.whole(self.allocate(self.shape(), self.dtype()))

    def allocate(self, shape: tuple[int, ...], dtype: str) -> ir.Buffer:
        self.kinds.add("allocated")
        buffer = ir.Buffer(f"C{len(self.allocated)}", shape, dtype)
        self.allocated.append(buffer)
        return buffer

    def shape(self) -> tuple[int, ...]:
        known = [each.buffer.shape for each in self.readable if each.buffer.shape]
        if known and self.rng.random() < 0.7:
            return self.rng.choice(known)
        rank = self.rng.choice([0, 1, 1, 2, 2, 3])
        return tuple(self.rng.choice(self.sizes) for _ in range(rank))

    def dtype(self) -> str:
        known = [each.buffer.dtype for each in self.readable]
        if known and self.rng.random() < 0.6:
            return self.rng.choice(known)
        return self.rng.choices(list(DTYPES), list(DTYPES.values()))[0]

    def add(self, buffer: ir.Buffer, known: Range) -> Readable:
        """Let a tensor be read and written from here on."""
        each = Readable(buffer, known)
        self.readable.append(each)
        self.writable.append(each)
        return each

    def whole(self, buffer: ir.Buffer) -> Readable:
        """Write all elements of a tensor."""
        ways = [self.map] * 8 + [self.filled] * 2
        if buffer.shape:
            ways += [self.concat, self.pad]
        if not self.is_plain:
            ways += [self.opaque, self.branches, self.nested, self.inner_buffer, self.several]
            ways += [self.scan, self.counted] if buffer.shape else []
        if buffer.dtype != "bool":
            ways += [self.reduction] * 5
        if buffer.dtype.startswith("float"):
            ways += [self.ping_pong]
        if buffer.dtype in ("int32", "int64") and not self.is_plain:
            ways += [self.arg_reduction] * 2
        way = self.rng.choice(ways)
        self.kinds.add(way.__name__)
        return self.add(buffer, way(buffer))

    def more(self, each: Readable) -> None:
        """Write to a tensor that has values."""
        ways = [self.partial] * 3 + [self.accumulate] * 3 + [self.rewrite]
        ways += [self.partial_copy]
        if each.buffer.dtype != "bool":
            ways += [self.reduce_more] * 2
        if each.buffer.shape and not self.is_plain:
            ways += [self.shift_within]
        way = self.rng.choice(ways)
        self.kinds.add(way.__name__)
        each.range = each.range.joined(way(each))

    # Parts of stages

    def scope(self, axes: Sequence[tuple[str, str, int]], but: ir.Buffer | None = None) -> Scope:
        readable = [each for each in self.readable if each.buffer != but]
        return Scope(self.rng, self.names, readable, indices_of(axes), self.kinds)

    def spatial(self, shape: Sequence[int]) -> list[tuple[str, str, int]]:
        return axes_of([f"v{next(self.names)}" for _ in shape], "spatial", shape)

    def emit(self, statements: Sequence) -> None:
        self.body += statements

    def fill(self, buffer: ir.Buffer, value, is_partial: bool = False) -> None:
        """Write one value to all elements."""
        axes = self.spatial(buffer.shape)
        store = ir.Store(buffer.name, _names(axes), value)
        self.emit(self.loops.nest(axes, is_partial=is_partial).block(next(self.blocks), [store]))

    # All elements of a tensor

    def map(self, buffer: ir.Buffer) -> Range:
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype)
        indices = _names(axes)
        if axes and self.rng.random() < 0.2:
            self.kinds.add("store_reversed")
            k = self.rng.randrange(len(axes))
            last = ir.Op("subtract", (ir.Size(axes[k][2]), index(1)), ir.INDEX)
            found = ir.Op("subtract", (last, indices[k]), ir.INDEX)
            indices = (*indices[:k], found, *indices[k + 1 :])
        elif len(axes) > 1 and not self.is_plain and self.rng.random() < 0.2:
            self.kinds.add("store_transposed")
            axes = axes[::-1]
        statements = [ir.Store(buffer.name, indices, value)]
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
        """Fill with a number, and write some elements again."""
        value, known = self.scope([]).number(buffer.dtype)
        self.fill(buffer, value)
        each = Readable(buffer, known)
        for _ in range(self.rng.randint(1, 2)):
            each.range = each.range.joined(self.partial(each))
        return each.range

    def pad(self, buffer: ir.Buffer) -> Range:
        """Fill with a number, and copy into the middle."""
        value, known = self.scope([]).number(buffer.dtype)
        self.fill(buffer, value)
        inner = [size - 1 if size > 1 and size % ir.BATCH else size for size in buffer.shape]
        axes = self.spatial(inner)
        value, found = self.scope(axes).expr(buffer.dtype, 2)
        indices = [
            _plus(name, size - extent)
            for name, size, extent in zip(_names(axes), buffer.shape, inner, strict=True)
        ]
        store = ir.Store(buffer.name, tuple(indices), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        return known.joined(found)

    def concat(self, buffer: ir.Buffer) -> Range:
        """Write the parts along an axis by blocks of their own."""
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
            value, found = self.scope(axes).expr(buffer.dtype, 2)
            indices = list(_names(axes))
            indices[along] = _plus(indices[along], start)
            store = ir.Store(buffer.name, tuple(indices), value)
            self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
            known = known.joined(found)
        return known

    def opaque(self, buffer: ir.Buffer) -> Range:
        """Write by loops within one block."""
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype)
        store = ir.Store(buffer.name, _names(axes), value)
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
            value, found = scope.expr(buffer.dtype, 2)
            stores.append((ir.Store(buffer.name, _names(axes), value),))
            known = known.joined(found)
        statement = ir.If(condition, *stores)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [statement]))
        return known

    def nested(self, buffer: ir.Buffer) -> Range:
        """A block within a block."""
        if len(buffer.shape) < 2:
            return self.map(buffer)
        outer = self.spatial(buffer.shape[:1])
        inner = self.spatial(buffer.shape[1:])
        value, known = self.scope([*outer, *inner]).expr(buffer.dtype)
        store = ir.Store(buffer.name, _names([*outer, *inner]), value)
        statements = self.loops.nest(inner).block(next(self.blocks), [store])
        self.emit(self.loops.nest(outer).block(next(self.blocks), statements))
        return known

    def inner_buffer(self, buffer: ir.Buffer) -> Range:
        """A block with a tensor of its own."""
        axes = self.spatial(buffer.shape)
        scope = self.scope(axes)
        temporary = ir.Buffer(f"K{next(self.names)}", (2,), buffer.dtype)
        stores, known = [], Range(0)
        for i in range(2):
            value, found = scope.expr(buffer.dtype, 2)
            stores.append(ir.Store(temporary.name, (index(i),), value))
            known = known.joined(found)
        loads = [ir.Load(temporary.name, (index(i),), buffer.dtype) for i in range(2)]
        value = ir.Op("max", tuple(loads), buffer.dtype) if buffer.dtype != "bool" else loads[1]
        stores.append(ir.Store(buffer.name, _names(axes), value))
        nest = self.loops.nest(axes)
        self.emit(nest.block(next(self.blocks), stores, allocated=(temporary,)))
        return known

    def several(self, buffer: ir.Buffer) -> Range:
        """A block with two stores."""
        axes = self.spatial(buffer.shape)
        scope = self.scope(axes)
        other = self.allocate(buffer.shape, self.dtype())
        stores = []
        value, known = scope.expr(buffer.dtype, 2)
        stores.append(ir.Store(buffer.name, _names(axes), value))
        value, found = scope.expr(other.dtype, 2)
        stores.append(ir.Store(other.name, _names(axes), value))
        self.emit(self.loops.nest(axes).block(next(self.blocks), stores))
        self.add(other, found)
        return known

    def scan(self, buffer: ir.Buffer) -> Range:
        """A loop of which every iteration reads the element before."""
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
        indices = list(_names(axes))
        indices[along] = ir.Op("subtract", (indices[along], index(1)), ir.INDEX)
        before = ir.Load(buffer.name, tuple(indices), buffer.dtype)
        total = known.bound * size + 1
        if total <= LIMITS[buffer.dtype]:
            value, known = ir.Op("add", (before, value), buffer.dtype), Range(total, known.bits)
        else:
            value = ir.Op("max", (before, value), buffer.dtype)
            known = known.joined(Range(1))
        store = ir.Store(buffer.name, _names(axes), value)
        self.emit(nest.block(next(self.blocks), [store]))
        return known

    def counted(self, buffer: ir.Buffer) -> Range:
        """A ``while`` loop over the first axis."""
        counter = ir.Buffer(f"K{next(self.names)}", (1,), "int32")
        self.allocated.append(counter)
        at = (index(0),)
        load = ir.Load(counter.name, at, "int32")
        axes = self.spatial(buffer.shape[1:])
        value, known = self.scope(axes).expr(buffer.dtype, 2)
        store = ir.Store(buffer.name, (load, *_names(axes)), value)
        step = ir.Op("add", (load, constant(1, "int32")), "int32")
        body = (*self.loops.opaque(axes).around([store]), ir.Store(counter.name, at, step))
        condition = ir.Op("less", (load, ir.Size(buffer.shape[0])), "bool")
        start = ir.Store(counter.name, at, constant(0, "int32"))
        self.emit([ir.Block(next(self.blocks), (), (start, ir.While(condition, body)))])
        return known

    def ping_pong(self, buffer: ir.Buffer) -> Range:
        """Go from one tensor to another and back, several times."""
        other = self.allocate(buffer.shape, buffer.dtype)
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes).expr(buffer.dtype, 1)
        value, known = limited(value, known, buffer.dtype, 8.0)
        store = ir.Store(buffer.name, _names(axes), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        for source, target in [(buffer, other), (other, buffer)] * self.rng.randint(1, 2):
            axes = self.spatial(buffer.shape)
            scope = self.scope(axes)
            scope.readable = [Readable(source, known)]
            load = scope.load(scope.readable[0])
            value, found = scope.number(buffer.dtype)
            name = self.rng.choice(["add", "max"])
            known = Range(known.bound + found.bound, max(known.bits, found.bits))
            store = ir.Store(target.name, _names(axes), ir.Op(name, (load, value), buffer.dtype))
            self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        self.add(other, known)
        return known

    # Reductions

    def reduction(self, buffer: ir.Buffer) -> Range:
        """Reduce with ``T.init``, or with a block that fills before it."""
        name, value, known, start, spatial, reduced = self.reduced(buffer)
        store, init = self.combined(buffer, name, value, _names(spatial), start)
        if buffer.shape and self.rng.random() < 0.12:
            return self.reduce_inside(buffer, name, value, known, start, spatial, reduced)
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

    def reduced(self, buffer: ir.Buffer, name: str | None = None):
        """Return the parts of a reduction."""
        spatial = self.spatial(buffer.shape)
        count = self.rng.choice([1, 1, 2])
        extents = [self.rng.choice(self.sizes) for _ in range(count)]
        known = [s for each in self.readable for s in each.buffer.shape]
        extents = [
            self.rng.choice(known) if known and self.rng.random() < 0.7 else e for e in extents
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
        start = {"add": 0, "multiply": 1}.get(name)
        if start is None:
            low = 0 if dtype == "uint8" else -LIMITS[dtype]
            start = low if name == "max" else LIMITS[dtype]
            if self.rng.random() < 0.3:
                start = 1
            known = known.joined(Range(abs(start)))
        return name, value, known, constant(start, dtype), spatial, reduced

    def reduce_inside(self, buffer, name, value, known, start, spatial, reduced) -> Range:
        """Fill a tensor, and reduce into a corner of it, by a block whose indices have an offset."""
        self.kinds.add("reduce_inside")
        self.fill(buffer, start)
        inner, indices = [], []
        for axis, kind, size in spatial:
            extent = size - 1 if size > 1 and size % ir.BATCH else size
            inner.append((axis, kind, extent))
            indices.append(_plus(ir.Name(axis), size - extent))
        store, init = self.combined(buffer, name, value, tuple(indices), start)
        nest = self.loops.nest([*inner, *reduced])
        self.emit(nest.block(next(self.blocks), [store], self.rng.choice([(), init])))
        return known

    def combined(self, buffer: ir.Buffer, name: str, value, indices: tuple, start):
        """Return the store of a reduction, and its init."""
        load = ir.Load(buffer.name, indices, buffer.dtype)
        args = (load, value) if self.rng.random() < 0.7 else (value, load)
        store = ir.Store(buffer.name, indices, ir.Op(name, args, buffer.dtype))
        return store, (ir.Store(buffer.name, indices, start),)

    def arg_reduction(self, buffer: ir.Buffer) -> Range:
        """Find where the largest value is, and the value, by one block of two stores."""
        found = [
            each
            for each in self.readable
            if each.buffer.shape
            and each.buffer.dtype not in ("bool", "uint8")
            and each.range.is_exact(each.buffer.dtype)
        ]
        if not found:
            return self.map(buffer)
        each = self.rng.choice(found)
        dtype = each.buffer.dtype
        largest = self.allocate(buffer.shape, dtype)
        spatial = self.spatial(buffer.shape)
        size = each.buffer.shape[-1]
        axis = (f"r{next(self.names)}", "reduce", size)
        scope = self.scope(spatial)
        value = ir.Load(
            each.buffer.name,
            (*(scope.index(s) for s in each.buffer.shape[:-1]), ir.Name(axis[0])),
            dtype,
        )
        at = _names(spatial)
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
        self.add(largest, Range(LIMITS[dtype], each.range.bits))
        return Range(size)

    # Some elements of a tensor that has values

    def partial(self, each: Readable) -> Range:
        """Write some elements again."""
        buffer = each.buffer
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes, buffer).expr(buffer.dtype, 2)
        statement = ir.Store(buffer.name, _names(axes), value)
        if not self.is_plain and self.rng.random() < 0.25:
            self.kinds.add("if")
            statement = ir.If(self.scope(axes, buffer).condition(2), (statement,))
        nest = self.loops.nest(axes, is_partial=True)
        self.emit(nest.block(next(self.blocks), [statement]))
        return known

    def partial_copy(self, each: Readable) -> Range:
        """Write a corner of a tensor, by a block whose domain is that corner."""
        buffer = each.buffer
        inner = [self.rng.randint(1, size) if size % ir.BATCH else size for size in buffer.shape]
        axes = self.spatial(inner)
        value, known = self.scope(axes, buffer).expr(buffer.dtype, 2)
        indices = [
            _plus(name, self.rng.choice([0, size - extent]) if size % ir.BATCH else 0)
            for name, size, extent in zip(_names(axes), buffer.shape, inner, strict=True)
        ]
        store = ir.Store(buffer.name, tuple(indices), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        return known

    def rewrite(self, each: Readable) -> Range:
        """Write all elements again, perhaps of what they were."""
        axes = self.spatial(each.buffer.shape)
        load = ir.Load(each.buffer.name, _names(axes), each.buffer.dtype)
        scope = self.scope(axes, each.buffer)
        value, known = scope.expr(each.buffer.dtype, 2)
        if each.buffer.dtype != "bool" and self.rng.random() < 0.5:
            value = ir.Op("min", (load, value), each.buffer.dtype)
        store = ir.Store(each.buffer.name, _names(axes), value)
        self.emit(self.loops.nest(axes).block(next(self.blocks), [store]))
        return known

    def accumulate(self, each: Readable) -> Range:
        """Add to elements, or to some of them."""
        buffer = each.buffer
        axes = self.spatial(buffer.shape)
        value, known = self.scope(axes, buffer).expr(buffer.dtype, 2)
        load = ir.Load(buffer.name, _names(axes), buffer.dtype)
        if buffer.dtype == "bool":
            value = ir.Op("or", (load, value), "bool")
        elif each.range.bound + known.bound <= LIMITS[buffer.dtype]:
            value = ir.Op("add", (load, value), buffer.dtype)
            known = Range(each.range.bound + known.bound, known.bits)
        else:
            value = ir.Op("max", (load, value), buffer.dtype)
        nest = self.loops.nest(axes, is_partial=self.rng.random() < 0.5)
        self.emit(nest.block(next(self.blocks), [ir.Store(buffer.name, _names(axes), value)]))
        return known

    def reduce_more(self, each: Readable) -> Range:
        """Reduce into what is there."""
        buffer = each.buffer
        name, value, known, start, spatial, reduced = self.reduced(buffer)
        if name == "multiply":
            name, known = "max", known
        if name == "add" and each.range.bound + known.bound > LIMITS[buffer.dtype]:
            name = "max"
        if name == "add":
            known = Range(each.range.bound + known.bound, known.bits)
        store, _ = self.combined(buffer, name, value, _names(spatial), start)
        nest = self.loops.nest([*spatial, *reduced], is_partial=self.rng.random() < 0.4)
        self.emit(nest.block(next(self.blocks), [store]))
        return known

    def shift_within(self, each: Readable) -> Range:
        """Read and write one tensor, at different elements, in an order that matters."""
        buffer = each.buffer
        along = self.rng.randrange(len(buffer.shape))
        axes = self.spatial(buffer.shape)
        nest = Nest()
        for k, (name, kind, size) in enumerate(axes):
            count = ir.Op("subtract", (ir.Size(size), index(int(k == along))), ir.INDEX)
            i = self.loops.loop(nest, 0, count)
            nest.axes.append(ir.Axis(name, kind, index(0), ir.Size(size), i))
        indices = list(_names(axes))
        indices[along] = _plus(indices[along], 1)
        one = ir.Load(buffer.name, tuple(indices), buffer.dtype)
        store = ir.Store(buffer.name, _names(axes), one)
        if self.rng.random() < 0.5:
            here = ir.Load(buffer.name, _names(axes), buffer.dtype)
            store = ir.Store(buffer.name, tuple(indices), here)
        self.emit(nest.block(next(self.blocks), [store]))
        return each.range


def _names(axes: Sequence[tuple[str, str, int]]) -> tuple[ir.Name, ...]:
    return tuple(ir.Name(name) for name, _, _ in axes)


def _plus(name, value: int):
    return ir.Op("add", (name, index(value)), ir.INDEX) if value else name
