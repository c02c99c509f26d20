"""The sizes and limits that kernels are generated with: one :class:`Tuning` per family of
processors.

A new processor is a row of this file: the features of LLVM that recognise it, and the fields that
differ from a row above. :meth:`relax_grad.target.CPU.of` takes the first of :data:`ROWS` that fits
a target. Kernels read fields, and never ask for a maker or a generation.

``limits.py`` and ``kernel_limits.py`` beside this file have the fields with their units and the
benchmarks that measured them. The column ``measured`` of a row names the machines.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from math import inf

from .kernel_limits import AttentionTiles, Convolutions, Copies, Recurrences, Reductions
from .limits import (
    FEW_REGISTERS,
    KB,
    MB,
    ONE_VECTOR,
    Caches,
    Crossover,
    Prefetch,
    ProductTiles,
    ProductWays,
    Tasks,
    Transposed,
)


@dataclass(frozen=True)
class Tuning:
    """The sizes and limits of a family of processors.

    Attributes
    ----------
    name : str
        The family.
    measured : str
        The machines on which its values were measured.
    lanes, registers : int
        The float32 elements of a vector register, and the number of registers.
    features, without : tuple[str, ...]
        The features of LLVM that its targets have, and those that they lack.
    is_named : bool
        Whether its targets name a processor, and not a level of x86-64.
    multiplies_pairs : bool
        Whether ``vdpbf16ps`` of AVX512-BF16, where a target has it, is faster than multiply-adds of
        float32. On an Emerald Rapids, steps in bfloat16 took 1.6 to 2.1 times those in float32 with
        it.
    caches, tiles, prefetch, ways, transposed, tasks
        The values for matrix products, by subject.
    convolutions, attention, recurrences, reductions, copies
        The values for other kernels.
    """

    name: str
    measured: str
    lanes: int = 4
    registers: int = 16
    features: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    is_named: bool = False
    multiplies_pairs: bool = False
    caches: Caches = field(default=Caches(), repr=False)
    tiles: ProductTiles = field(default=ProductTiles(), repr=False)
    prefetch: Prefetch = field(default=Prefetch(), repr=False)
    ways: ProductWays = field(default=ProductWays(), repr=False)
    transposed: Transposed = field(default=Transposed(), repr=False)
    tasks: Tasks = field(default=Tasks(), repr=False)
    convolutions: Convolutions = field(default=Convolutions(), repr=False)
    attention: AttentionTiles = field(default=AttentionTiles(), repr=False)
    recurrences: Recurrences = field(default=Recurrences(), repr=False)
    reductions: Reductions = field(default=Reductions(), repr=False)
    copies: Copies = field(default=Copies(), repr=False)

    @cached_property
    def digest(self) -> str:
        """A text of all values, the same in every process."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()


#: Without fused multiply-adds, a product takes a register before it is added, and V8 reserves one
#: of 16: tiles of (6, 2) spill there. Three convolutions of 32 x 32 took 34.8 ms with them, and
#: 26.8 ms with (4, 2).
GENERIC = Tuning(
    "128-bit vectors (SSE, SIMD128)",
    "Zen 5: tiles of convolutions, natively and in Node; others are values of AVX2",
    convolutions=Convolutions(tile=(4, 2)),
)

NEON = replace(
    GENERIC,
    name="NEON",
    measured="not measured: values of AVX2 and AVX-512",
    registers=32,
    features=("neon",),
    tiles=replace(GENERIC.tiles, largest=(8, 3), in_place=8),
    ways=replace(GENERIC.ways, in_place=(ONE_VECTOR,)),
    convolutions=replace(GENERIC.convolutions, tile=(8, 3)),
    attention=AttentionTiles((8, 2)),
    recurrences=replace(GENERIC.recurrences, rows=8, symbolic_task=16),
)

AVX2 = replace(
    GENERIC,
    name="AVX2",
    measured="Zen 5 and Emerald Rapids, with vectors of AVX2",
    lanes=8,
    features=("avx2", "fma"),
    transposed=replace(GENERIC.transposed, is_measured=True),
    convolutions=replace(GENERIC.convolutions, tile=(6, 2)),
    recurrences=replace(GENERIC.recurrences, vectors=(2, 3)),
)

