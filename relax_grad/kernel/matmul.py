"""Matrix products: ``C[m, n] = sum over k of A[m, k] B[k, n]``, either factor transposed, any number of them.

B is packed into panels as wide as a tile, so that a tile reads it front to back; A is read in place, or
packed into rows of a tile where it is transposed. A tile of C is held in registers over a stretch of k
whose panel stays in the first-level cache. This is the scheme of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, Vectors, bind, ceil_div, const

#: Steps of k that a tile goes through at once.
_DEPTH = 256

#: Bytes of A that one task goes through, about half of a second-level cache.
_TASK_BYTES = 384 * 1024


@dataclass(frozen=True)
class Matmul:
    """What is multiplied. Extents may be symbolic (int32).

    Attributes
    ----------
    rows, columns, depth : int or tirx.PrimExpr
        The extents of m, n and k.
    transpose_a, transpose_b : bool
        Whether A is stored as ``[k, m]``, and B as ``[n, k]``.
    batch : int or tirx.PrimExpr
        How many products.
    shared_a, shared_b : bool
        Whether there is one A, or one B, for all products.
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


def matmul(
    product: Matmul, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the function of A, B and C (float32) that sets C to their product.

    Each element of C is a sum over k in ascending order, whatever the number of threads.

    Parameters
    ----------
    product : Matmul
        What is multiplied.
    cpu : CPU
        What the function is for.
    shapes : Sequence, optional
        The shapes of A, B and C as the function's parameters have them, where they are not those of
        :meth:`Matmul.shapes`.
    """
    shapes = zip("ABC", shapes or product.shapes(), strict=True)
    params = [(each, shape, "float32") for each, shape in shapes]
    return b.prim_func("matmul", params, _Generator(product, cpu).emit)


def tile(cpu: CPU) -> tuple[int, int]:
    """Return rows and vectors of the tile of C that fits the registers beside what multiplies it."""
    return (10, 2) if cpu.registers >= 32 else (6, 2)


class _Generator:
    def __init__(self, product: Matmul, cpu: CPU):
        self.p, self.cpu = product, cpu
        self.vectors = Vectors(cpu.lanes)
        self.tile_rows, self.tile_vectors = tile(cpu)
        self.width = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(product.columns, self.width)
        self.strips = ceil_div(product.rows, self.tile_rows)

    def emit(self, a, bb, c) -> None:
        """Emit all products: one by one, or each of them by one thread where there are enough."""
        p = self.p
        if _is(p.batch, 1):
            self._product(a, bb, c, const(0), const(0), const(0), b.parallel)
            return
        with b.parallel(0, p.batch) as i:
            self._product(
                a,
                bb,
                c,
                const(0) if p.shared_a else bind(i * (p.rows * p.depth)),
                const(0) if p.shared_b else bind(i * (p.depth * p.columns)),
                bind(i * (p.rows * p.columns)),
                b.serial,
            )

    def _product(self, a, bb, c, a0, b0, c0, loop: Callable) -> None:
        """Emit one product of what begins at the offsets; ``loop`` divides it among threads, or not."""
        p = self.p
        panels = b.scratch(self.panels * p.depth * self.width)
        self._pack_b(bb, b0, panels, loop)
        if p.transpose_a:
            strips = b.scratch(self.strips * p.depth * self.tile_rows + self.vectors.lanes)
            self._pack_a(a, a0, strips, loop)
            factor = _Strips(strips, p.depth, self.tile_rows)
        else:
            factor = _Rows(a, a0, p.depth)
        self._multiply(factor, panels, c, c0, loop)

    # Packing

    def _pack_b(self, bb, b0, panels, loop) -> None:
        """Copy B to ``[panel][k][width]``, padded with zeros."""
        p, lanes = self.p, self.vectors.lanes
        with loop(0, self.panels) as j:
            base = bind(j * (p.depth * self.width))
            for v in range(self.tile_vectors):
                column = bind(j * self.width + v * lanes)
                left = self._left(p.columns, column, j, v)
                if p.transpose_b:
                    self._transposed(bb, b0 + column * p.depth, left, panels, base + v * lanes)
                else:
                    with b.serial(0, p.depth) as k:
                        row = self.vectors.load(bb, b0 + k * p.columns + column, left)
                        self.vectors.store(panels, base + k * self.width + v * lanes, row)

    def _left(self, columns, column, j, v):
        """Return how many of a panel's columns from one on exist; None where the panel is always whole."""
        if isinstance(columns, int) and columns % self.width == 0:
            return None
        return bind(tirx.max(const(0), tirx.min(const(self.vectors.lanes), columns - column)))

    def _transposed(self, bb, start, left, panels, base) -> None:
        """Copy rows of B (as many as lanes) to columns of a panel, a square at a time."""
        depth, lanes = self.p.depth, self.vectors.lanes

        def square(k, number) -> None:
            rows = []
            for i in range(lanes):
                if left is None:
                    rows.append(bind(self.vectors.load(bb, start + i * depth + k, number)))
                    continue
                size = lanes if number is None else number
                exists = tirx.Select(
                    left > i, const(size) if isinstance(size, int) else size, const(0)
                )
                rows.append(bind(self.vectors.load(bb, start + i * depth + k, exists)))
            columns = self.vectors.transpose(rows)
            if number is None or isinstance(number, int):
                for i in range(lanes if number is None else number):
                    self.vectors.store(panels, base + (k + i) * self.width, columns[i])
            else:
                for i in range(lanes):
                    with b.when(number > i):
                        self.vectors.store(panels, base + (k + i) * self.width, columns[i])

        self.vectors.each(depth, square)

    def _pack_a(self, a, a0, strips, loop) -> None:
        """Copy a transposed A to ``[strip][k][row]``; the rows of the last strip that do not exist stay open."""
        p, height = self.p, self.tile_rows
        with loop(0, self.strips) as i, b.serial(0, p.depth) as k:
            source = bind(a0 + k * p.rows + i * height)
            target = bind((i * p.depth + k) * height)
            for offset in range(0, height, self.vectors.lanes):
                size = min(self.vectors.lanes, height - offset)
                number = tirx.min(const(size), p.rows - i * height - offset)
                number = tirx.max(const(0), number)
                row = self.vectors.load(a, source + offset, bind(number))
                self.vectors.store(strips, target + offset, row, size)

    # Multiplying

    def _multiply(self, factor, panels, c, c0, loop) -> None:
        strips_each, panels_each = self._blocks()
        strip_blocks = ceil_div(self.strips, strips_each)
        panel_blocks = ceil_div(self.panels, panels_each)
        with loop(0, strip_blocks * panel_blocks) as task:
            strip0 = bind((task // panel_blocks) * strips_each)
            panel0 = bind((task % panel_blocks) * panels_each)
            strip1 = bind(tirx.min(strip0 + strips_each, _expr(self.strips)))
            panel1 = bind(tirx.min(panel0 + panels_each, _expr(self.panels)))
            self._depths(
                lambda k0, size, first: self._block(
                    factor, panels, c, c0, (strip0, strip1), (panel0, panel1), (k0, size, first)
                )
            )

    def _blocks(self) -> tuple[int, int]:
        """Return how many strips and panels one task has: about as many tasks as a multiple of the cores."""
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
        blocks = ceil_div(self.strips, strips)
        if blocks * ceil_div(self.panels, panels) % self.cpu.cores and blocks > 1:
            blocks = ceil_div(blocks, self.cpu.cores) * self.cpu.cores
            strips = ceil_div(self.strips, blocks)
        return strips, panels

    def _depths(self, emit: Callable) -> None:
        """Emit for each stretch of k: the first sets C, the others add to it."""
        depth = self.p.depth
        if isinstance(depth, int):
            blocks = max(1, ceil_div(depth, _DEPTH))
            size = ceil_div(depth, blocks)
            emit(const(0), const(min(size, depth)), True)
            if blocks > 2:
                with b.serial(1, blocks - 1) as i:
                    emit(bind(i * size), const(size), False)
            if blocks > 1:
                emit(const((blocks - 1) * size), const(depth - (blocks - 1) * size), False)
            return
        emit(const(0), bind(tirx.min(const(_DEPTH), depth)), True)
        with b.serial(1, ceil_div(depth, _DEPTH)) as i:
            start = bind(i * _DEPTH)
            emit(start, bind(tirx.min(const(_DEPTH), depth - start)), False)

    def _block(self, factor, panels, c, c0, strips, columns, depth) -> None:
        """Emit the tiles of a block: panel by panel, so that a stretch of a panel stays in the cache."""
        with b.serial(columns[0], columns[1]) as j:

            def tiles(vectors: int, number) -> None:
                with b.serial(strips[0], strips[1]) as i:
                    self._strip(
                        i,
                        lambda row, height: self._tile(
                            factor, panels, c, c0, (row, height), (j, vectors, number), depth
                        ),
                    )

            self._whole_or_part(j, tiles)

    def _whole_or_part(self, j, tiles: Callable) -> None:
        """Emit the tiles of a whole panel, and those of the last one, of which only a part may exist."""
        columns, width, lanes = self.p.columns, self.width, self.vectors.lanes
        if isinstance(columns, int):
            rest = columns % width
            part = (ceil_div(rest, lanes), rest % lanes or None)
            if rest == 0:
                tiles(self.tile_vectors, None)
            elif columns < width:
                tiles(*part)
            else:
                b.either(
                    j < self.panels - 1,
                    lambda: tiles(self.tile_vectors, None),
                    lambda: tiles(*part),
                )
            return
        left = bind(columns - j * width)
        cases = [
            lambda v=v: tiles(v, None if v > self.tile_vectors else bind(left - (v - 1) * lanes))
            for v in range(1, self.tile_vectors + 1)
        ]

        def by_size(v: int) -> None:
            if v == self.tile_vectors:
                cases[v - 1]()
            else:
                b.either(left <= v * lanes, cases[v - 1], lambda: by_size(v + 1))

        b.either(left >= width, lambda: tiles(self.tile_vectors, None), lambda: by_size(1))

    def _strip(self, i, tile: Callable) -> None:
        """Emit the tile of a strip, whole or of the rows that there are."""
        rows, height = self.p.rows, self.tile_rows
        if isinstance(rows, int):
            rest = rows % height
            if rest == 0:
                tile(i * height, height)
            elif rows < height:
                tile(i * height, rest)
            else:
                b.either(
                    i < self.strips - 1,
                    lambda: tile(i * height, height),
                    lambda: tile(i * height, rest),
                )
            return

        def parts() -> None:
            """The binary digits of the number of rows that are left."""
            left = bind(rows - i * height)
            size = 1 << (height.bit_length() - 1)
            while size:
                above = bind((left // (2 * size)) * (2 * size))

                def part(above=above, size=size) -> None:
                    tile(i * height + above, size)

                with b.when(tirx.EQ((left // size) % 2, const(1))):
                    part()
                size //= 2

        b.either((i + 1) * height <= rows, lambda: tile(i * height, height), parts)

    def _tile(self, factor, panels, c, c0, rows, columns, depth) -> None:
        """Emit one tile of C over a stretch of k."""
        (row, height), (j, vectors, number), (k0, size, first) = rows, columns, depth
        lanes, width = self.vectors.lanes, self.width
        total = Accumulators(self.vectors, height * vectors)
        row = bind(row)

        def place(i, v):
            index = c0 + (row + i) * self.p.columns + j * width + v * lanes
            return c, index, number if v == vectors - 1 else None

        for i in range(height):
            for v in range(vectors):
                start = place(i, v)
                total[i * vectors + v] = (
                    self.vectors.splat(0) if first else self.vectors.load(*start)
                )
        panel = bind((j * self.p.depth + k0) * width)
        read = factor.reader(row, k0)
        with b.serial(0, size) as k:
            column = [
                bind(self.vectors.load(panels, panel + k * width + v * lanes))
                for v in range(vectors)
            ]
            for i in range(height):
                value = bind(self.vectors.splat(read(i, k)))
                for v in range(vectors):
                    total[i * vectors + v] = total[i * vectors + v] + value * column[v]
        for i in range(height):
            for v in range(vectors):
                buffer, index, left = place(i, v)
                self.vectors.store(buffer, index, total[i * vectors + v], left)


@dataclass(frozen=True)
class _Rows:
    """A as it is, ``[m, k]``."""

    buffer: tirx.Buffer
    start: tirx.PrimExpr
    depth: Extent

    def reader(self, row, k0) -> Callable:
        base = bind(self.start + row * self.depth + k0)
        return lambda i, k: self.buffer[base + k + i * self.depth]


@dataclass(frozen=True)
class _Strips:
    """A transposed A, packed as ``[strip][k][row]``."""

    buffer: tirx.Buffer
    depth: Extent
    height: int

    def reader(self, row, k0) -> Callable:
        strip, first = row // self.height, row % self.height
        base = bind((strip * self.depth + k0) * self.height + first)
        return lambda i, k: self.buffer[base + k * self.height + i]


def _is(extent: Extent, value: int) -> bool:
    return isinstance(extent, int) and extent == value


def _expr(extent: Extent):
    return const(extent) if isinstance(extent, int) else extent
