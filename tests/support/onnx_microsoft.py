"""A small node of every operator of ONNX Runtime that trains, with its values by NumPy where
onnxruntime has it for GPUs only."""

from __future__ import annotations

from math import erf

import numpy as np
from onnx import helper
from onnx_operators import Case, floats, integers

DOMAIN = "com.microsoft"


def case(
    kind: str, *operands, fixed=(), domain: str = DOMAIN, count: int = 1, **attributes
) -> Case:
    names = ["" if operand is None else str(i) for i, operand in enumerate(operands)]
    node = helper.make_node(
        kind, names, [f"y{i}" for i in range(count)], domain=domain, **attributes
    )
    return Case(operands, {}, 1, (0,), (node,), fixed)


def shifted(*shape):
    """Return numbers of both signs."""
    return floats(*shape) - 0.5


_ANGLES = np.outer(np.arange(6), [1.0, 0.5])
_HEADS = {"num_heads": 4, "kv_num_heads": 2}
_LAST, _COUNT = integers(4, 4, dtype="int32"), np.array(5, "int32")

CASES = {
    "Attention": case("Attention", shifted(2, 5, 8), shifted(8, 24), shifted(24),
    integers([1, 1, 1, 1, 0], [1, 1, 1, 1, 1], dtype="int32"), num_heads=2),
    "BiasAdd": case("BiasAdd", floats(2, 4, 8), floats(8), floats(2, 4, 8)),
    "BiasDropout": case("BiasDropout", floats(2, 3), floats(3), floats(2, 3),
    np.array(0.5, "float32"), np.array(False)),
    "BiasGelu": case("BiasGelu", shifted(2, 3), shifted(3)),
    "BiasSoftmax": case("BiasSoftmax", shifted(2, 3, 4), shifted(2, 3, 4), axis=2,
    is_inner_broadcast=0),
    "BiasSplitGelu": case("BiasSplitGelu", shifted(2, 3, 8), shifted(8)),
    "EmbedLayerNormalization": case(
        "EmbedLayerNormalization", integers([1, 2, 0], [2, 2, 1], dtype="int32"),
        integers([0, 1, 1], [1, 0, 0], dtype="int32"), shifted(4, 8), shifted(5, 8), shifted(2, 8),
        floats(8), floats(8), count=2,
    ),
    "FastGelu": case("FastGelu", shifted(2, 3), shifted(3)),
    "FusedConv": case("FusedConv", shifted(1, 2, 5, 5), shifted(3, 2, 3, 3), shifted(3),
    activation="LeakyRelu", activation_params=[0.25]),
    "FusedGemm": case("FusedGemm", shifted(2, 3), shifted(4, 3), shifted(4), transB=1,
    activation="Tanh"),
    "FusedMatMul": case("FusedMatMul", shifted(4, 2, 3, 5), shifted(6, 2, 3, 5), transBatchA=1,
    transBatchB=1, transB=1, alpha=0.5),
    "FusedMatMulActivation": case("FusedMatMulActivation", shifted(2, 3), shifted(3, 4),
    activation="Sigmoid", alpha=0.5),
    "Gelu": case("Gelu", shifted(2, 3)),
    "GemmFastGelu": case("GemmFastGelu", shifted(2, 3), shifted(3, 4), shifted(4)),
    "GroupNorm": case("GroupNorm", shifted(2, 3, 3, 4), floats(4), floats(4), groups=2,
    activation=1, epsilon=2.0**-10),
    "GroupQueryAttention": case("GroupQueryAttention", shifted(2, 5, 64), shifted(2, 5, 32),
    shifted(2, 5, 32), None, None, _LAST, _COUNT, **_HEADS),
    "MatMulNBits": case(
        "MatMulNBits", shifted(2, 16), np.arange(24, dtype="uint8").reshape(3, 1, 8), floats(3),
        N=3, K=16, bits=4, block_size=16, fixed=(2,)
    ),
    "MultiHeadAttention": case("MultiHeadAttention", shifted(2, 5, 8), shifted(2, 3, 8),
    shifted(2, 3, 8), num_heads=2),
    "QuickGelu": case("QuickGelu", shifted(2, 3), alpha=1.5),
    "RotaryEmbedding": case("RotaryEmbedding", shifted(2, 5, 8),
    integers([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]), np.cos(_ANGLES), np.sin(_ANGLES), num_heads=2,
    fixed=(2, 3)),
    "SimplifiedLayerNormalization": case("SimplifiedLayerNormalization", shifted(2, 8), floats(8),
    domain="", epsilon=2.0**-10),
    "SkipGroupNorm": case("SkipGroupNorm", shifted(2, 3, 3, 4), floats(4), floats(4), shifted(2, 4),
    floats(4), groups=2, epsilon=2.0**-10),
    "SkipLayerNormalization": case("SkipLayerNormalization", shifted(2, 3, 8), shifted(2, 3, 8),
    floats(8), floats(8), floats(8)),
    "SkipSimplifiedLayerNormalization": case("SkipSimplifiedLayerNormalization", shifted(2, 3, 8),
    shifted(2, 3, 8), floats(8), floats(8)),
    "TransposeMatMul": case("TransposeMatMul", shifted(2, 3), shifted(4, 3), transB=1),
}  # fmt: skip


def _gelu(x):
    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def _group_norm(x, gamma, beta):
    groups = x.reshape(*x.shape[:3], 2, -1)
    mean, var = (f(groups, (1, 2, 4), keepdims=True) for f in (np.mean, np.var))
    return ((groups - mean) / np.sqrt(var + 2.0**-10)).reshape(x.shape) * gamma + beta


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _fast_gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _silu(x):
    return x * _sigmoid(x)


def _softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


#: The results of operators that onnxruntime has for GPUs only, by the operands.
BY_NUMPY = {
    "BiasAdd": lambda x, b, s: x + b + s,
    "BiasDropout": lambda x, b, r, *_: x + b + r,
    "BiasSoftmax": lambda x, b: _softmax(x + b),
    "BiasSplitGelu": lambda x, b: (x + b)[..., :4] * _gelu((x + b)[..., 4:]),
    "FusedMatMulActivation": lambda a, b: _sigmoid(0.5 * a @ b),
    "GemmFastGelu": lambda a, b, c: _fast_gelu(a @ b + c),
    "GroupNorm": lambda x, g, b: _silu(_group_norm(x, g, b)),
    "SkipGroupNorm": lambda x, g, b, s, c: _group_norm(x + s[:, None, None] + c, g, b),
}
