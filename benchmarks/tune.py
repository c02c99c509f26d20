"""Faster values of the processor's row in cpu/tuning.py, as a row of Python.

The row of ``relax_grad/cpu/tuning.py`` that fits this machine is the beginning. One value changes
at a time, and the kernels whose speed depends on it are measured in turn with those of the row. The
fastest other value replaces that of the row if it takes at most ``--gain`` of the time, in the
geometric mean of the kernels' medians, in two measurements. The values after it are measured with
it. In the end, the row is printed as Python. ``--candidates`` prints the candidates of each value.
"""

from __future__ import annotations

import contextlib
import functools
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import _timing
import numpy as np
import tvm
from _benchmark import Benchmark, Rows, processor
from _contestants import difference, flat
from _paired import median_ratio, prepared, target_of
from rows import ROWS
from tvm import relax

from relax_grad.cpu import target as targets
from relax_grad.cpu.limits import KB, MB
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import Tuning

#: The threads of a measurement.
_THREADS = 2

_PRODUCTS = (
    "NN 512 x 512 x 512",
    "NT 1024 x 768 x 768",
    "TN 1024 x 768 x 3072",
    "NN 1024 x 3072 x 768",
    "NN 1000 x 1000 x 1000",
    "attention scores 48x256x64 @ 48x256x64",
    "attention values 48x256x256 @ 48x256x64",
)
_LARGE = (
    "TN 1024 x 768 x 3072",
    "NN 1024 x 3072 x 768",
    "NT 2048 x 2048 x 2048",
    "NN 2048 x 2048 x 2048",
)
_POINTWISE = (
    "forward 8x256x14² -> 1024, 1x1",
    "data gradient 8x256x14² -> 1024, 1x1",
    "weight gradient 8x256x14² -> 1024, 1x1",
    "forward 8x64x56² -> 256, 1x1",
    "data gradient 8x64x56² -> 256, 1x1",
    "weight gradient 8x64x56² -> 256, 1x1",
)
_STRIDED = (
    "forward 8x3x224² -> 64, 7x7, stride 2",
    "forward 8x128x56² -> 128, 3x3, stride 2",
    "data gradient 8x128x56² -> 128, 3x3, stride 2",
    "weight gradient 8x128x56² -> 128, 3x3, stride 2",
    "forward 8x512x14² -> 512, 3x3, stride 2",
)
_WINOGRAD = (
    "forward 8x64x56² -> 64, 3x3",
    "data gradient 8x128x28² -> 128, 3x3",
    "forward 8x256x14² -> 256, 3x3",
    "data gradient 8x512x7² -> 512, 3x3",
)
_WEIGHT_GRADIENTS = (
    "weight gradient 8x64x56² -> 64, 3x3",
    "weight gradient 8x256x14² -> 256, 3x3",
    "weight gradient 8x128x56² -> 128, 3x3, stride 2",
    "weight gradient 8x3x224² -> 64, 7x7, stride 2",
)
_DEPTHWISE = (
    "forward 8x144x56² -> 144, 3x3, depthwise",
    "data gradient 8x144x56² -> 144, 3x3, depthwise",
    "weight gradient 8x144x56² -> 144, 3x3, depthwise",
    "forward 8x96x112² -> 96, 3x3, stride 2, depthwise",
)
_ATTENTION = (
    "attention and gradients 4x256x12x64",
    "attention, causal and gradients 2x512x12x32",
    "attention, causal 1x1024x12x64",
)

#: Returns the candidates of a row.
_Candidates = Callable[[Tuning], Sequence]


@dataclass(frozen=True)
class Value:
    """A value of a row that this program measures.

    Attributes
    ----------
    subject, name : str
        The field of :class:`~relax_grad.cpu.tuning.Tuning`, and its field.
    candidates : Callable
        Returns the values to try for a row.
    kernels : Sequence[str]
        The rows of the benchmark whose speed depends on it.
    """

    subject: str
    name: str
    candidates: _Candidates
    kernels: Sequence[str]

    def __str__(self) -> str:
        return f"{self.subject}.{self.name}"

    def of(self, row: Tuning) -> object:
        """Return the value of a row."""
        return getattr(getattr(row, self.subject), self.name)

    def set_in(self, row: Tuning, value: object) -> Tuning:
        """Return a row with another value."""
        subject = replace(getattr(row, self.subject), **{self.name: value})
        return replace(row, **{self.subject: subject})

    def others(self, row: Tuning) -> list:
        """Return the candidates but the value of the row."""
        return [value for value in self.candidates(row) if value != self.of(row)]


