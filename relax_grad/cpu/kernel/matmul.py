"""Batches of matrix products: ``C[m, n] = sum over k of A[m, k] B[k, n]``, with either factor possibly transposed.

B is packed into panels as wide as a tile, so that a tile reads it sequentially. A is read in place, or each task
copies its part of A, if A is transposed or its rows would share few sets of a cache. A tile of C is held in registers
over a stretch of k whose panel stays in the first-level cache. This is the scheme of Goto and van de Geijn, "Anatomy
of High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._few_rows import FewRows
from ._tile import multiply_add, rows_up_to, tile_size
from .builder import Extent, Vectors, as_expr, bind, ceil_div, const

#: Steps of k that a tile sums over at once.
_DEPTH = 256

#: The maximum number of rows for which B is not packed: if it is read in rows, and if its vectors run along k.
_FEW_ROWS, _FEW_DOTS = 32, 16

#: The same, if the rows of B share few sets of a cache, and a tile has 16 registers.
_FEW_CROWDED = 8

#: The same, if the number of rows is symbolic.
_FEW_SYMBOLIC = 8

#: Strips of a transposed A that are packed together, so that its rows are read in whole cache lines.
_STRIPS = 8

#: Panels of a task that are packed together, if the rows of B are those of memory.
_GROUP = 2

#: The rows of a task from which its share of packing B costs no more than packing all panels before.
_ROWS_OF_LATE = 64

#: Nanoseconds of work up to which one thread computes a product: a parallel region takes 400 to 3000.
_ONE_THREAD_NS = 1300

#: Multiply-adds that a vector lane computes in a nanosecond, and bytes that a core reads from its second-level cache.
_PER_LANE_NS, _BYTES_PER_NS = 6.4, 100

#: Bytes of A that one task reads, about half of a second-level cache.
_TASK_BYTES = 384 * 1024


#: The ways to compute a product: B is read in place, or packed.
WAYS = ("few rows", "packed")


@dataclass(frozen=True)
class Matmul:
    """The shapes and layouts of a batch of matrix products. Extents may be symbolic (int32).

    Attributes
    ----------
    rows, columns, depth : int or tirx.PrimExpr
        The extents of m, n and k.
    transpose_a, transpose_b : bool
        Whether A is stored as ``[k, m]``, and B as ``[n, k]``.
    batch : int or tirx.PrimExpr
        The number of products.
    shared_a, shared_b : bool
        Whether all products share one A, or one B.
    """

    rows: Extent
    columns: Extent
    depth: Extent
    transpose_a: bool = False
    transpose_b: bool = False
    batch: Extent = 1
    shared_a: bool = False
    shared_b: bool = False

    def shapes(self) -> list[list[Extent]]:
        """Return the shapes of A, B and C."""
        a = [self.depth, self.rows] if self.transpose_a else [self.rows, self.depth]
        b = [self.columns, self.depth] if self.transpose_b else [self.depth, self.columns]
        shapes = [(a, self.shared_a), (b, self.shared_b), ([self.rows, self.columns], False)]
        return [
            shape if shared or _is(self.batch, 1) else [self.batch, *shape]
            for shape, shared in shapes
        ]

    def starts(self, i) -> list:
        """Return the offsets of the i-th product in A, B and C."""
        sizes = (self.rows * self.depth, self.columns * self.depth, self.rows * self.columns)
        shared = (self.shared_a, self.shared_b, False)
        return [const(0) if one else i * size for size, one in zip(sizes, shared, strict=True)]

    def turned(self) -> Matmul:
        """Return the product of B and A, both transposed, whose result is C transposed."""
        return Matmul(
            self.columns,
            self.rows,
            self.depth,
            not self.transpose_b,
            not self.transpose_a,
            self.batch,
            self.shared_b,
            self.shared_a,
        )

    def allows(self, way: str) -> bool:
        """Tell whether a product can be computed in one of :data:`WAYS`."""
        return way != "few rows" or _is(self.rows, 1) or not self.transpose_a

    def most_few_rows(self, cpu: CPU) -> int:
        """Return the number of rows up to which packing B costs more than it saves."""
        if not self.transpose_b:
            # Few registers hold few rows: B is read several times, from few sets of a cache if its rows share them.
            columns, depth = (x if isinstance(x, int) else 1 for x in (self.columns, self.depth))
            is_crowded = columns % 512 == 0 and depth >= _DEPTH
            return _FEW_CROWDED if is_crowded and cpu.registers < 32 else _FEW_ROWS
        # Summing the lanes of a vector takes about as long as that many multiplications.
        depth = self.depth if isinstance(self.depth, int) else _DEPTH
        most = _FEW_DOTS if cpu.lanes > 8 else 2 * _FEW_DOTS
        if isinstance(self.columns, int) and self.columns <= 3 * cpu.lanes // 4:
            most *= 8  # A panel would hold zeros in the other lanes.
        return (
            1 if self.transpose_a else max(4, min(most, depth // 8 if most > 32 else depth // 16))
        )

    def nanoseconds(self, cpu: CPU) -> float:
        """Return an estimate of the time that one thread takes, infinite for symbolic extents."""
        extents = (self.batch, self.rows, self.columns, self.depth)
        if not all(isinstance(extent, int) for extent in extents):
            return float("inf")
        batch, rows, columns, depth = extents
        width = columns if self.transpose_b else ceil_div(columns, cpu.lanes) * cpu.lanes
        size = 4 * depth * (rows + columns)
        lanes = _PER_LANE_NS * cpu.lanes
        return batch * max(rows * width * depth / lanes, size / _BYTES_PER_NS)


def matmul(
    product: Matmul,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    *,
    way: str | None = None,
) -> tirx.PrimFunc:
    """Return the kernel: a function of A, B and C (float32) that sets C to the product of A and B.

    The order of each sum depends on the shapes alone, not on the number of threads.

    Parameters
    ----------
    product : Matmul
        The products.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters A, B and C, if they differ from :meth:`Matmul.shapes`.
    way : str, optional
        One of :data:`WAYS` that the product allows. By default, it is chosen by the sizes, the layouts and the CPU.
    """
    if way is not None and not product.allows(way):
        raise ValueError(f"{product} does not allow {way!r}")
    params = b.floats("ABC", shapes or product.shapes())
    if _is(product.columns, 1) and not _is(product.rows, 1):
        return b.prim_func(
            "matmul", params, lambda a, bb, c: _emit(product.turned(), cpu, way, bb, a, c)
        )
    return b.prim_func("matmul", params, lambda *tensors: _emit(product, cpu, way, *tensors))


def _emit(product: Matmul, cpu: CPU, way: str | None, *tensors) -> None:
    if product.nanoseconds(cpu) <= _ONE_THREAD_NS:
        with b.one_thread():
            _emit_by(product, replace(cpu, cores=1), way, *tensors)
    else:
        _emit_by(product, cpu, way, *tensors)


def _emit_by(p: Matmul, cpu: CPU, way: str | None, *tensors) -> None:
    def few() -> None:
        rows = FewRows(p.rows, p.columns, p.depth, p.transpose_a, p.transpose_b, cpu)
        rows.emit(*tensors, p.batch, p.starts)

    def many() -> None:
        _Generator(p, cpu).emit(*tensors)

    most = p.most_few_rows(cpu)
    if way is not None:
        (few if way == "few rows" else many)()
    elif isinstance(p.rows, int):
        (few if p.rows <= most else many)()
    elif p.transpose_a or not isinstance(p.columns, int):
        many()
    else:
        b.either(p.rows <= min(most, _FEW_SYMBOLIC), few, many)


class _Generator:
    def __init__(self, product: Matmul, cpu: CPU):
        self.p, self.cpu = product, cpu
        self.vectors = Vectors(cpu.lanes)
        self.tile_rows, self.tile_vectors = tile_size(cpu)
        self.width = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(product.columns, self.width)
        self.strips = ceil_div(product.rows, self.tile_rows)
        strips, _ = self._blocks()
        #: Whether each task packs the panels of B that it reads.
        self.packs_late = (
            isinstance(self.strips, int)
            and isinstance(self.panels, int)
            and (_is(product.batch, 1) or not product.shared_b)
            and (strips >= self.strips or strips * self.tile_rows >= _ROWS_OF_LATE)
        )

    def emit(self, a, bb, c) -> None:
        """Emit all products: each by one thread, or one after the other if they are fewer than threads.

        A shared B is packed once.
        """
        p = self.p
        is_few = isinstance(p.batch, int) and p.batch < max(2, self.cpu.cores)
        outer, inner = (b.serial, b.parallel) if is_few else (b.parallel, b.serial)
        if self.packs_late:
            with outer(0, p.batch) as i:
                a0, b0, c0 = map(bind, p.starts(i))
                self._multiply(a, a0, _Late(self, bb, b0), c, c0, inner)
            return
        shared = p.shared_b or _is(p.batch, 1)
        panels = _Early(self, bb, const(0), b.parallel) if shared else None
        with outer(0, p.batch) as i:
            a0, b0, c0 = map(bind, p.starts(i))
            packed = _Early(self, bb, b0, inner) if panels is None else panels
            self._multiply(a, a0, packed, c, c0, inner)

    # Packing

    def pack(self, source: tuple, target: tuple, depth: tuple, group: int = 1) -> None:
        """Copy a stretch of k of consecutive panels of B, ``[panel][k][width]``, padded with zeros.

        Parameters
        ----------
        source : tuple
            B, its offset, and the number of the first panel.
        target : tuple
            The buffer of the copy, its offset there, and the distance of panels.
        depth : tuple
            The start and the size of the stretch.
        group : int
            The number of panels.
        """
        (bb, b0, j), (panels, base, step), (k0, size) = source, target, depth
        p, lanes, width = self.p, self.vectors.lanes, self.width
        if p.transpose_b:
            with b.serial(0, group) as i, b.serial(0, self.tile_vectors) as v:
                to = bind(base + i * step + v * lanes)
                column = bind((j + i) * width + v * lanes)
                self.vectors.copy_transposed(
                    (bb, b0 + column * p.depth + k0, p.depth),
                    self._left(column),
                    size,
                    panels,
                    lambda k: to + k * width,
                )
            return
        vectors = [(i, v * lanes) for i in range(group) for v in range(self.tile_vectors)]
        columns = [bind((j + i) * width + at) for i, at in vectors]
        left = [self._left(column) for column in columns]
        with b.serial(0, size) as k:
            row, to = bind(b0 + (k0 + k) * p.columns), bind(base + k * width)
            for (i, at), column, number in zip(vectors, columns, left, strict=True):
                vector = self.vectors.load(bb, row + column, number)
                self.vectors.store(panels, to + i * step + at, vector)

    def _left(self, column):
        """Return the number of columns of a vector that exist, or None if all always do."""
        columns, lanes = self.p.columns, self.vectors.lanes
        if isinstance(columns, int) and columns % self.width == 0:
            return None
        return bind(tirx.max(const(0), tirx.min(const(lanes), columns - column)))

    # Multiplying

    def _multiply(self, a, a0, panels, c, c0, loop) -> None:
        strips_each, panels_each = self._blocks()
        strip_blocks = ceil_div(self.strips, strips_each)
        panel_blocks = ceil_div(self.panels, panels_each)
        factor = _Factor.of(self.p, self.vectors, (self.tile_rows, strips_each))
        with loop(0, strip_blocks * panel_blocks) as task:
            strip0 = bind((task // panel_blocks) * strips_each)
            panel0 = bind((task % panel_blocks) * panels_each)
            strip1 = bind(tirx.min(strip0 + strips_each, as_expr(self.strips)))
            panel1 = bind(tirx.min(panel0 + panels_each, as_expr(self.panels)))
            place, late = factor.place(), panels.place()

            def block(k0, size, first) -> None:
                read = factor.reader(a, a0, place, (strip0, strip1), (k0, size))
                depth = (k0, size, first)
                self._block(read, (panels, late), c, c0, (strip0, strip1), (panel0, panel1), depth)

            self._depths(block)

    def _blocks(self) -> tuple[int, int]:
        """Return the number of strips and of panels of a task; the number of tasks is about a multiple of the cores."""
        depth = self.p.depth if isinstance(self.p.depth, int) else _DEPTH
        strips = max(1, _TASK_BYTES // (4 * self.tile_rows * min(depth, _DEPTH)))
        panels = 16
        if isinstance(self.strips, int):
            strips = min(strips, self.strips)
        if isinstance(self.panels, int):
            panels = min(panels, self.panels)
        if not (isinstance(self.strips, int) and isinstance(self.panels, int)):
            return max(1, min(strips, 8)), panels
        while ceil_div(self.strips, strips) * ceil_div(self.panels, panels) < self.cpu.cores:
            if strips >= panels and strips > 1:
                strips = ceil_div(strips, 2)
            elif panels > 1:
                panels = ceil_div(panels, 2)
            else:
                break
        # Tasks have equal size, because each thread gets the same number of them.
        across = ceil_div(self.panels, panels)
        down = ceil_div(self.strips, strips)
        if across * down % self.cpu.cores and down > 1:
            down = ceil_div(down, self.cpu.cores) * self.cpu.cores
        return ceil_div(self.strips, down), ceil_div(self.panels, across)

    def _depths(self, emit: Callable) -> None:
        """Emit ``emit(start, size, is_first)`` for each stretch of k; the first one sets C, the others add to it."""
        depth = self.p.depth
        if isinstance(depth, int) and depth <= _DEPTH:
            emit(const(0), const(depth), True)
            return
        size = _DEPTH
        if isinstance(depth, int):
            size = ceil_div(depth, ceil_div(depth, _DEPTH))
        stretches = ceil_div(depth, size)
        if not isinstance(depth, int):
            # The empty sum is 0.
            stretches = stretches + tirx.Cast("int32", tirx.EQ(depth, const(0)))
        with b.serial(0, stretches) as i:
            start = bind(i * size)
            emit(start, bind(tirx.min(const(size), depth - start)), tirx.EQ(i, const(0)))

    def _block(self, read, panels, c, c0, strips, columns, depth) -> None:
        """Emit the tiles of a block: panel by panel, so that a stretch of a panel stays in the cache."""
        with panels[0].each(panels[1], columns, depth[:2]) as (j, panel):

            def tiles(numbers: list) -> None:
                with b.serial(strips[0], strips[1]) as i:
                    self._strip(
                        i,
                        lambda row, each: self._tile(
                            read, panel, c, c0, (row, each), (j, numbers), depth
                        ),
                    )

            self._whole_or_part(j, tiles)

    def _whole_or_part(self, j, tiles: Callable) -> None:
        """Emit the tiles of a whole panel, and those of the last one, which may be partial."""
        columns, width, lanes = self.p.columns, self.width, self.vectors.lanes
        whole = [None] * self.tile_vectors
        if isinstance(columns, int):
            rest = columns % width
            part = [min(lanes, rest - at) for at in range(0, rest, lanes)]
            if rest == 0:
                tiles(whole)
            elif columns < width:
                tiles(part)
            else:
                b.either(j < self.panels - 1, lambda: tiles(whole), lambda: tiles(part))
            return
        left = bind(columns - j * width)
        part = [
            bind(tirx.max(const(0), tirx.min(const(lanes), left - at)))
            for at in range(0, width, lanes)
        ]
        b.either(left >= width, lambda: tiles(whole), lambda: tiles(part))

    def _strip(self, i, tile: Callable) -> None:
        """Emit the tile of a strip: with all rows, or with the remaining ones."""
        rows, height = self.p.rows, self.tile_rows
        if isinstance(rows, int):
            rest = rows % height
            if rest == 0:
                tile(i * height, range(height))
            elif rows < height:
                tile(i * height, range(rest))
            else:
                b.either(
                    i < self.strips - 1,
                    lambda: tile(i * height, range(height)),
                    lambda: tile(i * height, range(rest)),
                )
            return

        def parts() -> None:
            """Emit half tiles; rows beyond the last one repeat the last one."""
            half = height // 2
            with b.serial(0, ceil_div(rows - i * height, half)) as part:
                first = bind(i * height + part * half)
                tile(first, rows_up_to(first, half, rows))

        b.either((i + 1) * height <= rows, lambda: tile(i * height, range(height)), parts)

    def _tile(self, reader, panel, c, c0, rows, columns, depth) -> None:
        """Emit one tile of C over a stretch of k; ``rows`` holds the first row, and the offsets of all rows from it."""
        (row, each), (j, numbers), (_, size, first) = rows, columns, depth
        lanes, width = self.vectors.lanes, self.width
        panels, base = panel
        row = bind(row)
        start = bind(c0 + row * self.p.columns + j * width)
        read = reader(row)
        multiply_add(
            self.vectors,
            (len(each), len(numbers)),
            size,
            lambda i, k: read(each[i], k),
            lambda k, v: self.vectors.load(panels, base + k * width + v * lanes),
            lambda i, v: (c, start + each[i] * self.p.columns + v * lanes, numbers[v]),
            add=not first if isinstance(first, bool) else tirx.Not(first),
        )


class _Early:
    """All panels of B, ``[panel][k][width]``, packed before the products."""

    def __init__(self, generator: _Generator, bb, b0, loop: Callable):
        self.depth, self.width = generator.p.depth, generator.width
        size = self.depth * self.width
        self.panels = b.scratch(generator.panels * size)
        with loop(0, generator.panels) as j:
            generator.pack((bb, b0, j), (self.panels, bind(j * size), 0), (const(0), self.depth))

    def place(self) -> None:
        """Allocate nothing."""

    @contextmanager
    def each(self, place: None, columns: tuple, depth: tuple):
        """Emit a loop over panels; yield the number of one, and the buffer and the offset of its stretch."""
        with b.serial(*columns) as j:
            yield j, (self.panels, bind((j * self.depth + depth[0]) * self.width))


class _Late:
    """Stretches of panels of B, ``[panel][k][width]``, packed by the task that reads them, just before."""

    def __init__(self, generator: _Generator, bb, b0):
        self.generator, self.bb, self.b0 = generator, bb, b0
        depth = generator.p.depth
        self.size = (min(depth, _DEPTH) if isinstance(depth, int) else _DEPTH) * generator.width
        # Rows of B are read in several cache lines at a time; transposed, a panel has rows of its own.
        self.group = 1 if generator.p.transpose_b else _GROUP

    def place(self) -> tirx.Buffer:
        """Allocate the buffer of a task."""
        return b.scratch(self.size * self.group)

    @contextmanager
    def each(self, place: tirx.Buffer, columns: tuple, depth: tuple):
        """Emit a loop over panels that are packed; yield the number of one, its buffer and its offset."""
        start, stop = columns
        with b.serial(0, ceil_div(stop - start, self.group)) as part:
            first = bind(start + part * self.group)
            self.generator.pack(
                (self.bb, self.b0, first), (place, const(0), self.size), depth, self.group
            )
            with b.serial(0, bind(tirx.min(const(self.group), stop - first))) as i:
                yield bind(first + i), (place, bind(i * self.size))


@dataclass(frozen=True)
class _Factor:
    """A reader of A in place, ``[m, k]``.

    Attributes
    ----------
    p : Matmul
        The products.
    vectors : Vectors
        The vectors.
    size : tuple[int, int]
        The rows of a strip, and the strips of a task.
    """

    p: Matmul
    vectors: Vectors
    size: tuple[int, int]

    @staticmethod
    def of(product: Matmul, vectors: Vectors, size: tuple[int, int]) -> _Factor:
        """Return the reader for the A of a product."""
        if product.transpose_a:
            return _Strips(product, vectors, size)
        # Rows whose stride is a multiple of 2 KB share few sets of a first-level cache.
        is_crowded = isinstance(product.depth, int) and product.depth % 512 == 0
        return (_Copies if is_crowded and not _is_few(product) else _Factor)(product, vectors, size)

    def place(self) -> tirx.Buffer | None:
        """Allocate the buffer for a task's copy of A, if there is one."""
        return None

    def reader(self, a, a0, place, strips: tuple, depth: tuple) -> Callable:
        """Emit the copies of some strips over a stretch of k, and return the reader of their elements.

        ``reader(row)(i, k)`` is the element of row ``row + i`` at step ``k`` of the stretch.
        """

        def read(row) -> Callable:
            base = bind(a0 + row * self.p.depth + depth[0])
            return lambda i, k: a[base + k + i * self.p.depth]

        return read


