"""Normalisations, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

from ._form import Input, Row, derived, positive, with_gradients

aten = torch.ops.aten

_EPSILON = 1e-5
_HIDDEN, _WIDTH = (4, 256, 768), (768,)
_IMAGE, _CHANNELS, _GROUPS = (8, 64, 56, 56), (64,), 32


def _inverse_deviation(x: np.ndarray, axes) -> np.ndarray:
    return 1 / np.sqrt(x.var(axes, keepdims=True) + _EPSILON)


def _batch_norm(bb, x, gamma, beta, mean, variance):
    results = bb.emit(
        relax.op.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, epsilon=_EPSILON)
    )
    return relax.TupleGetItem(results, 0)


def _batch_norm_gradients(bb, output_grad, x, gamma, mean, rstd):
    """Return all three gradients from given statistics, as the gradient rule computes them."""

    def emit(op, *args, **kwargs):
        return bb.emit(op(*args, **kwargs))

    op = relax.op
    beta_grad = emit(op.sum, output_grad, [0, 2, 3])
    gamma_grad = emit(grad.batch_norm_backward_gamma, output_grad, x, mean, rstd, axis=1)
    slope = emit(op.multiply, gamma, rstd)
    mean_grad = emit(op.negative, emit(op.multiply, slope, beta_grad))
    halved = emit(op.multiply, slope, relax.const(-0.5))
    variance_grad = emit(op.multiply, halved, emit(op.multiply, gamma_grad, rstd))
    data_grad = emit(
        grad.batch_norm_backward_data,
        *(output_grad, x, gamma, mean, rstd, mean_grad, variance_grad),
        axis=1,
    )
    return relax.Tuple([data_grad, gamma_grad, beta_grad])


def _torch_batch_norm(x, gamma, beta, mean, variance):
    return F.batch_norm(x, mean, variance, gamma, beta, True, 0.1, _EPSILON)


def _group_norm(_, x, gamma, beta):
    return relax.op.nn.group_norm(x, gamma, beta, _GROUPS, 1, [2, 3], _EPSILON)


def _layer_norm(_, x, gamma, beta):
    return relax.op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=_EPSILON)


def _both(
    names: tuple[str, str], inputs: list[Input], in_relax: Callable, in_torch: Callable, count: int
) -> list[Row]:
    """Return the rows of a norm, and of the norm with the gradients of its first inputs."""
    wrt = tuple(range(count))
    forward = Row("memory", names[0], inputs, in_relax, in_torch)
    known = [*inputs, inputs[0]]
    gradients = with_gradients(in_torch, *wrt)
    return [
        forward,
        Row("memory", names[1], known, in_relax, gradients, wrt=wrt, keeps_result=True),
    ]


_BATCH_NORMS = _both(
    ("batch_norm in training 8x64x56²", "batch_norm in training and gradients 8x64x56²"),
    [_IMAGE, _CHANNELS, _CHANNELS, _CHANNELS, positive(*_CHANNELS)],
    _batch_norm,
    _torch_batch_norm,
    3,
)
_LAYER_NORMS = _both(
    ("layer_norm 4x256x768", "layer_norm and gradients 4x256x768"),
    [_HIDDEN, _WIDTH, _WIDTH],
    _layer_norm,
    lambda x, gamma, beta: F.layer_norm(x, _WIDTH, gamma, beta, _EPSILON),
    3,
)

ROWS = [
    _BATCH_NORMS[0],
    Row(
        "memory",
        "batch_norm, gradients 8x64x56²",
        [
            *(_IMAGE, _IMAGE, _CHANNELS),
            derived(lambda dy, x, gamma: x.mean((0, 2, 3))),
            derived(lambda dy, x, *_: _inverse_deviation(x, (0, 2, 3)).ravel()),
        ],
        _batch_norm_gradients,
        lambda dy, x, gamma, mean, rstd: aten.native_batch_norm_backward(
            dy, x, gamma, None, None, mean, rstd, True, _EPSILON, [True, True, True]
        ),
    ),
    _BATCH_NORMS[1],
    _LAYER_NORMS[0],
    Row(
        "memory",
        "layer_norm, data gradient 4x256x768",
        [
            *(_HIDDEN, _HIDDEN, _WIDTH),
            derived(lambda dy, x, gamma: x.mean(-1, keepdims=True)),
            derived(lambda dy, x, *_: _inverse_deviation(x, -1)),
        ],
        lambda _, dy, x, gamma, mean, rstd: grad.layer_norm_backward_data(
            dy, x, gamma, mean, rstd, axes=[-1]
        ),
        lambda dy, x, gamma, mean, rstd: aten.native_layer_norm_backward(
            dy, x, _WIDTH, mean, rstd, gamma, gamma, [True, False, False]
        )[0],
    ),
    Row(
        "memory",
        "layer_norm, gamma gradient 4x256x768",
        [
            *(_HIDDEN, _HIDDEN),
            derived(lambda dy, x: x.mean(-1, keepdims=True)),
            derived(lambda dy, x, *_: _inverse_deviation(x, -1)),
        ],
        lambda _, dy, x, mean, rstd: grad.layer_norm_backward_gamma(dy, x, mean, rstd, axes=[-1]),
        lambda dy, x, mean, rstd: aten.native_layer_norm_backward(
            dy, x, _WIDTH, mean, rstd, dy[0, 0], dy[0, 0], [False, True, False]
        )[1],
    ),
    _LAYER_NORMS[1],
    *_both(
        ("rms_norm 4x256x768", "rms_norm and gradients 4x256x768"),
        [_HIDDEN, _WIDTH],
        lambda _, x, weight: relax.op.nn.rms_norm(x, weight, -1, _EPSILON),
        lambda x, weight: F.rms_norm(x, _WIDTH, weight, _EPSILON),
        2,
    ),
    *_both(
        ("group_norm 8x64x56², 32 groups", "group_norm and gradients 8x64x56², 32 groups"),
        [_IMAGE, _CHANNELS, _CHANNELS],
        _group_norm,
        lambda x, gamma, beta: F.group_norm(x, _GROUPS, gamma, beta, _EPSILON),
        3,
    ),
]
