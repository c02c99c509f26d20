"""The plan of a recurrent layer or of its gradient: tasks of sequences, and tiles of the products
with the weight."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property

from ...target import CPU
from ..language import amx
from ..language.builder import Extent, ceil_div
from ..language.extents import LINE
from ..language.plans import Plan, extent_as_text
from ..matmul.product import Matmul
from ..matmul.tile import equal_height
from ..matmul.tiled import ELEMENTS
from .layer import Layer


class Factors(enum.Enum):
    """The elements that the products with a weight multiply."""

    FLOATS = "one at a time"
    #: AVX512-BF16.
    PAIRS = "pairs of bfloat16"
    #: AMX.
    TILES = "tiles of bfloat16"

    @property
    def are_halves(self) -> bool:
        """Whether the elements are bfloat16."""
        return self is not Factors.FLOATS

    @property
    def line(self) -> int:
        """The elements to whole numbers of which rows are padded."""
        return ELEMENTS if self is Factors.TILES else LINE

    def pitch(self, size: int) -> int:
        """Return the stride of rows of so many elements: an odd number of cache lines, so that not
        all rows lie in the same sets of a cache."""
        return (ceil_div(size, self.line) | 1) * self.line


@dataclass(frozen=True)
class WeightPlan:
    """A packed matrix, ``[panel][k][width]``, padded with zeros, and its products with rows.

    Attributes
    ----------
    columns, depth : int
        The extents of the matrix.
    is_turned : bool
        Whether the matrix is stored as ``[columns, depth]``.
    start : int
        Its offset in the buffer.
    factors : Factors
        The elements that products multiply.
    lanes : int
        The elements of a vector.
    tile : tuple[int, int]
        The rows and vectors of a tile.
    stretch : int
        The steps of k that a tile sums over at once: several strips of rows read this part of a
        panel from the first-level cache.
    is_rolled : bool
        Whether a tile takes all registers, so that its loop is not unrolled.
    """

    columns: int
    depth: int
    is_turned: bool
    start: int
    factors: Factors
    lanes: int
    tile: tuple[int, int]
    stretch: int
    is_rolled: bool

    @property
    def matrix(self) -> Matmul:
        """The product of a row."""
        return Matmul(1, self.columns, self.depth, transpose_b=self.is_turned)

    @property
    def steps(self) -> int:
        """The steps of k: elements, or pairs with those that fill tiles."""
        if self.factors is Factors.TILES:
            return ceil_div(self.depth, ELEMENTS) * amx.STEPS
        return ceil_div(self.depth, 2) if self.factors is Factors.PAIRS else self.depth

    @property
    def width(self) -> int:
        """The columns of a panel."""
        return self.tile[1] * self.lanes

    @property
    def panels(self) -> int:
        """The number of panels."""
        return ceil_div(self.columns, self.width)

    @property
    def pitch(self) -> int:
        """The stride of the rows of a product."""
        return self.panels * self.width

    @property
    def is_at_once(self) -> bool:
        """Whether a tile sums over all steps at once."""
        return self.stretch == self.steps

    def as_text(self) -> str:
        """Return the sizes as text."""
        stretch = "" if self.is_at_once else f", {self.stretch} of them at once"
        return (
            f"{self.columns} columns in tiles of {self.tile[0]} rows x {self.tile[1]} vectors, "
            f"{self.steps} steps{stretch}"
        )


@dataclass(frozen=True)
class RecurrentPlan(Plan):
    """The plan of a recurrent layer, or of its gradient.

    Attributes
    ----------
    of : Layer
        The sizes.
    lanes : int
        The elements of a vector.
    factors : Factors
        The elements that products multiply.
    rows : int
        The number of sequences of a task.
    weights : tuple[WeightPlan, ...]
        The weight of the gates that a step computes together; then, for a GRU that resets first,
        the weight of its last gate.
    """

    of: Layer
    lanes: int
    factors: Factors
    rows: int
    weights: tuple[WeightPlan, ...]

    @property
    def pitch(self) -> int:
        """The stride of the rows of the first product of a step."""
        return self.weights[0].pitch

    @cached_property
    def tasks(self) -> Extent:
        """The number of tasks."""
        return ceil_div(self.of.batch, self.rows)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        of = self.of
        steps, batch = extent_as_text(of.steps), extent_as_text(of.batch)
        weights = zip(("weight", "last gate"), self.weights, strict=False)
        return {
            "layer": f"{of.kind}, {steps} steps of {batch} sequences, {of.size} units",
            "elements": self.factors.value,
            "tasks": f"{extent_as_text(self.tasks)} of {self.rows} sequences",
            **{name: weight.as_text() for name, weight in weights},
        }


def recurrent_plan(
    of: Layer, cpu: CPU, factors: Factors = Factors.FLOATS, *, is_turned: bool = True
) -> RecurrentPlan:
    """Return the plan of a layer, whose products read the weight transposed, or of its gradient,
    whose products do not."""
    together = (2 if of.resets_first else of.gates) * of.size
    sizes = (together, of.size) if is_turned else (of.size, together)
    rows = _rows(of.batch, cpu)
    parts = [(sizes, 0), *([((of.size, of.size), together * of.size)] if of.resets_first else [])]
    weights = tuple(
        weight_plan(*size, cpu, factors, is_turned=is_turned, rows=rows, start=start)
        for size, start in parts
    )
    return RecurrentPlan(of, cpu.lanes, factors, rows=rows, weights=weights)


def weight_plan(
    columns: int,
    depth: int,
    cpu: CPU,
    factors: Factors,
    *,
    is_turned: bool,
    rows: int,
    start: int = 0,
) -> WeightPlan:
    """Return the plan of a matrix that is multiplied by at most so many rows at once."""
    is_tiled, limits = factors is Factors.TILES, cpu.tuning.recurrences
    wide = 1 if columns <= amx.LANES else 2
    size = (rows, wide) if is_tiled else tile(rows, columns, cpu)
    own = WeightPlan(
        *(columns, depth, is_turned, start, factors, cpu.lanes),
        tile=size,
        stretch=depth,
        # A tile of three vectors in a row takes all of 16 registers.
        is_rolled=not is_tiled and cpu.registers < 32 and size[1] == 3,
    )
    is_one_strip = is_tiled or rows <= size[0]
    return replace(own, stretch=own.steps if is_one_strip else min(own.steps, limits.depth))


def _rows(batch: Extent, cpu: CPU) -> int:
    """Return the number of sequences of a task."""
    limits = cpu.tuning.recurrences
    if not isinstance(batch, int):
        return limits.symbolic_task
    cores = max(1, cpu.cores)
    return ceil_div(batch, cores * ceil_div(batch, cores * limits.task))


def tile(rows: int, columns: int, cpu: CPU) -> tuple[int, int]:
    """Return the rows and vectors of the tile that computes a product in the fewest cycles.

    Each step of k takes half a cycle for a multiply-add and for a load. It takes no less than
    the time for which the next multiply-add of an accumulator waits.
    """
    limits = cpu.tuning.recurrences

    def cost(size: tuple[int, int]) -> float:
        height, vectors = size
        cycles = max(height * vectors / 2, (height + vectors) / 2, limits.latency)
        return ceil_div(rows, height) * ceil_div(columns, vectors * cpu.lanes) * cycles

    sizes = [
        (equal_height(rows, min(limits.rows, (cpu.registers - 1 - vectors) // vectors)), vectors)
        for vectors in limits.vectors
    ]
    return min(sizes, key=cost)
