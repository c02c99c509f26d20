"""The networks of the training example, built of Relax operators.

A network is one function that emits its layers. Each layer declares its parameters and its running
statistics at their use, so that a network reads from top to bottom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

CHANNELS, SIZE, CLASSES = 3, 32, 10

#: Layout of the data and of the weights of a convolution, by the value of ``--layout``.
LAYOUTS = {"nchw": ("NCHW", "OIHW"), "nhwc": ("NHWC", "HWIO")}


@dataclass(frozen=True)
class Slot:
    """A tensor with a state from one step to the next: a parameter or a running statistic.

    Attributes
    ----------
    var : relax.Var
        The tensor in the program.
    plain_shape : tuple[int, ...]
        Its shape in the plain order of axes: OIHW for the weight of a convolution.
    axes : tuple[int, ...]
        The permutation from the plain order to the order of ``var``.
    low, high : float
        The bounds of the uniform distribution of its initial value.
    """

    var: relax.Var
    plain_shape: tuple[int, ...]
    axes: tuple[int, ...]
    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw an initial value; the numbers are the same for every layout."""
        value = rng.uniform(self.low, self.high, self.plain_shape).transpose(self.axes)
        return np.ascontiguousarray(value, str(self.var.ty.dtype))


class Layers:
    """A builder that emits layers into a function, and collects their parameters and statistics.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder to emit into; a dataflow block must be open.
    layout : str
        ``"nchw"`` or ``"nhwc"``: the layout of images in the convolutions.
    dtype : str
        The dtype of everything except the labels.
    training : bool
        Whether batch_norm normalises by the statistics of the batch and updates the running
        ones, or normalises by the running ones.
    """

    def __init__(self, bb: relax.BlockBuilder, layout: str, dtype: str, training: bool):
        self.bb, self.layout, self.dtype, self.training = bb, layout, dtype, training
        self.data_layout, self.kernel_layout = LAYOUTS[layout]
        self.parameters: list[Slot] = []
        self.statistics: list[Slot] = []
        self.new_statistics: list[relax.Var] = []

    def enter(self, images: relax.Expr) -> relax.Expr:
        """Convert images from NCHW, the layout of the input, to the layout of the network."""
        if self.layout == "nchw":
            return images
        return self.bb.emit(op.permute_dims(images, [0, 2, 3, 1]))

    def conv(self, x: relax.Expr, channels: int, kernel: int, stride: int = 1, padding: int = 0):
        """Convolution with a bias."""
        in_channels = _size(x, self.data_layout.index("C"))
        fan_in = in_channels * kernel * kernel
        weight = self._weight((channels, in_channels, kernel, kernel), fan_in, self.kernel_layout)
        bias = self._bias(channels, fan_in)
        x = self.bb.emit(
            op.nn.conv2d(
                x,
                weight,
                strides=stride,
                padding=padding,
                data_layout=self.data_layout,
                kernel_layout=self.kernel_layout,
            )
        )
        if self.layout == "nchw":
            bias = self.bb.emit(op.reshape(bias, (channels, 1, 1)))
        return self.bb.emit(op.add(x, bias))

    def conv_bn_relu(self, x: relax.Expr, channels: int, kernel: int = 3, stride: int = 1):
        """Convolution that keeps the size (except for its stride), batch_norm, relu."""
        x = self.conv(x, channels, kernel, stride, padding=(kernel - 1) // 2)
        gamma = self._slot(self.parameters, "gamma", (channels,), 1, 1)
        beta = self._slot(self.parameters, "beta", (channels,), 0, 0)
        mean = self._slot(self.statistics, "mean", (channels,), 0, 0)
        var = self._slot(self.statistics, "var", (channels,), 1, 1)
        axis = self.data_layout.index("C")
        result = self.bb.emit(
            op.nn.batch_norm(x, gamma, beta, mean, var, axis, training=self.training)
        )
        self.new_statistics += [self.bb.emit(relax.TupleGetItem(result, i)) for i in (1, 2)]
        return self.relu(self.bb.emit(relax.TupleGetItem(result, 0)))

    def residual(self, x: relax.Expr) -> relax.Expr:
        """``x + f(x)``, where ``f`` is two convolutions with as many channels as ``x``."""
        channels = _size(x, self.data_layout.index("C"))
        inner = self.conv_bn_relu(self.conv_bn_relu(x, channels), channels)
        return self.bb.emit(op.add(x, inner))

    def linear(self, x: relax.Expr, features: int) -> relax.Expr:
        """``x @ weight.T + bias``."""
        in_features = _size(x, 1)
        weight = self._weight((features, in_features), in_features)
        bias = self._bias(features, in_features)
        product = self.bb.emit(op.matmul(x, self.bb.emit(op.permute_dims(weight))))
        return self.bb.emit(op.add(product, bias))

    def relu(self, x: relax.Expr) -> relax.Expr:
        return self.bb.emit(op.nn.relu(x))

    def max_pool(self, x: relax.Expr) -> relax.Expr:
        """The maximum of each 2x2 square."""
        return self.bb.emit(op.nn.max_pool2d(x, (2, 2), strides=(2, 2), layout=self.data_layout))

    def flatten(self, x: relax.Expr) -> relax.Expr:
        """One row for each image, in the order of NCHW for every layout."""
        if self.layout == "nhwc":
            x = self.bb.emit(op.permute_dims(x, [0, 3, 1, 2]))
        batch_size, *rest = x.ty.shape
        return self.bb.emit(op.reshape(x, (batch_size, math.prod(map(int, rest)))))

    def _weight(self, shape: tuple[int, ...], fan_in: int, layout: str | None = None):
        """Kaiming's uniform initialisation for relu; a kernel's area counts in ``fan_in``."""
        bound = (6 / fan_in) ** 0.5
        return self._slot(self.parameters, "weight", shape, -bound, bound, layout)

    def _bias(self, channels: int, fan_in: int) -> relax.Var:
        bound = fan_in**-0.5
        return self._slot(self.parameters, "bias", (channels,), -bound, bound)

    def _slot(self, slots: list, name: str, shape, low: float, high: float, layout=None):
        axes = tuple("OIHW".index(axis) for axis in layout) if layout else tuple(range(len(shape)))
        var_type = relax.TensorType([shape[axis] for axis in axes], self.dtype)
        var = relax.Var(f"{name}{len(slots)}", var_type)
        slots.append(Slot(var, shape, axes, low, high))
        return var


def resnet9(layers: Layers, images: relax.Expr) -> relax.Expr:
    """ResNet-9: eight convolutions in a strided trunk with two residual blocks; returns logits."""
    x = layers.conv_bn_relu(images, 16, kernel=7, stride=4)
    x = layers.conv_bn_relu(x, 32, stride=2)
    x = layers.residual(x)
    x = layers.conv_bn_relu(x, 64, stride=2)
    x = layers.conv_bn_relu(x, 128, stride=2)
    x = layers.residual(x)
    x = layers.relu(layers.linear(layers.flatten(x), 128))
    return layers.linear(x, CLASSES)


def lenet(layers: Layers, images: relax.Expr) -> relax.Expr:
    """LeNet-5 with relu and maximum pooling; returns logarithms of probabilities."""
    x = layers.max_pool(layers.relu(layers.conv(images, 6, kernel=5)))
    x = layers.max_pool(layers.relu(layers.conv(x, 16, kernel=5)))
    x = layers.flatten(x)
    for features in (120, 84):
        x = layers.relu(layers.linear(x, features))
    x = layers.linear(x, CLASSES)
    return layers.bb.emit(op.nn.log_softmax(x))


def softmax_cross_entropy(bb: relax.BlockBuilder, logits: relax.Expr, labels: relax.Expr):
    """Mean over the batch of the cross entropy between softmax(logits) and the labels."""
    log_probabilities = bb.emit(op.nn.log_softmax(logits))
    picked = bb.emit(op.gather_elements(log_probabilities, op.expand_dims(labels, 1), axis=1))
    return bb.emit(op.negative(op.mean(picked)))


def nll_loss(bb: relax.BlockBuilder, log_probabilities: relax.Expr, labels: relax.Expr):
    """Mean over the batch of minus the logarithm of the probability of the label."""
    return bb.emit(op.nn.nll_loss(log_probabilities, labels))


@dataclass(frozen=True)
class Network:
    """A network and the loss of its scores."""

    scores: Callable[[Layers, relax.Expr], relax.Expr]
    loss: Callable[[relax.BlockBuilder, relax.Expr, relax.Expr], relax.Expr]


NETWORKS = {
    "resnet9": Network(resnet9, softmax_cross_entropy),
    "lenet": Network(lenet, nll_loss),
}


def draw_all(slots: Sequence[Slot], seed: int) -> list[np.ndarray]:
    """Draw the initial values of all slots from one seed."""
    rng = np.random.default_rng(seed)
    return [slot.draw(rng) for slot in slots]


def _size(x: relax.Expr, axis: int) -> int:
    return int(x.ty.shape[axis])