def tiles(vectors: Sequence[int]) -> _Candidates:
    """Return the candidates for a tile, for each number of vectors: the most rows whose sums fit in
    the registers with their operands, and fewer."""

    def candidates(row: Tuning) -> list[tuple[int, int]]:
        most = {v: (row.registers - 1 - v) // v for v in vectors}
        return [
            (rows, v)
            for v, limit in most.items()
            for rows in sorted({limit, limit - 2, 8, 6, 4}, reverse=True)
            if 0 < rows <= limit
        ]

    return candidates


def optional_tiles(vectors: Sequence[int]) -> _Candidates:
    """Return the candidates for a tile that a row may lack."""
    return lambda row: [None, *tiles(vectors)(row)]


def of(*values: object) -> _Candidates:
    """Return the same candidates for all rows."""
    return lambda row: values


VALUES = (
    Value("tiles", "largest", tiles((1, 2, 3)), _PRODUCTS),
    Value("tiles", "wide", optional_tiles((2, 3)), _PRODUCTS),
    Value("tiles", "widest", optional_tiles((3, 4)), _PRODUCTS),
    Value("tiles", "depth", of(128, 192, 256, 384, 512), _PRODUCTS),
    Value("tiles", "wide_depth", of(128, 192, 256, 384), _PRODUCTS),
    Value("tiles", "round", of(1, 2, 4, 8), _PRODUCTS),
    Value("caches", "factor", of(512 * KB, MB, 2 * MB), _LARGE),
    Value("caches", "task", of(256 * KB, 384 * KB, 544 * KB, 768 * KB), _LARGE),
    Value("prefetch", "steps", of(0, 2, 4, 8), _LARGE),
    Value("prefetch", "spreads", of(False, True), _LARGE),
    Value("prefetch", "strips", of(8, 16, 32), _LARGE),
    Value("tasks", "columns", of(1024, 2048, 4096), _LARGE),
    Value("convolutions", "tile", tiles((1, 2, 3)), (*_POINTWISE, *_STRIDED)),
    Value("convolutions", "source", of(200 * KB, 400 * KB, 800 * KB), (*_POINTWISE, *_STRIDED)),
    Value("convolutions", "panel", of(16 * KB, 32 * KB, 48 * KB), (*_POINTWISE, *_STRIDED)),
    Value("convolutions", "weight_chunk", of(80 * KB, 160 * KB, 320 * KB), _WEIGHT_GRADIENTS),
    Value("convolutions", "stem_chunk", of(64 * KB, 128 * KB, 256 * KB), _WEIGHT_GRADIENTS),
    Value("convolutions", "depthwise_chunk", of(48 * KB, 96 * KB, 192 * KB), _DEPTHWISE),
    Value("convolutions", "depthwise_weight_chunk", of(64 * KB, 128 * KB, 256 * KB), _DEPTHWISE),
    Value("convolutions", "winograd_round", of(1, 2, 4), _WINOGRAD),
    Value("convolutions", "winograd_fused", of(384 * KB, 768 * KB, 1536 * KB), _WINOGRAD),
    Value("convolutions", "winograd_task", of(256 * KB, 512 * KB, MB), _WINOGRAD),
    Value("attention", "largest", tiles((1, 2, 3)), _ATTENTION),
    Value("attention", "wide", optional_tiles((3, 4)), _ATTENTION),
)


@contextlib.contextmanager
def in_place_of(old: Tuning, row: Tuning) -> Iterator[None]:
    """Generate kernels with one row in place of another."""
    rows = targets.ROWS
    targets.ROWS = tuple(row if each is old else each for each in rows)
    try:
        yield
    finally:
        targets.ROWS = rows


class Kernels:
    """The kernels of rows of this machine, compiled when they are first measured.

    Parameters
    ----------
    target : tvm.target.Target
        This machine.
    """

    def __init__(self, target: tvm.target.Target):
        self.target = target
        self.row = CPU.of(target).tuning
        self._rows = {row.name: row for row in ROWS}
        self._tensors: dict[str, list[tvm.runtime.Tensor]] = {}
        self._modules: dict[str, tvm.IRModule] = {}
        self._results: dict[str, list[np.ndarray]] = {}
        self._made: dict[tuple[Tuning, str], Callable[[], object]] = {}

    def ratio(self, row: Tuning, other: Tuning, names: Sequence[str], repeats: int) -> float:
        """Return the geometric mean, over kernels, of the time with another row relative to the
        time with a row: medians of paired samples."""
        ratios = []
        for name in names:
            calls = {"other": self._kernel(other, name), "row": self._kernel(row, name)}
            times = _timing.measure(calls, repeats, 20, threads=_THREADS, binds=True)
            ratios.append(median_ratio(times["other"], times["row"]))
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def _kernel(self, row: Tuning, name: str) -> Callable[[], object]:
        if (row, name) not in self._made:
            if name not in self._tensors:
                arrays = self._rows[name].arrays()
                self._tensors[name] = [tvm.runtime.tensor(array) for array in arrays]
                self._modules[name] = self._rows[name].module(arrays)
            with in_place_of(self.row, row):
                program = tvm.compile(self._modules[name], self.target, relax_pipeline="relax_grad")
            function = relax.VirtualMachine(program, tvm.cpu())["main"]
            tensors = self._tensors[name]
            results = flat(function(*tensors))
            error = difference(results, self._results.setdefault(name, results))
            if not error < 1e-3:
                raise ValueError(f"{name}: a result differs by {error:.1e} of the largest element")
            self._made[row, name] = lambda: function(*tensors)
        return self._made[row, name]


class Search:
    """The fastest row, one value after the other.

    Parameters
    ----------
    kernels : Kernels
        The kernels of rows of this machine.
    """

    def __init__(self, kernels: Kernels):
        self.kernels, self.row, self.tried = kernels, kernels.row, 0

    def measure(self, value: Value, repeats: int, gain: float) -> dict:
        """Return the ratio of each candidate of a value, and the one that the row has from now
        on."""
        ratios: dict[int, float] = {}
        self.tried += 1
        others = value.others(self.row)
        changed = [value.set_in(self.row, other) for other in others]
        for i, row in enumerate(changed):
            ratios[i] = self.kernels.ratio(self.row, row, value.kernels, repeats)
        found = {_text(other): round(ratios[i], 3) for i, other in enumerate(others)}
        figures = {"now": _text(value.of(self.row)), **found}
        best = min(ratios, key=ratios.__getitem__, default=None)
        if best is not None and ratios[best] <= gain:
            again = self.kernels.ratio(self.row, changed[best], value.kernels, repeats)
            figures |= {"once more": round(again, 3)}
            if again <= gain:
                figures["new"], self.row = _text(others[best]), changed[best]
        return figures


def source_of(row: Tuning, base: Tuning, machine: str) -> str:
    """Return the Python of a row of this machine, as a change of the row that it had."""
    lines = ["replace(", "    BASE,", f"    measured={machine!r},"]
    for subject in dict.fromkeys(value.subject for value in VALUES):
        new, old = getattr(row, subject), getattr(base, subject)
        fields = [
            f"{value.name}={_text(value.of(row))}"
            for value in VALUES
            if value.subject == subject and value.of(row) != value.of(base)
        ]
        if new != old:
            lines.append(f"    {subject}=replace(BASE.{subject}, {', '.join(fields)}),")
    return "\n".join([f"# BASE is the row {base.name!r}.", *lines, ")"])


def _text(value: object) -> str:
    """Return a value as it is written in a row."""
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= 16 * KB
        and value % KB == 0
    ):
        return f"{value // MB} * MB" if value % MB == 0 else f"{value // KB} * KB"
    return repr(value)


@functools.cache
def _search() -> Search:
    search = Search(Kernels(prepared(Namespace(vectors=None))))
    print(f"{processor()}, for LLVM {target_of(None)}: the row {search.row.name!r}", flush=True)
    return search


def measured(value: Value, args: Namespace) -> dict:
    """Return the ratios of a value's candidates."""
    search = _search()
    if args.candidates:
        others = [_text(other) for other in value.others(search.row)]
        return {"now": _text(value.of(search.row)), "candidates": others}
    return search.measure(value, args.repeats, args.gain)


def _summary(rows: Rows) -> str:
    search = _search()
    if search.row == search.kernels.row:
        return "no other value is faster" if search.tried else ""
    return source_of(search.row, search.kernels.row, processor())


BENCHMARK = Benchmark(
    rows=lambda args: {str(value): value for value in VALUES},
    measure=measured,
    summary=_summary,
    options={
        "--candidates": {"action": "store_true", "help": "print the candidates"},
        "--gain": {
            "type": float,
            "default": 0.98,
            "help": "the share of the time to reach (default: 0.98)",
        },
    },
)