#: Intel's processors before Ice Lake have no instructions for SHA. AMD's with AVX2 have these, or
#: SSE4a. Their first-level cache has 32 KB in 8 ways, and they do not prefetch across pages.
EARLY_AVX2 = replace(
    AVX2,
    name="AVX2 before Ice Lake (Haswell to Comet Lake)",
    measured="Cascade Lake, with vectors of AVX2",
    without=("sha", "sse4a"),
    is_named=True,
    prefetch=replace(AVX2.prefetch, steps=4),
    ways=replace(
        AVX2.ways,
        in_place=(
            Crossover(4, is_crowded=True),
            Crossover(4, over_bytes=1536 * KB),
            Crossover(8, over_bytes=256 * KB, steps=(128, inf)),
            *FEW_REGISTERS,
        ),
        rows_steps=64,
        across_columns=0,
    ),
)

ZEN4 = replace(
    AVX2,
    name="Zen 4 and 5",
    measured="Zen 4 and Zen 5 (crossovers: Zen 5)",
    lanes=16,
    registers=32,
    features=("avx512f",),
    multiplies_pairs=True,
    caches=replace(AVX2.caches, task=544 * KB),
    tiles=replace(AVX2.tiles, largest=(8, 2), in_place=8),
    ways=replace(AVX2.ways, in_place=(ONE_VECTOR,), dot_rows=16, rows_begin_anywhere=False),
    transposed=replace(AVX2.transposed, row_columns=3),
    convolutions=replace(AVX2.convolutions, tile=(14, 2)),
    attention=AttentionTiles((8, 2)),
    recurrences=replace(AVX2.recurrences, rows=8, symbolic_task=16),
)

#: LLVM prefers shorter vectors on Intel's processors alone. Their cores load and issue less for
#: each thread where a hyperthread shares them, so that wide tiles are faster.
ICE_LAKE = replace(
    ZEN4,
    name="Ice Lake and later, and x86-64-v4",
    measured="Emerald Rapids",
    features=("avx512f", "prefer-256-bit"),
    multiplies_pairs=False,
    tiles=replace(
        ZEN4.tiles,
        wide=(9, 3),
        widest=(6, 4),
        single=(12, 16),
        wide_depth=192,
        wide_converted_depth=192,
    ),
    prefetch=replace(ZEN4.prefetch, steps=4, spreads=True),
    ways=replace(
        ZEN4.ways,
        in_place=(
            Crossover(8, over_bytes=2 * MB),
            Crossover(8, over_bytes=1536 * KB, is_crowded=True),
            Crossover(8, over_bytes=1536 * KB, steps=(2048, inf)),
            ONE_VECTOR,
        ),
        filled_rows=12,
        rows_steps=64,
        rows_vectors=4,
        rows_begin_anywhere=True,
        across_columns=384,
        crowded_across=(2, 128, 1024),
        copied_columns=128,
    ),
    transposed=replace(ZEN4.transposed, across_vectors=3),
    tasks=replace(ZEN4.tasks, one_panel_ns=4000),
    convolutions=replace(ZEN4.convolutions, product_pixels=64, winograd_round=4),
)

EARLY_AVX512 = replace(
    ICE_LAKE,
    name="AVX-512 before Ice Lake (Skylake to Cooper Lake)",
    measured="Cascade Lake",
    without=("sha", "sse4a"),
    is_named=True,
    tiles=replace(ICE_LAKE.tiles, wide_depth=256),
    ways=replace(
        ICE_LAKE.ways,
        in_place=(
            Crossover(8, over_bytes=6 * MB),
            Crossover(8, steps=(2048, inf)),
            Crossover(24, over_bytes=256 * KB, steps=(128, inf)),
            ONE_VECTOR,
        ),
        across_columns=0,
        crowded_across=(0, 0, 0),
        transposed_copy=(384, 384, 768),
    ),
    attention=AttentionTiles((8, 2), wide=(6, 4)),
)

#: All rows: a target has the first one that fits.
ROWS = (EARLY_AVX512, ICE_LAKE, ZEN4, EARLY_AVX2, AVX2, NEON, GENERIC)


def default_row(lanes: int, registers: int) -> Tuning:
    """Return the row of processors of which only the vectors and the registers are known."""
    plain = [row for row in ROWS if not row.is_named]
    fitting = [row for row in plain if (row.lanes, row.registers) == (lanes, registers)]
    return fitting[-1] if fitting else replace(GENERIC, lanes=lanes, registers=registers)
