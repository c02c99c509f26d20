"""The kernels of recurrent layers against NumPy in float64, for every vector width: sizes around vectors, tiles and tasks."""

from __future__ import annotations

import numpy as np
from machines import Run, each_target, largest_error, run_kernels

from relax_grad.cpu.kernel.recurrent import Layer, recurrence, recurrent_backward
from relax_grad.cpu.target import CPU

#: Steps, batch and size.
EXTENTS = [(3, 5, 7), (1, 1, 33), (4, 37, 3)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(data, hidden, cell, weight):
    found = []
    for x in data:
        i, f, g, o = np.split(x + hidden @ weight.T, 4, -1)
        i, f, g, o, last = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o), cell
        cell = f * last + i * g
        m = np.tanh(cell)
        hidden = o * m
        slopes = [g * i * (1 - i), last * f * (1 - f), i * (1 - g * g), m * o * (1 - o), f]
        found.append((hidden, cell, np.concatenate([*slopes, o * (1 - m * m)], -1)))
    return [np.stack(each) for each in zip(*found, strict=True)]


def gru(data, hidden, weight, bias):
    found = []
    for x in data:
        (x_r, x_z, x_n), (r, z, n) = np.split(x, 3, -1), np.split(hidden @ weight.T, 3, -1)
        r, z, kept, last = sigmoid(x_r + r), sigmoid(x_z + z), n + bias, hidden
        n = np.tanh(x_n + r * kept)
        fresh = (1 - z) * (1 - n * n)
        hidden = (1 - z) * n + z * last
        slopes = [fresh * kept * r * (1 - r), (last - n) * z * (1 - z), fresh * r, z]
        found.append((hidden, np.concatenate(slopes, -1), fresh))
    return [np.stack(each) for each in zip(*found, strict=True)]


def rnn(activation):
    def forward(data, hidden, weight):
        found = []
        for x in data:
            hidden = activation(x + hidden @ weight.T)
            found.append(hidden)
        return [np.stack(found)]

    return forward


def backward(grad, slopes, weight, cells=None):
    size = grad.shape[2]
    hidden = cell = np.zeros_like(grad[0])
    gates, states = [], []
    for t in reversed(range(len(grad))):
        own = np.split(slopes[t], slopes.shape[2] // size, -1)
        through = state = grad[t] + hidden
        if len(own) == 6:
            state = own[5] * through + cell + (0 if cells is None else cells[t])
            found = [own[0] * state, own[1] * state, own[2] * state, own[3] * through]
            cell = own[4] * state
        else:
            found = [each * state for each in own[:3]]
        gates.insert(0, np.concatenate(found, -1))
        states.insert(0, state)
        hidden = gates[0] @ weight + (own[3] * state if len(own) == 4 else 0)
    return [np.stack(gates), np.stack(states), hidden, *([cell] if len(own) == 6 else [])]


LAYERS = {
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": rnn(np.tanh),
    "rnn_relu": rnn(lambda x: np.maximum(x, 0)),
}


def check(cases, target) -> None:
    """Compare kernels of ``(kernel, shapes of the arguments, reference)``, compiled together."""
    rng = np.random.default_rng(0)
    runs, wanted = [], []
    for kernel, shapes, reference in cases:
        arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
        wanted.append(reference(*(each.astype("float64") for each in arrays)))
        runs.append(Run(kernel, arrays, [each.shape for each in wanted[-1]]))
    for found, expected in zip(run_kernels(runs, target), wanted, strict=True):
        for got, value in zip(found, expected, strict=True):
            assert largest_error(got, value) < 5e-6


@each_target
def test_layers(target):
    cases = []
    for kind, reference in LAYERS.items():
        for extents in EXTENTS if kind == "lstm" else EXTENTS[:1]:
            of = Layer(kind, *extents)
            shapes = [of.shape(of.gates), *[of.initial()] * (1 + (kind == "lstm")), of.weight()]
            shapes += [[of.size]] if kind == "gru" else []
            cases.append((recurrence(of, CPU.of(target)), shapes, reference))
    check(cases, target)


@each_target
def test_gradients(target):
    cases = []
    for kind in ("lstm", "gru", "rnn"):
        for extents in EXTENTS if kind == "lstm" else EXTENTS[:1]:
            of = Layer(kind, *extents)
            shapes = [of.shape(), of.shape(of.slopes), of.weight()]
            for cells in ([], [of.shape()]) if kind == "lstm" else ([],):
                kernel = recurrent_backward(of, CPU.of(target), has_cells_grad=bool(cells))
                cases.append((kernel, [*shapes, *cells], backward))
    check(cases, target)
