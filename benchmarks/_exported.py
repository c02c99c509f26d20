"""A JAX function for a program exported by PyTorch: an interpreter of its graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import jax
import torch
from jax import lax
from jax import numpy as jnp
from torch.export.graph_signature import InputKind

aten = torch.ops.aten


def in_jax(exported: torch.export.ExportedProgram) -> Callable:
    """Return ``f(parameters, inputs)``, which takes arrays in the order of the program and returns
    its result.

    Buffers are constants, and writes to them are dropped.
    """
    kinds = [spec.kind for spec in exported.graph_signature.input_specs]
    places = [node for node in exported.graph.nodes if node.op == "placeholder"]
    buffers = {
        node: jnp.asarray(exported.state_dict[spec.target].numpy())
        for node, spec in zip(places, exported.graph_signature.input_specs, strict=True)
        if spec.kind == InputKind.BUFFER
    }
    learned = [
        node for node, kind in zip(places, kinds, strict=True) if kind == InputKind.PARAMETER
    ]
    user_inputs = [
        node for node, kind in zip(places, kinds, strict=True) if kind == InputKind.USER_INPUT
    ]

    def run(parameters, inputs):
        values = dict(buffers)
        values.update(zip(learned, parameters, strict=True))
        values.update(zip(user_inputs, inputs, strict=True))
        for node in exported.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _FUNCTIONS[node.target](*args, **kwargs)
            elif node.op == "output":
                return values[node.args[0][0]]
        raise ValueError("the program returns nothing")

    return run


def _conv2d(x, weight, bias=None, strides=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    y = lax.conv_general_dilated(
        x,
        weight,
        strides,
        [(extent, extent) for extent in padding],
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, 1, 1)


def _normalized(x, axes, epsilon):
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + epsilon)


def _batch_norm(x, gamma, beta, _mean, _variance, training, _momentum, epsilon, _cudnn):
    if not training:
        raise NotImplementedError("batch_norm of inference")
    return _normalized(x, (0, 2, 3), epsilon) * gamma.reshape(-1, 1, 1) + beta.reshape(-1, 1, 1)


def _layer_norm(x, shape, gamma, beta, epsilon=1e-5, _cudnn=False):
    return _normalized(x, tuple(range(-len(shape), 0)), epsilon) * gamma + beta


def _max_pool2d(x, kernel, strides, padding=(0, 0)):
    around = [(0, 0), (0, 0), *((extent, extent) for extent in padding)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, *kernel), (1, 1, *strides), around)


def _linear(x, weight, bias=None):
    y = x @ weight.T
    return y if bias is None else y + bias


def _attention(q, k, v, mask=None, dropout=0.0, is_causal=False):
    if mask is not None or dropout:
        raise NotImplementedError("attention with a mask or dropout")
    scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def _cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def _flatten(x, start=0, end=-1):
    end %= x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


_FUNCTIONS: dict[object, Callable] = {
    operator.getitem: operator.getitem,
    aten.add.Tensor: jnp.add,
    aten.add_.Tensor: jnp.add,  # An update of a buffer without readers.
    aten.batch_norm.default: _batch_norm,
    aten.conv2d.default: _conv2d,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.embedding.default: lambda table, indices: table[indices],
    aten.flatten.using_ints: _flatten,
    aten.gelu.default: lambda x: jax.nn.gelu(x, approximate=False),
    aten.hardtanh.default: jnp.clip,
    aten.layer_norm.default: _layer_norm,
    aten.linear.default: _linear,
    aten.max_pool2d.default: _max_pool2d,
    aten.mean.dim: lambda x, axes: x.mean(tuple(axes)),
    aten.relu.default: jax.nn.relu,
    aten.reshape.default: jnp.reshape,
    aten.scaled_dot_product_attention.default: _attention,
    aten.split.Tensor: lambda x, size, axis: jnp.split(x, x.shape[axis] // size, axis),
    aten.transpose.int: jnp.swapaxes,
    aten.view.default: jnp.reshape,
}
