"""What is measured: the form of a row, and the rows of single operators, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import tvm
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

aten = torch.ops.aten


@dataclass(frozen=True)
class Row:
    """A computation in Relax and in PyTorch.

    Attributes
    ----------
    group : str
        What it is counted to: ``conv``, ``matmul``, ``memory`` or ``step``.
    name : str
        What it is.
    shapes : Sequence[tuple[int, ...]]
        The shapes of the inputs.
    relax : Callable
        Takes a variable for each input, and returns an expression.
    torch : Callable
        Takes a tensor for each input.
    jax : Callable, optional
        Takes the module ``jax`` and an array for each input.
    integers : int
        Inputs at the end that are integers from 0 to ``below``.
    """

    group: str
    name: str
    shapes: Sequence[tuple[int, ...]]
    relax: Callable[..., relax.Expr]
    torch: Callable
    jax: Callable | None = None
    integers: int = 0
    below: int = 0

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        floats = len(self.shapes) - self.integers
        return [
            rng.normal(size=shape).astype("float32")
            if i < floats
            else rng.integers(0, self.below, shape)
            for i, shape in enumerate(self.shapes)
        ]

    def module(self) -> tvm.IRModule:
        """Return the module whose function ``main`` is the row."""
        params = [
            relax.Var(f"x{i}", relax.TensorType(array.shape, str(array.dtype)))
            for i, array in enumerate(self.arrays())
        ]
        bb = relax.BlockBuilder()
        with bb.function("main", params):
            with bb.dataflow():
                result = bb.emit_output(bb.normalize(self.relax(bb, *params)))
            bb.emit_func_output(result)
        return bb.get()


@dataclass(frozen=True)
class Conv:
    """A convolution of squares: NCHW and OIHW."""

    batch: int
    channels: int
    size: int
    filters: int
    kernel: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        what = f"{self.batch}x{self.channels}x{self.size}² -> {self.filters}, {self.kernel}x{self.kernel}"
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return what + stride + (", depthwise" if self.groups > 1 else "")

    def rows(self) -> list[Row]:
        """Return the forward pass and the two gradients."""
        padding = self.kernel // 2
        out = (self.size + 2 * padding - self.kernel) // self.stride + 1
        x = (self.batch, self.channels, self.size, self.size)
        w = (self.filters, self.channels // self.groups, self.kernel, self.kernel)
        y = (self.batch, self.filters, out, out)
        how = {"strides": self.stride, "padding": padding, "groups": self.groups}
        wide = {"strides": [self.stride] * 2, "padding": [padding] * 4, "groups": self.groups}

        def backward(mask, *tensors):
            strides, pads = [self.stride] * 2, [padding] * 2
            return aten.convolution_backward(
                *tensors, None, strides, pads, [1, 1], False, [0, 0], self.groups, mask
            )

        def jax_forward(jax, data, weight):
            return jax.lax.conv_general_dilated(
                data,
                weight,
                [self.stride] * 2,
                [(padding,) * 2] * 2,
                feature_group_count=self.groups,
            )

        def jax_gradient(wanted):
            def run(jax, output_grad, known):
                zeros = jax.numpy.zeros(wanted)
                order = (lambda v: (v, known)) if wanted == x else (lambda v: (known, v))
                return jax.vjp(lambda v: jax_forward(jax, *order(v)), zeros)[1](output_grad)[0]

            return run

        empty_x, empty_w = torch.zeros(x), torch.zeros(w)
        return [
            Row(
                "conv",
                f"forward {self}",
                [x, w],
                lambda _, data, weight: relax.op.nn.conv2d(data, weight, **how),
                lambda data, weight: F.conv2d(
                    data, weight, None, self.stride, padding, 1, self.groups
                ),
                jax_forward,
            ),
            Row(
                "conv",
                f"data gradient {self}",
                [y, w],
                lambda _, output_grad, weight: grad.conv2d_backward_data(
                    output_grad, x, weight, **wide
                ),
                lambda output_grad, weight: backward(
                    [True, False, False], output_grad, empty_x, weight
                )[0],
                jax_gradient(x),
            ),
            Row(
                "conv",
                f"weight gradient {self}",
                [y, x],
                lambda _, output_grad, data: grad.conv2d_backward_weight(
                    output_grad, data, w, **wide
                ),
                lambda output_grad, data: backward(
                    [False, True, False], output_grad, data, empty_w
                )[1],
                jax_gradient(w),
            ),
        ]


#: The shapes that kernels were developed on, all distinct ones of ResNet-50, and MobileNetV2's depthwise ones.
CONVS = list(
    dict.fromkeys(
        [
            Conv(8, 3, 224, 64, 7, 2),
            Conv(8, 64, 56, 64, 3),
            Conv(8, 128, 28, 128, 3),
            Conv(8, 256, 14, 256, 3),
            Conv(8, 512, 7, 512, 3),
            Conv(8, 64, 56, 64, 1),
            Conv(8, 64, 56, 256, 1),
            Conv(8, 256, 56, 64, 1),
            Conv(8, 256, 56, 128, 1),
            Conv(8, 128, 56, 128, 3, 2),
            Conv(8, 128, 28, 512, 1),
            Conv(8, 256, 56, 512, 1, 2),
            Conv(8, 512, 28, 128, 1),
            Conv(8, 512, 28, 256, 1),
            Conv(8, 256, 28, 256, 3, 2),
            Conv(8, 256, 14, 1024, 1),
            Conv(8, 512, 28, 1024, 1, 2),
            Conv(8, 1024, 14, 256, 1),
            Conv(8, 1024, 14, 512, 1),
            Conv(8, 512, 14, 512, 3, 2),
            Conv(8, 512, 7, 2048, 1),
            Conv(8, 1024, 14, 2048, 1, 2),
            Conv(8, 2048, 7, 512, 1),
            *(
                Conv(8, channels, size, channels, 3, stride, channels)
                for channels, size, stride in [
                    (32, 112, 1),
                    (96, 112, 2),
                    (144, 56, 1),
                    (144, 56, 2),
                    (192, 28, 1),
                    (192, 28, 2),
                    (384, 14, 1),
                    (576, 14, 1),
                    (576, 14, 2),
                    (960, 7, 1),
                ]
            ),
        ]
    )
)

#: Rows, columns and depth of products: square ones, and GPT-2's at batch 4 x 256.
PRODUCTS = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 2304, 768),
    (1024, 768, 768),
    (1024, 3072, 768),
    (1024, 768, 3072),
]


def _product(rows: int, columns: int, depth: int, turn_a: bool, turn_b: bool) -> Row:
    def in_relax(bb, a, b):
        a = bb.emit(relax.op.permute_dims(a)) if turn_a else a
        b = bb.emit(relax.op.permute_dims(b)) if turn_b else b
        return relax.op.matmul(a, b)

    def elsewhere(a, b):
        return (a.T if turn_a else a) @ (b.T if turn_b else b)

    return Row(
        "matmul",
        f"{'T' if turn_a else 'N'}{'T' if turn_b else 'N'} {rows} x {columns} x {depth}",
        [
            (depth, rows) if turn_a else (rows, depth),
            (columns, depth) if turn_b else (depth, columns),
        ],
        in_relax,
        elsewhere,
        lambda _jax, a, b: elsewhere(a, b),
    )


def _attention(name: str, shapes: list, turn_b: bool) -> Row:
    def in_relax(bb, a, b):
        return relax.op.matmul(a, bb.emit(relax.op.permute_dims(b, [0, 2, 1])) if turn_b else b)

    return Row(
        "matmul",
        f"{name} " + " @ ".join("x".join(map(str, shape)) for shape in shapes),
        shapes,
        in_relax,
        lambda a, b: a @ (b.transpose(1, 2) if turn_b else b),
        lambda jax, a, b: a @ (jax.numpy.swapaxes(b, 1, 2) if turn_b else b),
    )


MATMULS = [
    _product(*sizes, turn_a, turn_b)
    for sizes in PRODUCTS
    for turn_a, turn_b in [(False, False), (False, True), (True, False)]
] + [
    _attention("attention scores", [(48, 256, 64), (48, 256, 64)], True),
    _attention("attention values", [(48, 256, 256), (48, 256, 64)], False),
]

HIDDEN, IMAGE, TOKENS = (4, 256, 768), (8, 64, 56, 56), (4, 256)


def _norm_of(bb, x, gamma, beta):
    return relax.op.nn.layer_norm(x, gamma, beta, axes=[-1])


MEMORY = [
    Row(
        "memory",
        "layer_norm 4x256x768",
        [HIDDEN, (768,), (768,)],
        _norm_of,
        lambda x, gamma, beta: F.layer_norm(x, (768,), gamma, beta),
    ),
    Row(
        "memory",
        "layer_norm, data gradient 4x256x768",
        [HIDDEN, HIDDEN, (768,), (4, 256, 1), (4, 256, 1)],
        lambda _, dy, x, gamma, mean, rstd: grad.layer_norm_backward_data(
            dy, x, gamma, mean, rstd, axes=[-1]
        ),
        lambda dy, x, gamma, mean, rstd: aten.native_layer_norm_backward(
            dy, x, [768], mean, rstd, gamma, gamma, [True, False, False]
        )[0],
    ),
    Row(
        "memory",
        "softmax 48x256x256",
        [(48, 256, 256)],
        lambda _, x: relax.op.nn.softmax(x),
        lambda x: torch.softmax(x, -1),
        lambda jax, x: jax.nn.softmax(x),
    ),
    Row(
        "memory",
        "softmax, gradient 48x256x256",
        [(48, 256, 256), (48, 256, 256)],
        lambda _, dy, y: grad.softmax_backward(dy, y),
        lambda dy, y: aten._softmax_backward_data(dy, y, -1, torch.float32),
    ),
    Row(
        "memory",
        "log_softmax 1024x50257",
        [(1024, 50257)],
        lambda _, x: relax.op.nn.log_softmax(x),
        lambda x: torch.log_softmax(x, -1),
        lambda jax, x: jax.nn.log_softmax(x),
    ),
    Row(
        "memory",
        "gelu 4x256x3072",
        [(4, 256, 3072)],
        lambda _, x: relax.op.nn.gelu(x),
        F.gelu,
        lambda jax, x: jax.nn.gelu(x, approximate=False),
    ),
    Row(
        "memory",
        "silu 4x256x3072",
        [(4, 256, 3072)],
        lambda _, x: relax.op.nn.silu(x),
        F.silu,
        lambda jax, x: jax.nn.silu(x),
    ),
    Row(
        "memory",
        "add and relu 8x64x56²",
        [IMAGE, IMAGE],
        lambda bb, x, y: relax.op.nn.relu(bb.emit(relax.op.add(x, y))),
        lambda x, y: torch.relu(x + y),
        lambda jax, x, y: jax.nn.relu(x + y),
    ),
    Row(
        "memory",
        "bias gradient 8x64x56²",
        [IMAGE],
        lambda _, x: relax.op.sum(x, [0, 2, 3]),
        lambda x: x.sum((0, 2, 3)),
        lambda _jax, x: x.sum((0, 2, 3)),
    ),
    Row(
        "memory",
        "bias gradient 1024x3072",
        [(1024, 3072)],
        lambda _, x: relax.op.sum(x, [0]),
        lambda x: x.sum(0),
        lambda _jax, x: x.sum(0),
    ),
    Row(
        "memory",
        "mean of all 8x64x56²",
        [IMAGE],
        lambda _, x: relax.op.mean(x),
        lambda x: x.mean(),
        lambda _jax, x: x.mean(),
    ),
    Row(
        "memory",
        "NCHW to NHWC 8x64x56²",
        [IMAGE],
        lambda _, x: relax.op.permute_dims(x, [0, 2, 3, 1]),
        lambda x: x.permute(0, 2, 3, 1).contiguous(),
        lambda jax, x: jax.numpy.transpose(x, (0, 2, 3, 1)),
    ),
    Row(
        "memory",
        "max_pool2d 8x64x112², 3x3, stride 2",
        [(8, 64, 112, 112)],
        lambda _, x: relax.op.nn.max_pool2d(x, [3, 3], [2, 2], [1, 1]),
        lambda x: F.max_pool2d(x, 3, 2, 1),
    ),
    Row(
        "memory",
        "embedding 30000x768, 4x256",
        [(30000, 768), TOKENS],
        lambda _, table, tokens: relax.op.take(table, tokens, axis=0, mode="fast"),
        lambda table, tokens: F.embedding(tokens, table),
        integers=1,
        below=30000,
    ),
    Row(
        "memory",
        "SGD update 4096x1024",
        [(4096, 1024), (4096, 1024)],
        lambda bb, p, g: relax.op.subtract(
            p, bb.emit(relax.op.multiply(g, relax.const(0.1, "float32")))
        ),
        lambda p, g: torch.sub(p, g, alpha=0.1),
        lambda _jax, p, g: p - 0.1 * g,
    ),
]

ROWS = [row for conv in CONVS for row in conv.rows()] + MATMULS + MEMORY
