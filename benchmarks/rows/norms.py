"""Normalisations, and their gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

from ._form import Row, derived, positive, pulled_back, with_gradients

aten = torch.ops.aten

_EPSILON = 1e-5
_HIDDEN, _WIDTH = (4, 256, 768), (768,)
_IMAGE, _CHANNELS, _GROUPS = (8, 64, 56, 56), (64,), 32


def _inverse_deviation(x: np.ndarray, axes) -> np.ndarray:
    return 1 / np.sqrt(x.var(axes, keepdims=True) + _EPSILON)


def _normalized(jax, x, axes):
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + _EPSILON)


def _by_channel(values):
    return values.reshape(-1, 1, 1)


def _jax_batch_norm(jax, x, gamma, beta, *_moving):
    return _normalized(jax, x, (0, 2, 3)) * _by_channel(gamma) + _by_channel(beta)


def _jax_layer_norm(jax, x, gamma, beta):
    return _normalized(jax, x, -1) * gamma + beta


def _jax_rms_norm(jax, x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + _EPSILON) * weight


def _jax_group_norm(jax, x, gamma, beta):
    groups = x.reshape(x.shape[0], _GROUPS, -1)
    return _normalized(jax, groups, -1).reshape(x.shape) * _by_channel(gamma) + _by_channel(beta)


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


def _torch_group_norm(x, gamma, beta):
    return F.group_norm(x, _GROUPS, gamma, beta, _EPSILON)


def _layer_norm(_, x, gamma, beta):
    return relax.op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=_EPSILON)


def _torch_layer_norm(x, gamma, beta):
    return F.layer_norm(x, _WIDTH, gamma, beta, _EPSILON)


def _rms_norm(_, x, weight):
    return relax.op.nn.rms_norm(x, weight, -1, _EPSILON)


def _torch_rms_norm(x, weight):
    return F.rms_norm(x, _WIDTH, weight, _EPSILON)


_BATCH_NORM = [_IMAGE, _CHANNELS, _CHANNELS, _CHANNELS, positive(*_CHANNELS)]

ROWS = [
    Row(
        "memory",
        "batch_norm in training 8x64x56²",
        _BATCH_NORM,
        _batch_norm,
        _torch_batch_norm,
        _jax_batch_norm,
    ),
    Row(
        "memory",
        "batch_norm, gradients 8x64x56²",
        [
            _IMAGE,
            _IMAGE,
            _CHANNELS,
            derived(lambda dy, x, gamma: x.mean((0, 2, 3))),
            derived(lambda dy, x, *_: _inverse_deviation(x, (0, 2, 3)).ravel()),
        ],
        _batch_norm_gradients,
        lambda dy, x, gamma, mean, rstd: aten.native_batch_norm_backward(
            dy, x, gamma, None, None, mean, rstd, True, _EPSILON, [True, True, True]
        ),
        lambda jax, dy, x, gamma, *_: pulled_back(_jax_batch_norm, jax, dy, x, gamma, gamma),
    ),
    Row(
        "memory",
        "batch_norm in training and gradients 8x64x56²",
        [*_BATCH_NORM, _IMAGE],
        _batch_norm,
        with_gradients(_torch_batch_norm, 0, 1, 2),
        _jax_batch_norm,
        wrt=(0, 1, 2),
        keeps_result=True,
    ),
    Row(
        "memory",
        "layer_norm 4x256x768",
        [_HIDDEN, _WIDTH, _WIDTH],
        _layer_norm,
        _torch_layer_norm,
        _jax_layer_norm,
    ),
    Row(
        "memory",
        "layer_norm, data gradient 4x256x768",
        [
            _HIDDEN,
            _HIDDEN,
            _WIDTH,
            derived(lambda dy, x, gamma: x.mean(-1, keepdims=True)),
            derived(lambda dy, x, *_: _inverse_deviation(x, -1)),
        ],
        lambda _, dy, x, gamma, mean, rstd: grad.layer_norm_backward_data(
            dy, x, gamma, mean, rstd, axes=[-1]
        ),
        lambda dy, x, gamma, mean, rstd: aten.native_layer_norm_backward(
            dy, x, _WIDTH, mean, rstd, gamma, gamma, [True, False, False]
        )[0],
        lambda jax, dy, x, gamma, *_: pulled_back(_jax_layer_norm, jax, dy, x, gamma, gamma)[0],
    ),
    Row(
        "memory",
        "layer_norm, gamma gradient 4x256x768",
        [
            _HIDDEN,
            _HIDDEN,
            derived(lambda dy, x: x.mean(-1, keepdims=True)),
            derived(lambda dy, x, *_: _inverse_deviation(x, -1)),
        ],
        lambda _, dy, x, mean, rstd: grad.layer_norm_backward_gamma(dy, x, mean, rstd, axes=[-1]),
        lambda dy, x, mean, rstd: aten.native_layer_norm_backward(
            dy, x, _WIDTH, mean, rstd, dy[0, 0], dy[0, 0], [False, True, False]
        )[1],
        lambda jax, dy, x, *_: pulled_back(_jax_layer_norm, jax, dy, x, dy[0, 0], dy[0, 0])[1],
    ),
    Row(
        "memory",
        "layer_norm and gradients 4x256x768",
        [_HIDDEN, _WIDTH, _WIDTH, _HIDDEN],
        _layer_norm,
        with_gradients(_torch_layer_norm, 0, 1, 2),
        _jax_layer_norm,
        wrt=(0, 1, 2),
        keeps_result=True,
    ),
    Row(
        "memory",
        "rms_norm 4x256x768",
        [_HIDDEN, _WIDTH],
        _rms_norm,
        _torch_rms_norm,
        _jax_rms_norm,
    ),
    Row(
        "memory",
        "rms_norm and gradients 4x256x768",
        [_HIDDEN, _WIDTH, _HIDDEN],
        _rms_norm,
        with_gradients(_torch_rms_norm, 0, 1),
        _jax_rms_norm,
        wrt=(0, 1),
        keeps_result=True,
    ),
    Row(
        "memory",
        "group_norm 8x64x56², 32 groups",
        [_IMAGE, _CHANNELS, _CHANNELS],
        _group_norm,
        _torch_group_norm,
        _jax_group_norm,
    ),
    Row(
        "memory",
        "group_norm and gradients 8x64x56², 32 groups",
        [_IMAGE, _CHANNELS, _CHANNELS, _IMAGE],
        _group_norm,
        with_gradients(_torch_group_norm, 0, 1, 2),
        _jax_group_norm,
        wrt=(0, 1, 2),
        keeps_result=True,
    ),
]
