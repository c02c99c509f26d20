"""The kernels of recurrent layers against NumPy in float64, for every vector width: sizes around
vectors, tiles and tasks."""

from __future__ import annotations

import numpy as np
from machines import Run, each_target, largest_error, run_kernels
from recurrent_layers import LAYERS, backward

from relax_grad.cpu.kernel.recurrent import Layer, recurrence, recurrent_backward
from relax_grad.cpu.target import CPU

#: Steps, batch and size.
EXTENTS = [(3, 5, 7), (1, 1, 33), (4, 37, 3)]


def check(cases, target) -> None:
    """Compare kernels of ``(kernel, shapes of the arguments, reference)``, compiled together."""
    rng = np.random.default_rng(0)
    runs, wanted = [], []
    for kernel, shapes, reference in cases:
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
        wanted.append(reference(*(array.astype("float64") for array in arrays)))
        runs.append(Run(kernel, arrays, [array.shape for array in wanted[-1]]))
    for results, expected in zip(run_kernels(runs, target), wanted, strict=True):
        for got, value in zip(results, expected, strict=True):
            assert largest_error(got, value) < 5e-6


@each_target
def test_layers(target):
    cases = []
    for kind, reference in LAYERS.items():
        for extents in EXTENTS if kind in ("lstm", "gru_reset") else EXTENTS[:1]:
            of = Layer(kind, *extents)
            shapes = [of.shape(of.gates), *[of.initial()] * (1 + (kind == "lstm")), of.weight()]
            shapes += [[of.size]] if kind == "gru" else []
            cases.append((recurrence(of, CPU.of(target)), shapes, reference))
    check(cases, target)


@each_target
def test_gradients(target):
    cases = []
    for kind in ("lstm", "gru", "gru_reset", "rnn"):
        for extents in EXTENTS if kind in ("lstm", "gru_reset") else EXTENTS[:1]:
            of = Layer(kind, *extents)
            shapes = [of.shape(), of.shape(of.slopes), of.weight()]
            for cells in ([], [of.shape()]) if kind == "lstm" else ([],):
                kernel = recurrent_backward(of, CPU.of(target), has_cells_grad=bool(cells))
                cases.append((kernel, [*shapes, *cells], backward))
    check(cases, target)
