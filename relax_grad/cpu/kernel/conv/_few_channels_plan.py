"""Plans of convolutions and data gradients whose lanes are columns of the target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, extent_as_text
from .gathering import Gathering

#: The maximum number of multiplications in the body of a loop; with more, the code is too long.
_MOST_PRODUCTS = 256

#: The minimum lane utilisation relative to vectors of channels, which need fewer loads.
_FULLER = 1.5


@dataclass(frozen=True)
class FewChannelsPlan(Plan):
    """The plan of a convolution, or of its data gradient, with columns of the target as lanes.

    Attributes
    ----------
    gathering : Gathering
        The computation.
    lanes, cores : int
        The elements of a vector, and the threads that share the work.
    channels, tile_rows, tile_vectors : int
        The number of channels, of rows, and of vectors of a row in a tile.
    block_rows : int
        The number of rows (of a phase) in a block.
    """

    gathering: Gathering
    lanes: int
    cores: int
    channels: int
    tile_rows: int
    tile_vectors: int
    block_rows: int

    @property
    def row_vectors(self) -> int:
        """The number of vectors in a row of a phase."""
        return ceil_div(self.gathering.columns.count(), self.lanes)

    @property
    def products(self) -> int:
        """The number of products in the body of a loop."""
        taps = sum(phase.number for phase in self.gathering.columns.phases)
        return taps * self.channels * self.tile_vectors * self.tile_rows

    @cached_property
    def pitch(self) -> int:
        """The number of columns of a copied row."""
        return _pitch(self.gathering, self.lanes)

    @property
    def rows_read(self) -> int:
        """The number of rows that are copied for a block."""
        return self.gathering.rows.extent(self.block_rows)

    @property
    def row_blocks(self) -> int:
        """The number of blocks of an image."""
        return ceil_div(self.gathering.rows.count(), self.block_rows)

    @property
    def tasks(self) -> Extent:
        """The number of tasks."""
        return self.gathering.images * self.row_blocks

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        return {
            "tile": f"{self.channels} channels x {self.tile_rows} rows x {self.tile_vectors} "
            "vectors of columns",
            "block": f"{self.block_rows} rows, copied with their padding",
            "tasks": extent_as_text(self.tasks),
        }


def few_channels_plan(gathering: Gathering, cpu: CPU) -> FewChannelsPlan:
    """Return the plan of a computation for which :func:`is_supported` holds."""
    rows, columns, targets = gathering.rows, gathering.columns, gathering.targets
    # The other registers hold vectors of the source, and the broadcast weight that multiplies
    # them.
    most = (24 if cpu.registers >= 32 else 10) // len(columns.phases)
    in_row = ceil_div(columns.count(), cpu.lanes)
    channels = ceil_div(targets, ceil_div(targets * min(2, in_row), most))
    vectors = max(1, min(most // channels, in_row, 6))
    vectors = ceil_div(in_row, ceil_div(in_row, vectors))
    count, most_bytes = rows.count(), cpu.tuning.convolutions.column_source
    fitting = [n for n in range(1, count + 1) if _bytes_of(gathering, cpu, n) <= most_bytes]
    block_rows = ceil_div(count, ceil_div(count, max([1, *fitting])))
    most_rows = 1
    if vectors == in_row and len(rows.phases) == 1:
        most_rows = max(1, min(most // (channels * vectors), 4))
    tile_rows = max(n for n in range(1, most_rows + 1) if block_rows % n == 0)
    return FewChannelsPlan(
        *(gathering, cpu.lanes, cpu.cores), channels, tile_rows, vectors, block_rows
    )


def _pitch(gathering: Gathering, lanes: int) -> int:
    """Return the columns of a copied row."""
    columns = gathering.columns
    vectors = ceil_div(columns.count(), lanes)
    return vectors * lanes + columns.offsets[1] - columns.offsets[0]


def _bytes_of(gathering: Gathering, cpu: CPU, rows: int) -> int:
    """Return the number of bytes that a block of ``rows`` rows copies."""
    return 4 * gathering.sources * gathering.rows.extent(rows) * _pitch(gathering, cpu.lanes)


def is_supported(gathering: Gathering) -> bool:
    """Tell whether neighbours of the target read neighbours of the source, with at most two phases
    per axis."""
    rows, columns = gathering.axes
    if not gathering.is_flat or max(len(rows.phases), len(columns.phases)) > 2:
        return False
    return (columns.step, columns.apart, rows.apart) == (1, 1, 1) and columns.offsets[0] <= 0


def is_faster(gathering: Gathering, cpu: CPU, *, of_pairs: bool = False) -> bool:
    """Tell whether :func:`is_supported` holds, and vectors of columns use their lanes better than
    vectors of channels.

    With ``of_pairs``, the latter multiply pairs of source channels.
    """
    if not is_supported(gathering):
        return False
    most = cpu.tuning.convolutions.column_source
    if few_channels_plan(gathering, cpu).products > _MOST_PRODUCTS:
        return False
    if _bytes_of(gathering, cpu, 1) > most:
        return False
    here, there = gathering.columns.count(), gathering.targets
    products = gathering.sources / ceil_div(gathering.sources, 2) if of_pairs else 1
    return _filled(here, cpu) > _FULLER * products * _filled(there, cpu)


def _filled(count: int, cpu: CPU) -> float:
    """Return the fraction of vector lanes that ``count`` elements use."""
    return count / (ceil_div(count, cpu.lanes) * cpu.lanes)
