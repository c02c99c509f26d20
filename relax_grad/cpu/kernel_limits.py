"""The subjects of a :class:`relax_grad.cpu.tuning.Tuning` for convolutions, attention, recurrent
layers, reductions and copies, as ``relax_grad/cpu/limits.py`` has those for matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from .limits import KB, MB


@dataclass(frozen=True)
class Convolutions:
    """The sizes of convolutions, in bytes unless stated otherwise.

    ``benchmarks/speed.py`` measures them. The machine of each choice was not recorded, except
    that ``product_pixels`` and ``winograd_round`` were measured on both makers' AVX-512.

    Attributes
    ----------
    tile : tuple[int, int]
        The pixels and vectors of the largest tile.
    product_pixels : int
        The fewest pixels of an image, of a known number of images in float32, for which a matrix
        product with images as rows is faster than a kernel with channels as lanes.
    source : int
        The source that a task copies, less than half of a second-level cache.
    target : int
        The target that a task accumulates with the channels last.
    panel : int
        The part of a panel that tiles read before they continue with the next source channels.
    weights : int
        Weights that stay in a second-level cache from one image to the next.
    small_plane : int
        The elements of small images, of which tiles read all rows of a channel.
    column_source : int
        The source that a task copies if lanes are columns.
    weight_chunk, stem_chunk : int
        The part of X that a tile of a weight gradient reads, and of dY if X has few channels.
    unit_pixels : int
        The pixels that the processor's tiles (AMX) sum over at once in a weight gradient.
    depthwise_chunk, depthwise_weight_chunk : int
        The source that a depthwise convolution copies at once, and X and dY for its weight
        gradient.
    winograd_round : int
        The steps of a round of the products of Winograd's filtering.
    winograd_fused : int
        The transformed weight up to which a task performs all steps of it.
    winograd_task, winograd_chunk : int
        The transformed data and results: for one task, and for a chunk of images.
    winograd_shared : tuple[int, int]
        Its weight gradient: the transformed squares of a chunk that threads share, and the most if
        the sums have as many bytes.
    winograd_own : tuple[int, int]
        The least and the most transformed squares of a chunk of one thread.
    """

    tile: tuple[int, int] = (6, 2)
    product_pixels: int = 144
    source: int = 400 * KB
    target: int = 96 * KB
    panel: int = 32 * KB
    weights: int = 512 * KB
    small_plane: int = 64
    column_source: int = 256 * KB
    weight_chunk: int = 160 * KB
    stem_chunk: int = 128 * KB
    unit_pixels: int = 512
    depthwise_chunk: int = 96 * KB
    depthwise_weight_chunk: int = 128 * KB
    winograd_round: int = 1
    winograd_fused: int = 768 * KB
    winograd_task: int = 512 * KB
    winograd_chunk: int = 8 * MB
    winograd_shared: tuple[int, int] = (4 * MB, 16 * MB)
    winograd_own: tuple[int, int] = (1 * MB, 2 * MB)


@dataclass(frozen=True)
class AttentionTiles:
    """The tiles of attention. ``benchmarks/attention.py`` measures them.

    Attributes
    ----------
    largest : tuple[int, int]
        The most rows and vectors of a tile.
    wide : tuple[int, int] or None
        A tile that needs fewer loads for a multiply-add; None where it is no faster, or was not
        measured.
    """

    largest: tuple[int, int] = (6, 2)
    wide: tuple[int, int] | None = None


@dataclass(frozen=True)
class Recurrences:
    """The tiles and tasks of recurrent layers. ``benchmarks/speed.py`` measures them; the
    machine of each choice was not recorded.

    Attributes
    ----------
    rows : int
        The most rows of a tile: sequences.
    vectors : tuple[int, ...]
        The vectors of columns that a tile may have. Without fused multiply-adds, short vectors need
        a register for the product.
    latency : int
        The cycles from a multiply-add to the next one of the same accumulator.
    depth : int
        The steps of k of a stretch, whose panel stays in a first-level cache.
    task : int
        The most sequences of a task.
    symbolic_task : int
        The sequences of a task, if their number is symbolic.
    """

    rows: int = 6
    vectors: tuple[int, ...] = (2,)
    latency: int = 5
    depth: int = 256
    task: int = 32
    symbolic_task: int = 12


@dataclass(frozen=True)
class Reductions:
    """The blocks of sums, softmax and pooling. ``benchmarks/speed.py`` measures them; the machine
    of each choice was not recorded.

    Attributes
    ----------
    register_vectors : int
        The vectors of columns whose sums are kept in registers.
    cache_columns : int
        The most columns whose sums are kept in a first-level cache, for rows of more columns than
        registers hold. A block in registers reads a few cache lines of each row, which takes up to
        twice as long as reading the rows in order.
    rows_at_once : int
        The rows that are added at once to sums in the cache: memory serves several requests.
    softmax_vectors : int
        The neighbouring columns, in vectors, of a block of softmax.
    pool_tasks : int
        Tasks of a pooling for each core; each task fills in the padding once.
    pool_band : int
        The bytes of the copied rows of a band, which stays in a first-level cache with its source
        rows and the rows of the result.
    pool_again : float
        The largest share of the copied rows of a band that the next band copies again.
    """

    register_vectors: int = 8
    cache_columns: int = 2048
    rows_at_once: int = 8
    softmax_vectors: int = 4
    pool_tasks: int = 16
    pool_band: int = 12 * KB
    pool_again: float = 1 / 4


@dataclass(frozen=True)
class Copies:
    """The tasks of concatenations, splits and scatter-adds. ``benchmarks/speed.py`` measures
    them; the machine of each choice was not recorded.

    Attributes
    ----------
    core_tasks : int
        Tasks for each core.
    one_thread : int
        The bytes that one thread copies in the time that a second one takes to wake up.
    part : int
        The minimum number of bytes of a part of a row.
    row_vectors : int
        The minimum number of vectors of a row that a task of a scatter-add adds.
    """

    core_tasks: int = 4
    one_thread: int = 128 * KB
    part: int = 16 * KB
    row_vectors: int = 4
