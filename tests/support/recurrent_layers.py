"""Recurrent layers and their gradient as loops over time in NumPy, with the results of the
operators."""

from __future__ import annotations

import functools

import numpy as np

from relax_grad.testing.samples.recurrent import backward_loop


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(data, hidden, cell, weight):
    steps = []
    for x in data:
        i, f, g, o = np.split(x + hidden @ weight.T, 4, -1)
        i, f, g, o, last = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o), cell
        cell = f * last + i * g
        m = np.tanh(cell)
        hidden = o * m
        slopes = [g * i * (1 - i), last * f * (1 - f), i * (1 - g * g), m * o * (1 - o), f]
        steps.append((hidden, cell, np.concatenate([*slopes, o * (1 - m * m)], -1)))
    return [np.stack(tensors) for tensors in zip(*steps, strict=True)]


def gru(data, hidden, weight, bias):
    steps = []
    for x in data:
        (x_r, x_z, x_n), (r, z, n) = np.split(x, 3, -1), np.split(hidden @ weight.T, 3, -1)
        r, z, kept, last = sigmoid(x_r + r), sigmoid(x_z + z), n + bias, hidden
        n = np.tanh(x_n + r * kept)
        fresh = (1 - z) * (1 - n * n)
        hidden = (1 - z) * n + z * last
        slopes = [fresh * kept * r * (1 - r), (last - n) * z * (1 - z), fresh * r, z]
        steps.append((hidden, np.concatenate(slopes, -1), fresh))
    return [np.stack(tensors) for tensors in zip(*steps, strict=True)]


def gru_reset(data, hidden, weight):
    """A GRU that resets the state before the product."""
    steps, (w_r, w_z, w_n) = [], np.split(weight, 3)
    for x in data:
        x_r, x_z, x_n = np.split(x, 3, -1)
        r, z, last = sigmoid(x_r + hidden @ w_r.T), sigmoid(x_z + hidden @ w_z.T), hidden
        n = np.tanh(x_n + (r * last) @ w_n.T)
        hidden = (1 - z) * n + z * last
        slopes = [last * r * (1 - r), (last - n) * z * (1 - z), (1 - z) * (1 - n * n), z, r]
        steps.append((hidden, np.concatenate(slopes, -1)))
    return [np.stack(tensors) for tensors in zip(*steps, strict=True)]


def rnn(activation):
    def forward(data, hidden, weight):
        steps = []
        for x in data:
            hidden = activation(x + hidden @ weight.T)
            steps.append(hidden)
        return [np.stack(steps)]

    return forward


#: The gradient of a layer, by its slopes and weight.
backward = functools.partial(backward_loop, np)

LAYERS = {
    "lstm": lstm,
    "gru": gru,
    "gru_reset": gru_reset,
    "rnn_tanh": rnn(np.tanh),
    "rnn_relu": rnn(lambda x: np.maximum(x, 0)),
}
