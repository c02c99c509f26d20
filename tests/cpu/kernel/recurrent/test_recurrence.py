"""The kernels of recurrent layers against NumPy in float64, for every vector width: sizes around
vectors, tiles and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import tvm
from machines import (
    HALVES,
    Run,
    compile_kernels,
    each_target,
    largest_error,
    of_halves,
    run_kernels,
)
from recurrent_layers import LAYERS, backward

from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.kernel.recurrent.layer import Layer
from relax_grad.cpu.kernel.recurrent.recurrence import recurrence, recurrent_backward
from relax_grad.cpu.target import CPU

#: Steps, batch and size. The sums of the last ones have several stretches.
EXTENTS = [(3, 5, 7), (1, 1, 33), (4, 37, 3), (2, 9, 70)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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


def layers(cpu: CPU, extents: Callable) -> Iterator[tuple[partial, list, Callable]]:
    """Yield the generator of a kernel, the shapes of its arguments, and a reference, for layers of
    all kinds."""
    for kind, reference in LAYERS.items():
        for sizes in extents(kind):
            of = Layer(kind, *sizes)
            shapes = [of.shape(of.gates), *[of.initial()] * (1 + (kind == "lstm")), of.weight()]
            shapes += [[of.size]] if kind == "gru" else []
            yield partial(recurrence, of, cpu), shapes, reference


def gradients(cpu: CPU, extents: Callable) -> Iterator[tuple[partial, list, Callable]]:
    """Yield the same for the gradients of layers."""
    for kind in ("lstm", "gru", "gru_reset", "rnn"):
        for sizes in extents(kind):
            of = Layer(kind, *sizes)
            shapes = [of.shape(), of.shape(of.slopes), of.weight()]
            for cells in ([], [of.shape()]) if kind == "lstm" else ([],):
                kernel = partial(recurrent_backward, of, cpu, has_cells_grad=bool(cells))
                yield kernel, [*shapes, *cells], backward


def some(kind: str) -> list[tuple[int, int, int]]:
    return EXTENTS if kind in ("lstm", "gru_reset") else EXTENTS[:1]


@each_target
def test_layers(target):
    check([(make(), *case) for make, *case in layers(CPU.of(target), some)], target)


@each_target
def test_gradients(target):
    check([(make(), *case) for make, *case in gradients(CPU.of(target), some)], target)


@each_target
def test_unread_results_are_not_written(target):
    """Elements that no kernel writes are NaN here."""
    cpu, rng = CPU.of(target), np.random.default_rng(0)
    unread_of = {"lstm": (1, 2), "gru": (1, 2), "gru_reset": (0, 1)}

    def few(kind: str) -> list[tuple[int, int, int]]:
        return [(2, 3, 16)] if kind in unread_of else []

    cases = [(*case, unread_of[case[0].args[0].kind]) for case in layers(cpu, few)]
    cases += [(*case, (1,)) for case in gradients(cpu, few)][:2]
    runs = []
    for make, shapes, reference, unread in cases:
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
        results = [value.shape for value in reference(*arrays)]
        runs += [Run(make(**options), arrays, results) for options in ({}, {"unread": unread})]
    results = run_kernels(runs, target)
    for (*_, unread), whole, part in zip(cases, results[::2], results[1::2], strict=True):
        for i, (value, other) in enumerate(zip(whole, part, strict=True)):
            assert np.isfinite(value).all()
            np.testing.assert_array_equal(other, value if i not in unread else np.nan)


def in_bfloat16(cases: Sequence, target) -> Iterator[tuple[list, list]]:
    """Yield the results of kernels of bfloat16, and those in float64 of the same numbers."""
    rng = np.random.default_rng(0)
    arguments = [
        [(rng.normal(size=shape) * 0.5).astype(BFLOAT16) for shape in shapes]
        for _, shapes, _ in cases
    ]
    wanted = [
        reference(*(array.astype("float64") for array in arrays))
        for (_, _, reference), arrays in zip(cases, arguments, strict=True)
    ]
    functions = {
        f"kernel{i}": stored_as(
            ["bfloat16"] * (len(arguments[i]) + len(wanted[i])), len(wanted[i]), make
        )
        for i, (make, _, _) in enumerate(cases)
    }
    library = compile_kernels(functions, target)
    for name, arrays, expected in zip(functions, arguments, wanted, strict=True):
        results = [tvm.runtime.empty(value.shape, "bfloat16") for value in expected]
        library[name](*map(tvm.runtime.tensor, arrays), *results)
        yield [result.numpy().astype("float64") for result in results], expected


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("make", [layers, gradients])
def test_bfloat16(make, name):
    """Odd sizes end with half a pair, and with a part of a tile; 37 sequences are two tiles."""
    target, sizes = of_halves(name), [(4, 5, 7), (3, 1, 34), (2, 37, 3), (2, 3, 131)]
    cases = make(CPU.of(target), lambda kind: sizes[:: 1 if kind in ("lstm", "gru_reset") else 2])
    for results, wanted in in_bfloat16(list(cases), target):
        for result, value in zip(results, wanted, strict=True):
            assert largest_error(result, value) < 2.0**-6


@pytest.mark.parametrize("name", HALVES)
def test_results_of_bfloat16_are_rounded_once(name):
    """The state that the first step multiplies is a number of bfloat16."""
    target = of_halves(name)
    sizes = {"gru_reset": []}  # its second product is that of the rounded reset state
    cases = list(layers(CPU.of(target), lambda kind: sizes.get(kind, [(1, 5, 7), (1, 2, 34)])))
    for results, wanted in in_bfloat16(cases, target):
        for result, value in zip(results, wanted, strict=True):
            np.testing.assert_allclose(result, value, rtol=1.01 * 2.0**-8, atol=1e-5)


def test_results_of_tiles_do_not_depend_on_the_threads():
    """Nor on the sequences of a task, which are fewer for more threads."""
    target, results = of_halves("amx"), []
    for cores in (1, 21):
        cpu = replace(CPU.of(target), cores=cores)
        cases = [
            case
            for make in (layers, gradients)
            for case in make(cpu, lambda kind: [(2, 21, 37)] if kind == "gru_reset" else [])
        ]
        computed = [result for results, _ in in_bfloat16(cases, target) for result in results]
        results.append([result.tobytes() for result in computed])
    assert results[0] == results[1]


@pytest.mark.parametrize("name", HALVES)
def test_only_kernels_of_bfloat16_multiply_pairs_or_tiles(name):
    target, function = of_halves(name), {"amx": "relax_grad_tiles_add"}.get(name, "add_pairs")
    of = Layer("lstm", 2, 3, 5)
    make = partial(recurrence, of, CPU.of(target))
    assert function in str(stored_as(["bfloat16"] * 7, 3, make))
    assert function not in str(stored_as(["float16"] * 7, 3, make))
    narrowed = stored_as([*["float32"] * 4, *["bfloat16"] * 3], 3, make)
    assert function not in str(narrowed)