class _Copies(_Factor):
    """A reader of a copy of A, ``[row][k]``, whose row stride is not a power of 2."""

    _PITCH = _DEPTH + 16

    def place(self) -> tirx.Buffer:
        return b.scratch(self.size[0] * self.size[1] * self._PITCH)

    def reader(self, a, a0, place, strips, depth) -> Callable:
        (first, last), (k0, size), height = strips, depth, self.size[0]
        top = bind(first * height)
        with b.serial(top, bind(tirx.min(last * height, as_expr(self.p.rows)))) as row:
            source, target = bind(a0 + row * self.p.depth + k0), bind((row - top) * self._PITCH)
            self.vectors.each(
                size,
                lambda k, left: self.vectors.store(
                    place, target + k, self.vectors.load(a, source + k, left), left
                ),
            )

        def read(row) -> Callable:
            base = bind((row - top) * self._PITCH)
            return lambda i, k: place[base + k + i * self._PITCH]

        return read


class _Strips(_Factor):
    """A reader of a copy of a transposed A, ``[k, m]``, in the layout ``[strip][k][row]``.

    Rows are copied in whole vectors: masked stores are slow on processors without AVX-512. What a vector writes beyond
    a row is overwritten by the next one, and each strip ends with room for a vector.
    """

    def place(self) -> tirx.Buffer:
        return b.scratch(self.size[1] * (self.size[0] * _DEPTH + self.vectors.lanes))

    def reader(self, a, a0, place, strips, depth) -> Callable:
        (first, last), (k0, size), height = strips, depth, self.size[0]
        lanes, rows = self.vectors.lanes, self.p.rows
        pitch = bind(size * height + lanes)
        offsets = range(0, height, lanes)

        def copy(begin, number, is_whole: bool) -> None:
            with b.serial(0, size) as k, b.serial(0, number) as i:
                row = bind((begin + i) * height)
                source = bind(a0 + (k0 + k) * rows + row)
                target = bind((begin + i - first) * pitch + k * height)
                for offset in offsets:
                    left = tirx.max(const(0), tirx.min(const(lanes), rows - row - offset))
                    number_of = None if is_whole else bind(left)
                    part = self.vectors.load(a, source + offset, number_of)
                    self.vectors.store(place, target + offset, part)

        with b.serial(0, ceil_div(last - first, _STRIPS)) as group:
            begin = bind(first + group * _STRIPS)
            number = bind(tirx.min(const(_STRIPS), last - begin))
            end = (begin + number - 1) * height + (offsets[-1] + lanes)
            b.either(
                end <= rows,
                lambda: copy(begin, number, True),
                lambda: copy(begin, number, False),
            )

        def read(row) -> Callable:
            strip, start = row // height - first, row % height
            base = bind(strip * pitch + start)
            return lambda i, k: place[base + k * height + i]

        return read


def _is_few(product: Matmul) -> bool:
    """Tell whether A is multiplied by so few columns that copying it costs more than it saves."""
    return isinstance(product.columns, int) and product.columns < 64


def _is(extent: Extent, value: int) -> bool:
    return isinstance(extent, int) and extent == value
