"""Samples of recurrent layers and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

#: Steps, batch and size.
_EXTENTS = {"plain": (3, 2, 2), "one step": (1, 2, 3), "a sequence of its own": (4, 1, 1)}

#: The slopes and the gates of the layers.
_LAYERS = {"lstm": (6, 4), "gru": (4, 3), "gru that resets first": (5, 3), "rnn": (1, 1)}


def _sample(note: str, inputs: list, torch: Any, states: int) -> Sample:
    """Return a sample of a layer with a number of states; a plain one with symbolic steps and batch
    and in all dtypes."""
    symbolic = {0: {0: "t", 1: "b"}} | {1 + i: {0: "b"} for i in range(states)}
    plain = note == "plain"
    return Sample(
        inputs,
        tvm_order=1 if plain and len(inputs) > 2 else None,
        symbolic=symbolic if plain else None,
        torch=torch,
        dtypes=Sample.dtypes if plain else (),
        note=note,
    )


@register_samples("relax.grad.lstm")
def lstm(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (steps, batch, size) in _EXTENTS.items():
        inputs = _normal(
            rng, (steps, batch, 4 * size), (batch, size), (batch, size), (4 * size, size)
        )
        yield _sample(note, inputs, _torch_lstm, states=2)


@register_samples("relax.grad.gru")
def gru(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (steps, batch, size) in _EXTENTS.items():
        inputs = _normal(rng, (steps, batch, 3 * size), (batch, size), (3 * size, size), (size,))
        yield _sample(note, inputs, _torch_gru, states=1)
    for note in ("plain", "one step"):
        steps, batch, size = _EXTENTS[note]
        inputs = _normal(rng, (steps, batch, 3 * size), (batch, size), (3 * size, size))
        sample = _sample(note, inputs, _torch_gru_that_resets_first, states=1)
        yield replace(sample, note=f"{note}, resets first")


@register_samples("relax.grad.rnn_tanh")
def rnn_tanh(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (steps, batch, size) in _EXTENTS.items():
        inputs = _normal(rng, (steps, batch, size), (batch, size), (size, size))
        yield _sample(note, inputs, _torch_rnn("tanh"), states=1)


@register_samples("relax.grad.rnn_relu")
def rnn_relu(rng: np.random.Generator) -> Iterator[Sample]:
    for note, (steps, batch, size) in _EXTENTS.items():
        inputs = _normal(rng, (steps, batch, size), (batch, size), (size, size))
        yield _sample(note, inputs, _torch_rnn("relu"), states=1)


@register_samples("relax.grad.recurrent_backward")
def recurrent_backward(rng: np.random.Generator) -> Iterator[Sample]:
    steps, batch, size = 3, 2, 2
    states = (steps, batch, size)
    for note, (count, gates) in _LAYERS.items():
        shapes = [states, (steps, batch, count * size), (gates * size, size)]
        for with_cells in (True, False) if note == "lstm" else (False,):
            yield Sample(
                _normal(rng, *shapes, *([states] if with_cells else [])),
                tvm_order=1,
                symbolic={i: {0: "t", 1: "b"} for i in (0, 1, *([3] if with_cells else []))},
                torch=backward_loop,
                dtypes=Sample.dtypes if with_cells else (),
                note=note + " with cells" * with_cells,
            )


@register_samples("relax.grad.recurrent_tangent")
def recurrent_tangent(rng: np.random.Generator) -> Iterator[Sample]:
    steps, batch, size = 3, 2, 2
    states, initial = (steps, batch, size), (batch, size)
    for note, (count, gates) in _LAYERS.items():
        shapes = [(steps, batch, gates * size), states, initial, (steps, batch, count * size)]
        cell = [initial] if note == "lstm" else []
        symbolic = {i: {0: "t", 1: "b"} for i in (0, 1, 3)} | {2: {0: "b"}}
        yield Sample(
            _normal(rng, *shapes, (gates * size, size), *cell),
            tvm_order=1,
            symbolic=symbolic | ({5: {0: "b"}} if cell else {}),
            torch=_torch_tangent,
            dtypes=Sample.dtypes if cell else (),
            note=note,
        )


@register_samples("relax.grad.previous_steps")
def previous_steps(rng: np.random.Generator) -> Iterator[Sample]:
    for steps in (3, 1):
        inputs = _normal(rng, (steps, 2, 2), (2, 2))
        yield _sample(
            "plain" if steps > 1 else "one step",
            inputs,
            lambda torch, x, start: torch.cat([start[None], x[:-1]]),
            states=1,
        )


@register_samples("relax.grad.next_steps")
def next_steps(rng: np.random.Generator) -> Iterator[Sample]:
    for steps in (3, 1):
        yield _sample(
            "plain" if steps > 1 else "one step",
            _normal(rng, (steps, 2)),
            lambda torch, x: torch.cat([x[1:], torch.zeros_like(x[:1])]),
            states=0,
        )


def _normal(rng: np.random.Generator, *shapes: Any) -> list[np.ndarray]:
    return [rng.normal(size=shape) for shape in shapes]


def _torch_lstm(torch: Any, data: Any, hidden: Any, cell: Any, weight: Any) -> Any:
    results: list[list] = [[], [], []]
    for x in data:
        i, f, g, o = (x + hidden @ weight.T).chunk(4, -1)
        i, f, o, g = i.sigmoid(), f.sigmoid(), o.sigmoid(), g.tanh()
        last, cell = cell, f * cell + i * g
        hidden = o * cell.tanh()
        slopes = [g * i * (1 - i), last * f * (1 - f), i * (1 - g**2)]
        slopes += [hidden * (1 - o), f, o * (1 - cell.tanh() ** 2)]
        for per_step, value in zip(results, (hidden, cell, torch.cat(slopes, -1)), strict=True):
            per_step.append(value)
    return tuple(map(torch.stack, results))


def _torch_gru(torch: Any, data: Any, hidden: Any, weight: Any, bias: Any) -> Any:
    results: list[list] = [[], [], []]
    for x in data:
        (x_r, x_z, x_n), (r, z, n) = x.chunk(3, -1), (hidden @ weight.T).chunk(3, -1)
        r, z, kept = (x_r + r).sigmoid(), (x_z + z).sigmoid(), n + bias
        n = (x_n + r * kept).tanh()
        fresh = (1 - z) * (1 - n**2)
        slopes = [fresh * kept * r * (1 - r), (hidden - n) * z * (1 - z), fresh * r, z]
        hidden = (1 - z) * n + z * hidden
        for per_step, value in zip(results, (hidden, torch.cat(slopes, -1), fresh), strict=True):
            per_step.append(value)
    return tuple(map(torch.stack, results))


def _torch_gru_that_resets_first(torch: Any, data: Any, hidden: Any, weight: Any) -> Any:
    results: list[list] = [[], []]
    w_r, w_z, w_n = weight.chunk(3)
    for x in data:
        x_r, x_z, x_n = x.chunk(3, -1)
        r, z = (x_r + hidden @ w_r.T).sigmoid(), (x_z + hidden @ w_z.T).sigmoid()
        n = (x_n + (r * hidden) @ w_n.T).tanh()
        slopes = [hidden * r * (1 - r), (hidden - n) * z * (1 - z), (1 - z) * (1 - n**2), z, r]
        hidden = (1 - z) * n + z * hidden
        for per_step, value in zip(results, (hidden, torch.cat(slopes, -1)), strict=True):
            per_step.append(value)
    return tuple(map(torch.stack, results))


def _torch_rnn(activation: str) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, hidden: Any, weight: Any) -> Any:
        states = []
        for x in data:
            hidden = getattr(torch, activation)(x + hidden @ weight.T)
            states.append(hidden)
        return torch.stack(states)

    return forward


def backward_loop(
    library: ModuleType, grad: Any, slopes: Any, weight: Any, cells_grad: Any = None
) -> tuple:
    """Return the gradient of a recurrent layer by a loop over time in a library of arrays: PyTorch
    or NumPy."""
    size = grad.shape[2]
    hidden = cell = library.zeros_like(grad[0])
    gates: list[Any] = []
    states: list[Any] = []
    for t in reversed(range(len(grad))):
        own = [slopes[t][:, i : i + size] for i in range(0, slopes.shape[2], size)]
        through = state = grad[t] + hidden
        if len(own) == 6:
            state = own[5] * through + cell
            state = state if cells_grad is None else state + cells_grad[t]
            products = [own[0] * state, own[1] * state, own[2] * state, own[3] * through]
            cell = own[4] * state
        elif len(own) == 5:
            last = own[2] * state
            reset = last @ weight[2 * size :]
            products = [own[0] * reset, own[1] * state, last]
        else:
            products = [slope * state for slope in own[:3]]
        gates.insert(0, library.concatenate(products, -1))
        states.insert(0, state)
        if len(own) == 5:
            both = gates[0][:, : 2 * size] @ weight[: 2 * size]
            hidden = both + own[3] * state + own[4] * reset
        else:
            hidden = gates[0] @ weight + (own[3] * state if len(own) == 4 else 0)
    results = library.stack(gates), library.stack(states), hidden
    return (*results, cell) if len(own) == 6 else results


def _torch_tangent(
    torch: Any, gates: Any, states: Any, hidden: Any, slopes: Any, weight: Any, cell: Any = None
) -> Any:
    size = states.shape[2]
    results: list[list] = [[], [], []]
    for x, state, row in zip(gates, states, slopes, strict=True):
        own = row.split(size, -1)
        sums = x + hidden @ weight.T
        if len(own) == 5:
            both, last = x.split([2 * size, size], -1)
            both = both + hidden @ weight[: 2 * size].T
            reset = own[0] * both[:, :size] + own[4] * hidden
            sums = torch.cat([both, last + reset @ weight[2 * size :].T], -1)
        parts = sums.split(size, -1)
        for slope, factor in list(zip(own, parts, strict=False))[len(own) == 5 : 3]:
            state = state + slope * factor
        if len(own) == 6:
            cell = state + own[4] * cell
            hidden = own[5] * cell + own[3] * parts[3]
        else:
            hidden = state + (own[3] * hidden if len(own) in (4, 5) else 0)
        for per_step, value in zip(results, (hidden, sums, cell), strict=True):
            per_step.append(value)
    return tuple(torch.stack(result) for result in results[: 2 + (len(own) == 6)])
