"""Small training steps: the loss of a network and its gradients in one function."""

from __future__ import annotations

import numpy as np
import tvm
from programs import build, tensor
from tvm import relax
from tvm.relax import op

import relax_grad

_RNG = np.random.default_rng(0)


def convolutional() -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return the step of a small residual network, and values for its parameters."""
    shapes = [
        (4, 3, 16, 16),
        (4,),
        (32, 3, 3, 3),
        (32,),
        (32,),
        (32,),
        (32,),
        (32, 32, 3, 3),
        (40, 32, 1, 1),
        (640, 10),
        (10,),
    ]

    def body(bb, x, labels, w0, gamma, beta, mean, variance, w1, w2, w3, bias):
        y = bb.emit(op.nn.conv2d(x, w0, padding=1))
        y = bb.emit(op.nn.batch_norm(y, gamma, beta, mean, variance, axis=1))
        y = bb.emit(op.nn.relu(bb.emit(relax.TupleGetItem(y, 0))))
        y = bb.emit(op.nn.max_pool2d(y, (2, 2), (2, 2)))
        y = bb.emit(op.add(y, bb.emit(op.nn.relu(bb.emit(op.nn.conv2d(y, w1, padding=1))))))
        y = bb.emit(op.nn.conv2d(y, w2, strides=2))
        y = bb.emit(op.reshape(y, (4, 640)))
        y = bb.emit(op.add(bb.emit(op.matmul(y, w3)), bias))
        return _loss(bb, y, labels)

    return _step(shapes, body, ["w0", "gamma", "beta", "w1", "w2", "w3", "bias"])


def transformer() -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return the step of one block of a transformer, and values for its parameters."""
    width, heads = 48, 4
    shapes = [(2, 20), (40,), (50, width), (width,), (width,), (width, 3 * width)]
    shapes += [(width, width), (width, 4 * width), (4 * width, width)]

    def body(bb, tokens, labels, table, gamma, beta, w0, w1, w2, w3):
        x = bb.emit(op.take(table, tokens, axis=0))
        y = bb.emit(op.nn.layer_norm(x, gamma, beta, axes=-1))
        parts = bb.emit(op.split(bb.emit(op.matmul(y, w0)), 3, axis=-1))

        def head(i):
            part = bb.emit(relax.TupleGetItem(parts, i))
            part = bb.emit(op.reshape(part, (2, 20, heads, width // heads)))
            return bb.emit(op.permute_dims(part, [0, 2, 1, 3]))

        q, k, v = map(head, range(3))
        scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        y = bb.emit(op.matmul(bb.emit(op.nn.softmax(scores)), v))
        y = bb.emit(op.reshape(bb.emit(op.permute_dims(y, [0, 2, 1, 3])), (2, 20, width)))
        x = bb.emit(op.add(x, bb.emit(op.matmul(y, w1))))
        y = bb.emit(op.nn.gelu(bb.emit(op.matmul(x, w2))))
        x = bb.emit(op.add(x, bb.emit(op.matmul(y, w3))))
        x = bb.emit(op.matmul(x, bb.emit(op.permute_dims(table))))
        return _loss(bb, bb.emit(op.reshape(x, (40, 50))), labels)

    return _step(shapes, body, ["table", "gamma", "beta", "w0", "w1", "w2", "w3"])


def _loss(bb, scores, labels):
    return op.nn.nll_loss(bb.emit(op.nn.log_softmax(scores)), labels)


def _step(shapes, body, wrt) -> tuple[tvm.IRModule, list[np.ndarray]]:
    names = body.__code__.co_varnames[1 : 1 + len(shapes)]
    integers = {"labels": 10, "tokens": 50}
    params = [
        tensor(name, shape, "int64" if name in integers else "float32")
        for name, shape in zip(names, shapes, strict=True)
    ]
    values = [
        _RNG.integers(0, integers[name], shape)
        if name in integers
        else (0.2 * _RNG.normal(size=shape) + (name == "variance")).astype("float32")
        for name, shape in zip(names, shapes, strict=True)
    ]
    return relax_grad.value_and_grad(build(params, body), wrt=wrt), values
