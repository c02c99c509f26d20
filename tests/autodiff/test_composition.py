"""Whole functions made of many operators, where every rule meets the output of another."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from relax_grad.testing import check_against_torch, check_gradients

RNG = np.random.default_rng(3)
IMAGES = RNG.normal(size=(3, 2, 11, 9))
PARAMETERS = [
    RNG.normal(size=(4, 2, 3, 3)),
    RNG.uniform(0.5, 1.5, size=4),
    RNG.normal(size=4),
    RNG.normal(size=(8, 5)),
]
LABELS = np.array([4, 0, 2])
STATISTICS = [np.zeros(4), np.ones(4)]


def classifier(images, kernel, gamma, beta, weight, mean, var, labels):
    """Convolution, normalisation, pooling, slicing, tiling and a softmax loss with hard labels."""
    x = op.nn.conv2d(images, kernel, strides=(2, 1), padding=(1, 0, 2, 1), dilation=(1, 2))
    x = op.nn.batch_norm(x, gamma, beta, mean, var, axis=1, training=True)[0]
    x = op.nn.max_pool2d(op.nn.relu(x), (2, 3), strides=(2, 2), padding=(0, 1, 1, 0))
    x = op.strided_slice(x, [2, 3], [-1, 0], [-4, 4], [-2, 3])
    x = op.tile(x, (1, 1, 1, 2))
    x = op.squeeze(op.sum(x, [2], keepdims=True), [2])
    scores = op.matmul(op.reshape(x, (3, 8)), weight)
    picked = op.gather_elements(op.nn.log_softmax(scores), op.expand_dims(labels, 1), axis=1)
    return op.negative(op.mean(op.squeeze(picked, [1])))


def torch_classifier(torch, images, kernel, gamma, beta, weight, mean, var, labels):
    F = torch.nn.functional
    x = F.conv2d(F.pad(images, (0, 1, 1, 2)), kernel, stride=(2, 1), dilation=(1, 2))
    x = F.batch_norm(x, None, None, gamma, beta, training=True)
    padded = F.pad(F.relu(x), (1, 0, 0, 1), value=-torch.inf)
    x = F.max_pool2d(padded, (2, 3), stride=(2, 2))
    x = x[:, :, [x.shape[2] - 1, x.shape[2] - 3]][:, :, :, :4:3]
    x = x.repeat(1, 1, 1, 2).sum(2, keepdim=True).squeeze(2)
    return F.cross_entropy(x.reshape(3, 8) @ weight, labels)


INPUTS = [IMAGES, *PARAMETERS, *STATISTICS, LABELS]


def test_classifier_against_torch(torch):
    check_against_torch(classifier, INPUTS, torch_classifier, wrt=range(5))


def test_classifier_to_second_order():
    check_gradients(classifier, INPUTS, wrt=range(5), order=2)


@pytest.mark.parametrize("dtype", ["float32"])
def test_classifier_in_float32(dtype):
    inputs = [value.astype(dtype) if value.dtype.kind == "f" else value for value in INPUTS]
    check_gradients(classifier, inputs, wrt=range(5), rtol=1e-3)


def test_symbolic_batch_to_second_order():
    def function(images, kernel, gamma, beta, mean, var, labels):
        x = op.nn.conv2d(images, kernel, strides=2, padding=1)
        x = op.nn.batch_norm(x, gamma, beta, mean, var, axis=1, training=True)[0]
        x = op.nn.max_pool2d(op.nn.relu(x), (2, 2), strides=(2, 2), ceil_mode=True)
        scores = op.mean(x, [2, 3])
        return op.nn.nll_loss(op.nn.log_softmax(scores), labels)

    inputs = [IMAGES, *PARAMETERS[:3], *STATISTICS, np.array([3, 0, 2])]
    check_gradients(function, inputs, wrt=range(4), symbolic={0: {0: "n"}, 6: {0: "n"}}, order=2)


def test_embedding_of_a_batch_of_tokens():
    """The table is read at an index of rank 2 with negative and repeated entries."""
    table, tokens = RNG.normal(size=(7, 3)), np.array([[1, -1, 1], [6, 0, -7]])

    def function(table, tokens):
        x = op.take(table, tokens, axis=0)
        return op.sum(op.where(op.greater(x, relax.const(0.0, "float64")), op.exp(x), x), [1])

    check_gradients(function, [table, tokens], order=2)
