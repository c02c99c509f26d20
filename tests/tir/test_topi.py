"""TVM's own tensor expressions, differentiated as tensor functions, to first and second order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from sweep import TARGET
from tvm import relax, te, tirx, topi

from relax_grad.testing import check_gradients

A, B, ROW = (3, 4), (4, 2), (4,)
IMAGES, KERNEL = (1, 2, 5, 6), (3, 2, 3, 3)


@dataclass
class Case:
    """A function of tensors.

    Attributes
    ----------
    build : Callable
        Makes the result of placeholders, by functions of TOPI.
    shapes : tuple
        The shapes of the floating-point arguments.
    integers : tuple
        Integer arguments, which come after them.
    low, high : float
        The range of the numbers.
    order : int
        The order to check.
    dtype : str
        The dtype of the floating-point arguments: some functions of TOPI accept float32 only.
    rtol : float, optional
        The relative tolerance where a function computes in float32, which makes differences
        inaccurate.
    """

    build: Callable
    shapes: tuple
    integers: tuple = ()
    low: float = -1.0
    high: float = 1.0
    order: int = 2
    dtype: str = "float64"
    rtol: float | None = None
    more: dict = field(default_factory=dict)

    def inputs(self):
        rng = np.random.default_rng(0)
        floats = [
            rng.uniform(self.low, self.high, shape).astype(self.dtype) for shape in self.shapes
        ]
        return [*floats, *(np.asarray(value) for value in self.integers)]

    def emit(self, *args):
        return relax.BlockBuilder.current().emit_te(self.build, *args, **self.more)


def _unary(name, low=-1.0, high=1.0, order=2):
    return Case(lambda x: getattr(topi, name)(x), (A,), low=low, high=high, order=order)


def _scan(x):
    """A prefix product by te.compute over earlier elements."""
    k = te.reduce_axis((0, 4), "k")
    return te.compute(
        A, lambda i, j: te.sum(tirx.if_then_else(k <= j, x[i, k], tirx.const(0.0, x.dtype)), k)
    )


def _log_sum_exp(x):
    peak = topi.max(x, axis=1, keepdims=True)
    return topi.add(
        peak, topi.log(topi.sum(topi.exp(topi.subtract(x, peak)), axis=1, keepdims=True))
    )


def _welford(x):
    mean = topi.divide(topi.sum(x, axis=1, keepdims=True), tirx.const(4.0, x.dtype))
    centered = topi.subtract(x, mean)
    return topi.sum(topi.multiply(centered, centered), axis=1)


def _one_hot(x, index):
    unit, zero = (tirx.const(number, x.dtype) for number in (1.0, 0.0))
    return topi.multiply(topi.one_hot(index, unit, zero, 4, -1, x.dtype), x)


POSITIVE = {"low": 0.2, "high": 2.0}

CASES = {
    **{name: _unary(name) for name in ("exp", "tanh", "sigmoid", "sin", "cos", "erf", "atan")},
    **{name: _unary(name, -0.8, 0.8) for name in ("asin", "acos", "atanh", "tan", "sinh", "cosh")},
    **{name: _unary(name, 0.2, 2.0) for name in ("log", "log2", "log10", "sqrt", "rsqrt", "abs")},
    **{name: _unary(name, 1.2, 2.0) for name in ("acosh", "asinh")},
    "floor": _unary("floor", order=1),
    "negative": Case(topi.negative, (A,)),
    "identity": Case(topi.identity, (A,)),
    "cast": Case(lambda x: topi.cast(topi.cast(x, "float32"), "float64"), (A,), order=1, rtol=5e-3),
    "clip": Case(lambda x: topi.clip(x, -0.5, 0.5), (A,)),
    "relu": Case(topi.nn.relu, (A,)),
    "leaky_relu": Case(lambda x: topi.nn.leaky_relu(x, 0.1), (A,)),
    "prelu": Case(lambda x, w: topi.nn.prelu(x, w, 1), (A, ROW)),
    "softplus": Case(topi.nn.softplus, (A,)),
    "gelu": Case(lambda x: topi.multiply(x, topi.sigmoid(x)), (A,)),
    "add": Case(topi.add, (A, ROW)),
    "subtract": Case(topi.subtract, (A, (3, 1))),
    "multiply": Case(topi.multiply, (A, ROW)),
    "divide": Case(topi.divide, (A, ROW), **POSITIVE),
    "power": Case(topi.power, (A, ROW), **POSITIVE),
    "maximum": Case(topi.maximum, (A, ROW)),
    "minimum": Case(topi.minimum, (A, ROW)),
    "mod": Case(lambda x, y: topi.mod(x, y), (A, ROW), **POSITIVE),
    "where": Case(lambda x, y, c: topi.where(c, x, y), (A, A), ([[1, 0, 1, 0]] * 3,)),
    "transpose": Case(topi.transpose, (A,)),
    "reshape": Case(lambda x: topi.reshape(x, (2, 6)), (A,)),
    "squeeze": Case(lambda x: topi.squeeze(x, 1), ((3, 1, 2),)),
    "expand_dims": Case(lambda x: topi.expand_dims(x, 1), (A,)),
    "flip": Case(lambda x: topi.flip(x, 1), (A,)),
    "strided_slice": Case(lambda x: topi.strided_slice(x, [0, 3], [3, 0], [2, -1]), (A,)),
    "concatenate": Case(lambda x, y: topi.concatenate([x, y], 0), (A, (2, 4))),
    "stack": Case(lambda x, y: topi.stack([x, y], 1), (A, A)),
    "split": Case(lambda x: topi.split(x, 2, 1)[1], (A,)),
    "tile": Case(lambda x: topi.tile(x, (2, 2)), (A,)),
    "repeat": Case(lambda x: topi.repeat(x, 2, 1), (A,)),
    "broadcast_to": Case(lambda x: topi.broadcast_to(x, (2, 3, 4)), (A,)),
    "pad": Case(lambda x: topi.nn.pad(x, [1, 0], [0, 2], 0.5), (A,)),
    "mirror_pad": Case(lambda x: topi.nn.mirror_pad(x, [1, 1], [0, 2], "SYMMETRIC"), (A,)),
    "space_to_depth": Case(lambda x: topi.nn.space_to_depth(x, 2), ((1, 2, 4, 4),)),
    "depth_to_space": Case(lambda x: topi.nn.depth_to_space(x, 2), ((1, 4, 2, 2),)),
    "triu": Case(lambda x: topi.trilu(x, tirx.const(0, "int32"), True), (A,)),
    "take": Case(lambda x, i: topi.take(x, i, 0), (A,), ([2, 0, 2],)),
    "take of all": Case(lambda x, i: topi.take(x, i), (A,), ([2, 0, 11],)),
    "gather": Case(lambda x, i: topi.gather(x, 1, i), (A,), ([[1, 1], [0, 3], [2, 2]],)),
    "gather_nd": Case(lambda x, i: topi.gather_nd(x, i), (A,), ([[0, 2, 0], [1, 3, 1]],)),
    "sequence_mask": Case(lambda x, n: topi.sequence_mask(x, n, 0.0, 1), (A,), ([1, 3, 2],)),
    "one_hot": Case(_one_hot, (A,), ([1, 0, 3],)),
    "sum": Case(lambda x: topi.sum(x, 1), (A,)),
    "sum of all": Case(topi.sum, (A,)),
    "max": Case(lambda x: topi.max(x, 1), (A,)),
    "min": Case(lambda x: topi.min(x, 0, True), (A,)),
    "prod": Case(lambda x: topi.prod(x, 1), (A,), **POSITIVE),
    "log_sum_exp": Case(_log_sum_exp, (A,)),
    "variance": Case(_welford, (A,)),
    "prefix sum": Case(_scan, (A,)),
    "cumsum": Case(lambda x: topi.cumsum(x, 1), (A,)),
    "cumprod": Case(lambda x: topi.cumprod(x, 1), (A,), **POSITIVE),
    "matmul": Case(topi.matmul, (A, B)),
    "batch_matmul": Case(topi.nn.batch_matmul, ((2, 3, 4), (2, 5, 4))),
    "dense": Case(topi.nn.dense, (A, (5, 4))),
    "einsum": Case(lambda x, y: topi.einsum("ij,jk->ki", x, y), (A, B)),
    "softmax": Case(topi.nn.softmax, (A,)),
    "log_softmax": Case(topi.nn.log_softmax, (A,)),
    "conv2d": Case(lambda x, w: topi.nn.conv2d_nchw(x, w, 1, 1, 1), (IMAGES, KERNEL)),
    "conv2d, strides": Case(lambda x, w: topi.nn.conv2d_nchw(x, w, 2, 0, 1), (IMAGES, KERNEL)),
    "conv2d, dilation": Case(lambda x, w: topi.nn.conv2d_nchw(x, w, 1, 2, 2), (IMAGES, KERNEL)),
    "conv1d": Case(lambda x, w: topi.nn.conv1d_ncw(x, w, 1, 1, 1), ((2, 3, 7), (2, 3, 3))),
    "depthwise": Case(
        lambda x, w: topi.nn.depthwise_conv2d_nchw(x, w, 1, 1, 1), (IMAGES, (2, 1, 3, 3))
    ),
    "conv2d_transpose": Case(
        lambda x, w: topi.nn.conv2d_transpose_nchw(x, w, (2, 2), (1, 1, 1, 1), x.dtype, (0, 0)),
        ((1, 2, 3, 4), (2, 3, 3, 3)),
    ),
    "max_pool2d": Case(
        lambda x: topi.nn.pool2d(x, (3, 2), (2, 2), (1, 1), (1, 0, 1, 0), "max"), (IMAGES,)
    ),
    "avg_pool2d": Case(
        lambda x: topi.nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "avg"), (IMAGES,)
    ),
    "global_pool": Case(lambda x: topi.nn.global_pool(x, "avg"), (IMAGES,)),
    "adaptive_pool": Case(lambda x: topi.nn.adaptive_pool(x, (2, 3), "avg"), (IMAGES,)),
    "lrn": Case(lambda x: topi.nn.lrn(x, 3), (IMAGES,)),
    "layer_norm": Case(
        lambda x, g, b: topi.nn.layer_norm(x, g, b, [1]), (A, ROW, ROW), order=1, dtype="float32"
    ),
    "rms_norm": Case(lambda x, w: topi.nn.rms_norm(x, w, [1]), (A, ROW), order=1, rtol=5e-3),
    "instance_norm": Case(
        lambda x, g, b: topi.nn.instance_norm(x, g, b, 1, [2, 3]),
        (IMAGES, (2,), (2,)),
        order=1,
        dtype="float32",
    ),
    "group_norm": Case(
        lambda x, g, b: topi.nn.group_norm(x, g, b, 1, 1, [2, 3]),
        (IMAGES, (2,), (2,)),
        order=1,
        dtype="float32",
    ),
    "scatter_elements": Case(
        lambda x, u, i: topi.scatter_elements(x, i, u, 1, "add"),
        (A, (3, 2)),
        ([[1, 1], [0, 3], [2, 2]],),
    ),
    "nll_loss": Case(
        lambda x, w, t: topi.nn.nll_loss(x, t, w, "mean", -1),
        (A, ROW),
        ([1, 0, 3],),
        low=0.2,
        high=2.0,
    ),
}

VOLUME = (1, 1, 3, 3, 4)

#: More families; those with a value of True are in the default suite.
MORE = {
    "fast_exp": (Case(topi.fast_exp, (A,), order=1, dtype="float32"), True),
    "fast_softmax": (Case(topi.nn.fast_softmax, (A,), order=1, dtype="float32"), False),
    "fast_erf": (Case(topi.fast_erf, (A,), order=1, dtype="float32"), False),
    "sign": (Case(lambda x: topi.multiply(topi.sign(x), x), (A,)), False),
    "round": (Case(lambda x: topi.multiply(topi.round(x), x), (A,)), False),
    "atan2": (Case(topi.atan2, (A, A), **POSITIVE), False),
    "floor_mod": (Case(topi.floor_mod, (A, A), **POSITIVE), True),
    "log_add_exp": (Case(topi.log_add_exp, (A, A)), False),
    "elemwise_sum": (Case(lambda x, y: topi.elemwise_sum([x, y, x]), (A, A)), False),
    "collapse_sum": (Case(lambda x: topi.collapse_sum(x, (1, 4)), (A,)), False),
    "tensordot": (Case(lambda x, y: topi.tensordot(x, y, ((0,), (1,))), (A, (4, 3))), True),
    "reverse_sequence": (
        Case(lambda x, n: topi.reverse_sequence(x, n, 1, 0), (A,), (np.array([2, 3, 1], "int32"),)),
        True,
    ),
    "matrix_set_diag": (Case(topi.matrix_set_diag, (A, (3,))), False),
    "sparse_to_dense": (
        Case(
            lambda x, i: topi.sparse_to_dense(i, [5], x, tirx.const(0.0, x.dtype)),
            ((3,),),
            ([0, 2, 4],),
        ),
        False,
    ),
    **{
        f"scatter_nd, {mode}": (
            Case(
                lambda x, u, i, mode=mode: topi.scatter_nd(x, i, u, mode),
                (A, (2,)),
                ([[0, 2], [1, 3]],),
                **POSITIVE,
            ),
            mode == "update",
        )
        for mode in ("update", "mul", "max")
    },
    **{
        f"scatter_elements, {mode}": (
            Case(
                lambda x, u, i, mode=mode: topi.scatter_elements(x, i, u, 1, mode),
                (A, (3, 2)),
                ([[1, 1], [0, 3], [2, 2]],),
                **POSITIVE,
            ),
            mode == "mul",
        )
        for mode in ("mul", "max", "min", "mean")
    },
    "index_put": (
        Case(
            lambda x, u, i, j: topi.index_put(x, [i, j], u, True),
            (A, (3,)),
            ([0, 2, 0], [1, 3, 1]),
        ),
        True,
    ),
    "adv_index": (
        Case(lambda x, i, j: topi.adv_index(x, [i, j]), (A,), ([0, 2, 0], [1, 1, 1])),
        False,
    ),
    "slice_scatter": (Case(lambda x, y: topi.slice_scatter(x, y, 0, 3, 2, 0), (A, (2, 4))), False),
    "sliding_window": (Case(lambda x: topi.sliding_window(x, 0, (2, 2), (1, 2)), (A,)), False),
    "layout_transform": (
        Case(lambda x: topi.layout_transform(x, "NCHW", "NCHW2c"), (IMAGES,)),
        True,
    ),
    "dilate": (Case(lambda x: topi.nn.dilate(x, (1, 1, 2, 2)), (IMAGES,)), False),
    "circular_pad": (Case(lambda x: topi.nn.circular_pad(x, [0, 1], [0, 1]), (A,)), False),
    "reflect_pad": (Case(lambda x: topi.nn.reflect_pad(x, [0, 1], [0, 1]), (A,)), True),
    "replicate_pad": (Case(lambda x: topi.nn.replicate_pad(x, [0, 1], [0, 2]), (A,)), False),
    "scale_shift": (Case(topi.nn.scale_shift_nchw, (IMAGES, (2,), (2,))), False),
    "batch_norm": (
        Case(
            lambda *args: topi.nn.batch_norm(*args, 1, 1e-5, True, True, True)[0],
            (IMAGES, *[(2,)] * 4),
            **POSITIVE,
        ),
        False,
    ),
    "upsampling": (Case(lambda x: topi.nn.upsampling(x, 2, 2), (IMAGES,), rtol=5e-3), False),
    "pool1d": (
        Case(lambda x: topi.nn.pool1d(x, [2], [2], [1], [0, 0], "max"), ((1, 2, 6),)),
        False,
    ),
    "pool3d": (
        Case(
            lambda x: topi.nn.pool3d(x, [2, 2, 2], [1, 1, 1], [1, 1, 1], [0, 0, 0, 1, 1, 1], "avg"),
            (VOLUME,),
        ),
        False,
    ),
    "group_conv2d": (
        Case(
            lambda x, w: topi.nn.group_conv2d_nchw(x, w, 1, 1, 1, 2),
            ((1, 4, 5, 5), (4, 2, 3, 3)),
        ),
        False,
    ),
    "conv2d_nhwc": (
        Case(lambda x, w: topi.nn.conv2d_nhwc(x, w, 1, 1, 1), ((1, 5, 6, 2), (3, 3, 2, 3))),
        False,
    ),
    "conv3d": (
        Case(
            lambda x, w: topi.nn.conv3d_ncdhw(x, w, 1, 1, 1, 1),
            (VOLUME, (2, 1, 2, 2, 2)),
            order=1,
        ),
        False,
    ),
    "conv1d_transpose": (
        Case(
            lambda x, w: topi.nn.conv1d_transpose_ncw(x, w, 2, (1, 1), x.dtype, (1,)),
            ((1, 2, 4), (2, 3, 3)),
        ),
        False,
    ),
    "winograd": (
        Case(
            lambda x, w: topi.nn.conv2d_winograd_nchw(x, w, 1, 1, 1, "float64"),
            ((1, 2, 6, 6), (2, 2, 3, 3)),
            order=1,
        ),
        False,
    ),
    "deformable_conv2d": (
        Case(
            lambda x, o, w: topi.nn.deformable_conv2d_nchw(
                x, o, w, (1, 1), (0, 0), (1, 1), 1, 1, "float64"
            ),
            ((1, 2, 5, 5), (1, 8, 4, 4), (2, 2, 2, 2)),
            order=1,
        ),
        False,
    ),
    "correlation": (
        Case(lambda x, y: topi.nn.correlation_nchw(x, y, 1, 1, 1, 1, 1, True), ((1, 2, 4, 4),) * 2),
        False,
    ),
    "grid_sample": (Case(topi.image.grid_sample, (IMAGES, (1, 2, 4, 4)), order=1), False),
    "affine_grid": (Case(lambda x: topi.image.affine_grid(x, (3, 4)), ((2, 2, 3),)), False),
    "dilation2d": (
        Case(
            lambda x, w: topi.image.dilation2d_nchw(x, w, [1, 1], [0, 0], [1, 1]),
            (IMAGES, (2, 2, 2)),
        ),
        False,
    ),
    "dft": (Case(lambda r, i: topi.dft(r, i, False)[0], ((2, 4), (2, 4)), order=1), False),
}
CASES.update({name: case for name, (case, _) in MORE.items()})
SLOW = {name for name, (_, is_quick) in MORE.items() if not is_quick}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_gradients(name):
    case = CASES[name]
    report = check_gradients(
        case.emit, case.inputs(), order=case.order, rtol=case.rtol, target=TARGET
    )
    assert report.comparisons > 0
