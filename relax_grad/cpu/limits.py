"""The subjects of a :class:`relax_grad.cpu.tuning.Tuning` for matrix products: sizes and limits,
with their units and the benchmarks that measured them.

A default is the value of processors with vectors of 128 bits; ``relax_grad/cpu/tuning.py`` has the
values of others, and ``relax_grad/cpu/kernel_limits.py`` the subjects of other kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

KB, MB = 2**10, 2**20


@dataclass(frozen=True)
class Crossover:
    """A limit of the rows up to which B is read in place, and the matrices B that it holds for.

    Attributes
    ----------
    rows : int
        The most rows of A for which B is not packed.
    over_bytes : int
        B has more bytes than this.
    steps : tuple[float, float]
        The least and the most rows of B.
    vectors : tuple[float, float]
        The least and the most columns of B, in vectors.
    is_crowded : bool
        Whether the rows of B must share few sets of a first-level cache.
    is_plain : bool
        Whether A must not be transposed.
    """

    rows: int
    over_bytes: int = -1
    steps: tuple[float, float] = (0, inf)
    vectors: tuple[float, float] = (0, inf)
    is_crowded: bool = False
    is_plain: bool = False


@dataclass(frozen=True)
class Caches:
    """The sizes of caches that kernels count on, in bytes unless stated otherwise.

    ``benchmarks/products.py`` measures products around them. They are below the sizes of the caches
    themselves, which other operands share; the machine of each choice was not recorded.

    Attributes
    ----------
    set_stride : int
        The distance of rows, in float32 elements, whose multiples share few sets of a first-level
        cache.
    factor : int
        A factor up to this size stays in a second-level cache: prefetches do not help.
    task : int
        The part of a factor that a task reads, about half of a second-level cache.
    result : int
        C below this size stays in a second-level cache, and its prefetches are not spread.
    read_again : int
        The elements of panels that each strip reads, and that stay in a second-level cache.
    bytes_per_ns : float
        The bytes that a core reads from its second-level cache in a nanosecond.
    """

    set_stride: int = 512
    factor: int = MB
    task: int = 384 * KB
    result: int = 512 * KB
    read_again: int = 2**17
    bytes_per_ns: float = 100


@dataclass(frozen=True)
class ProductTiles:
    """The tiles of matrix products, in registers. ``benchmarks/products.py`` measures them.

    A tile has rows and vectors. Short vectors make loads of single elements the bottleneck: more
    vectors need fewer loads for each multiply-add. With long vectors, 16 sums hide the latency of
    multiply-adds; more rows of A and C displace more of the panel in a first-level cache.

    Attributes
    ----------
    largest : tuple[int, int]
        The rows and vectors of the tile that fits in the registers with its operands.
    wide, widest : tuple[int, int] or None
        Tiles that need fewer loads for a multiply-add, for C with more than two vectors of columns;
        the widest one writes long parts of rows. None: ``largest`` serves all products.
    many_columns : int
        The columns from which a last panel with fewer vectors takes little of the time.
    single : tuple[int, int] or None
        The rows of a tile of one vector, if A is untransposed and if it is transposed (16 rows are
        a cache line of A). None: ``largest``.
    narrow_steps : int
        The steps of k up to which the largest tile writes whole cache lines faster than the widest.
    in_place : int
        The most rows of a tile that reads B in place; of a symbolic number of rows, 4.
    in_place_vectors : int
        The most vectors of such a tile, or its columns if vectors run along k.
    depth : int
        The most steps of k that a tile sums over at once: its panel stays in a first-level cache.
    wide_depth, wide_converted_depth : int
        The same for panels of three vectors, and for such panels of pairs of bfloat16 or of
        quantized weights.
    unit_depth : int
        The most pairs of k of a panel that the processor's tiles (AMX) sum over at once, a multiple
        of 16: 128 KB of a second-level cache. Stretches that fit in a first-level cache take up to
        twice the time: C is read and written for each of them, in float32, and rounded by a
        separate pass. Measured on a Sapphire Rapids.
    round : int
        The steps of k in a round of a tile's loop. Fewer jumps free issue slots for the sibling
        hyperthread, and the end of few rounds is predicted.
    few_steps : int
        The steps of k below which all rounds have equal steps.
    least_share : float
        The share of a product from which its tiles have rounds of several steps. Rarer tiles have
        one step: GPT's products compile in 0.82 of the time, and run as fast within 1 %.
    """

    largest: tuple[int, int] = (6, 2)
    wide: tuple[int, int] | None = None
    widest: tuple[int, int] | None = None
    many_columns: int = 512
    single: tuple[int, int] | None = None
    narrow_steps: int = 8
    in_place: int = 4
    in_place_vectors: int = 8
    depth: int = 256
    wide_depth: int = 256
    wide_converted_depth: int = 256
    unit_depth: int = 1024
    round: int = 4
    few_steps: int = 16
    least_share: float = 0.2


@dataclass(frozen=True)
class Prefetch:
    """The prefetches of matrix products. ``benchmarks/products.py`` measures them.

    Attributes
    ----------
    steps : int
        The steps of k that parts of long rows are prefetched before they are read; 0 where that was
        not measured. Successive steps lie pages apart, and processors prefetch within a page.
    least_apart : int
        The least elements of a row of which parts are prefetched for a copy.
    spreads : bool
        Whether tiles spread their prefetches over their steps, instead of beginning with them.
    strips : int
        The strips of a task between which the next panel is prefetched; fewer do not hide its
        latency.
    in_place_rows : int
        The least rows of a tile that leave time for prefetches of a B in place.
    """

    steps: int = 0
    least_apart: int = 512
    spreads: bool = False
    strips: int = 16
    in_place_rows: int = 2


#: A B of one vector of columns gains nothing from packing, if many registers hold the sums. Threads
#: share the rows of a B with more steps, if it is packed.
ONE_VECTOR = Crossover(64, steps=(1, 1024), vectors=(1, 1), is_plain=True)

#: Few registers hold few sums: a B whose rows share few sets, are one vector or lie in distant
#: caches is packed early.
FEW_REGISTERS = (
    Crossover(8, is_crowded=True),
    Crossover(8, vectors=(0, 1)),
    Crossover(8, over_bytes=4 * MB),
)


@dataclass(frozen=True)
class ProductWays:
    """The crossovers between the ways to compute a matrix product.

    ``benchmarks/candidates.py`` measured them.

    Attributes
    ----------
    in_place : tuple[Crossover, ...]
        The limits of rows up to which a B of rows is read in place: the first that fits B.
    in_place_rows, symbolic_rows : int
        The limit for other matrices B, and the most for a symbolic number of rows.
    dot_rows : int
        The same for a B whose vectors run along k.
    narrow, masked_size : int
        A B with fewer columns than ``narrow``, and not whole vectors, is read in place up to so
        many elements of A.
    filled_rows : int or None
        The rows from which packing such a B gains the most if a panel has no empty lanes; None
        where empty lanes make no difference.
    rows_steps : int
        The steps of k up to which the tiles of rows of C follow each other.
    rows_vectors : int
        The vectors of columns above which they do.
    rows_begin_anywhere : bool
        Whether they do if rows of C do not begin with a cache line.
    rows_of_packed : int
        The rows for each step from which they do, if B is transposed.
    across_rows, across_columns : int
        The most rows and columns of C for which a transposed A is read in place: successive steps
        at larger distances take long to find in the tables of pages.
    crowded_across : tuple[int, int, int]
        The vectors above which, and the columns and rows up to which, this also holds for an A
        whose rows share few sets; zeros for never.
    copied_columns : int
        The columns above which an A whose rows share few sets is copied.
    transposed_copy : tuple[int, int, int] or None
        The least rows, columns and steps from which an untransposed A is copied transposed: in a
        first-level cache of 8 ways, the rows of a strip displace its panel.
    """

    in_place: tuple[Crossover, ...] = FEW_REGISTERS
    in_place_rows: int = 32
    symbolic_rows: int = 8
    dot_rows: int = 32
    narrow: int = 32
    masked_size: int = 2**18
    filled_rows: int | None = None
    rows_steps: int = 32
    rows_vectors: int = 2
    rows_begin_anywhere: bool = True
    rows_of_packed: int = 6
    across_rows: int = 2000
    across_columns: int = 128
    crowded_across: tuple[int, int, int] = (0, 0, 0)
    copied_columns: int = 63
    transposed_copy: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Transposed:
    """The crossovers from which a product is computed from the transposed factors.

    ``benchmarks/candidates.py`` measured them with AVX2 and AVX-512.

    Attributes
    ----------
    is_measured : bool
        Whether such products are chosen.
    columns, rows, steps : int
        The most columns, and the least rows and steps.
    elements : int
        The most elements of C, which the workspace holds once more.
    row_columns : int
        The most columns, if neither factor is transposed.
    dot_columns, steps_of_column : int
        The most columns if B is transposed, for at least so many steps for each column.
    across_vectors : int
        The vectors of columns of which an A in place is read as fast; 0 for none.
    copied, read : int
        Columns whose multiply-adds take as long as copying a transposed A, and reading it in place.
    least_columns : int
        Fewer columns take no less time: fewer sums do not hide the latency of multiply-adds.
    packed, packed_vectors, packed_rows : int
        Columns whose multiply-adds take as long as packing A, the vectors of its panels, and the
        least rows of an A that is packed.
    in_place : float
        The time of a column of a product that reads A in place.
    transposition : int
        The steps whose multiply-adds take as long as transposing C.
    gain : float
        The share of the time from which the transposed product is computed.
    one_thread : int
        The elements of C up to which one thread transposes them.
    task_vectors : int
        The vectors of rows of C that a task transposes at least.
    long_sum : int
        The steps above which the transposed product packs its factors: its sums are divided into
        stretches, so that errors are no larger.
    """

    is_measured: bool = False
    columns: int = 128
    rows: int = 8
    steps: int = 24
    elements: int = 2**20
    row_columns: int = 0
    dot_columns: int = 12
    steps_of_column: int = 30
    across_vectors: int = 0
    copied: int = 18
    read: int = 8
    least_columns: int = 16
    packed: int = 6
    packed_vectors: int = 2
    packed_rows: int = 96
    in_place: float = 1.3
    transposition: int = 16
    gain: float = 0.9
    one_thread: int = 16 * 1024
    task_vectors: int = 4
    long_sum: int = 1024


@dataclass(frozen=True)
class Tasks:
    """The division of matrix products among threads.

    ``benchmarks/products.py`` measures it with two threads. Divisions among more threads were not
    measured.

    Attributes
    ----------
    lane_ns : float
        Multiply-adds that a vector lane computes in a nanosecond.
    one_thread_ns : float
        Nanoseconds of work up to which one thread computes a product: a parallel region takes 400
        to 5000.
    one_panel_ns : float
        The same, if B is a single panel: threads share the rows, and each packs all of B.
    short_ns : float
        The nanoseconds of a product of a batch that is too short to claim atomically.
    columns : int
        The columns of B that a task reads. More columns save copies of A.
    copied : tuple[int, int]
        The rows of A whose multiply-adds take as long as packing B, and the columns of B whose
        multiply-adds take as long as copying A.
    rows_of_step, columns_of_row : int
        The same where rows of C are written one after the other: the rows for each step, and the
        fixed cost of a row, in columns. Threads that write parts of the same rows take up to 1.3
        times as long.
    late_rows : int
        The rows of a task from which packing its panels costs no more than packing all before.
    late_bytes : int
        The bytes of the panels of a task that are packed as fast as a parallel region starts.
    early_bytes : int
        The bytes of B up to which it is packed as a whole, instead of by several tasks again.
    parts : int
        The most parts of k. Each split adds one reduction.
    added_ns : float
        The nanoseconds that the reduction takes, with its parallel region.
    gain : float
        The work that is saved from which k is divided, relative to the work left.
    steal_panels, steal_blocks : int
        Work stealing: the least panels, or blocks of strips, of each thread.
    steal_strips : int
        The strips of a block: a panel is read once for all of them.
    steal_work : float
        The work up to which threads steal, relative to equal tasks without stealing.
    steal_strips_time : float
        The time of a block of strips, relative to the same work for panels.
    """

    lane_ns: float = 6.4
    one_thread_ns: float = 4000
    one_panel_ns: float = 11_000
    short_ns: float = 500
    columns: int = 2048
    copied: tuple[int, int] = (24, 24)
    rows_of_step: int = 2
    columns_of_row: int = 128
    late_rows: int = 64
    late_bytes: int = 256 * KB
    early_bytes: int = 32 * MB
    parts: int = 8
    added_ns: float = 1000
    gain: float = 1.08
    steal_panels: int = 2
    steal_blocks: int = 2
    steal_strips: int = 8
    steal_work: float = 1.1
    steal_strips_time: float = 1.08
