"""Random functions of TIR: sequences of stages that write tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import language as ir
from .expressions import Range, Readable, is_float
from .reductions import Reductions
from .whole import Whole


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a function, and the bounds of its values."""

    shape: tuple[int, ...]
    dtype: str
    range: Range
    below: int | None = None
    is_written: bool = False


class Author(Whole, Reductions):
    """Draws one function."""

    def function(
        self,
        name: str,
        arguments: Sequence[Argument],
        outputs: Sequence[tuple[tuple[int, ...], str]],
    ) -> tuple[ir.PrimFunc, list[Range]]:
        """Return a function, and the bounds of the arguments that it writes to and of its
        results."""
        inputs = [ir.Buffer(f"A{i}", a.shape, a.dtype) for i, a in enumerate(arguments)]
        self.readable = [
            Readable(buffer, argument.range, argument.below)
            for buffer, argument in zip(inputs, arguments, strict=True)
        ]
        written = [
            item
            for item, argument in zip(self.readable, arguments, strict=True)
            if argument.is_written
        ]
        self.writable = list(written)
        results = [ir.Buffer(f"Y{i}", shape, dtype) for i, (shape, dtype) in enumerate(outputs)]
        for item in written:
            self.more(item)
        for result in results:
            for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3])):
                self.stage()
            self.whole(result)
        for _ in range(self.rng.choice([0, 0, 0, 1, 2])):
            if self.writable:
                self.more(self.rng.choice(self.writable))
        made = {item.buffer.name: item.range for item in self.readable}
        function = ir.PrimFunc(
            name, tuple(inputs), tuple(results), tuple(self.allocated), tuple(self.body)
        )
        ranges = [made[item.buffer.name] for item in written] + [made[r.name] for r in results]
        return function, ranges

    # Stages

    def stage(self) -> None:
        """Write to a newly allocated tensor or to an existing one."""
        if self.writable and self.rng.random() < 0.4:
            self.more(self.rng.choice(self.writable))
            return
        self.whole(self.allocate(self.shape(), self.dtype()))

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
        if is_float(buffer.dtype):
            ways += [self.ping_pong]
        if buffer.dtype in ("int32", "int64") and not self.is_plain:
            ways += [self.arg_reduction] * 2
        way = self.rng.choice(ways)
        self.kinds.add(way.__name__)
        return self.add(buffer, way(buffer))

    def more(self, readable: Readable) -> None:
        """Write to a tensor that already has values."""
        ways = [self.partial] * 3 + [self.accumulate] * 3 + [self.rewrite]
        ways += [self.partial_copy]
        if readable.buffer.dtype != "bool":
            ways += [self.reduce_more] * 2
        if readable.buffer.shape and not self.is_plain:
            ways += [self.shift_within]
        way = self.rng.choice(ways)
        self.kinds.add(way.__name__)
        readable.range = readable.range.joined(way(readable)).rounded(readable.buffer.dtype)
