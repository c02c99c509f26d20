"""A small node of every operator of ONNX Runtime that trains, with its values by NumPy where
onnxruntime has it for GPUs only."""

from __future__ import annotations

from math import erf

import numpy as np
from onnx import helper

from . import Case, floats, integers

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
    "CausalConvWithState": case("CausalConvWithState", shifted(2, 6, 3), shifted(3, 1, 3),
    shifted(3), shifted(2, 4, 3), activation="silu", dilation=2, channels_last=1, count=2),
    "GatedAdd": case("GatedAdd", shifted(2, 4), shifted(2, 4), shifted(2, 3), shifted(3, 1)),
    "GatedRMSNorm": case("GatedRMSNorm", shifted(2, 6), floats(3), shifted(2, 6),
    activation="sigmoid", epsilon=2.0**-10),
    "GatedRelativePositionBias": case("GatedRelativePositionBias", shifted(2, 3, 8), shifted(8),
    shifted(1, 2, 3, 3), shifted(4, 6), shifted(6), shifted(1, 2, 1, 1), num_heads=2),
    "LinearAttention": case("LinearAttention", shifted(2, 4, 6), shifted(2, 4, 6), shifted(2, 4, 4),
    None, None, floats(2, 4, 2), q_num_heads=2, kv_num_heads=2, update_rule="delta", count=2),
    "GridSample": case("GridSample", shifted(1, 2, 4, 5), shifted(1, 3, 2, 2), mode="bilinear"),
    "LinearAttentionGate": case("LinearAttentionGate", shifted(2, 3, 4), shifted(4), shifted(4),
    shifted(2, 3, 4), count=2),
    "ScaledSiLU": case("ScaledSiLU", shifted(2, 3), alpha=1.5),
    "SwiGLU": case("SwiGLU", shifted(2, 3, 8), activation_alpha=1.75, activation_beta=0.5,
    limit=0.25),
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
    "Trilu": case("Trilu", shifted(2, 3, 4), np.array(-1), upper=0, fixed=(1,)),
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


def _swiglu(x):
    gate, line = np.minimum(x[..., :4], 0.25), np.clip(x[..., 4:], -0.25, 0.25)
    return gate * _sigmoid(1.75 * gate) * (line + 0.5)


def _convolution(x, w, b, s):
    whole = np.concatenate([s, x], 1)
    return _silu(sum(whole[:, 2 * i : 2 * i + 6] * w[:, 0, i] for i in range(3)) + b)


def _gated_norm(x, scale, gate):
    rows = x.reshape(2, 2, 3)
    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 2.0**-10) * scale
    return rows.reshape(2, 6) * _sigmoid(gate)


def _gated_bias(query, own, distances, weight, bias, factor):
    heads = (query + own).reshape(2, 3, 2, 4).transpose(0, 2, 1, 3)
    gates = _sigmoid((heads @ weight + bias).reshape(2, 2, 3, 2, 3).sum(-1))
    return (gates[..., :1] * (gates[..., 1:] * factor - 1) + 2) * distances


def _delta(q, k, v, rate):
    q, k, v = (x.reshape(2, 4, 2, -1) for x in (q, k, v))
    state, results = np.zeros((2, 2, 3, 2)), []
    for t in range(4):
        error = v[:, t] - np.einsum("bhij,bhi->bhj", state, k[:, t])
        state = state + k[:, t, :, :, None] * (rate[:, t, :, None] * error)[:, :, None]
        results.append(np.einsum("bhij,bhi->bhj", state, q[:, t]).reshape(2, 4) / np.sqrt(3))
    return np.stack(results, 1)


#: The results of operators that onnxruntime has for GPUs only or in recent versions only, by the
#: operands.
BY_NUMPY = {
    "BiasAdd": lambda x, b, s: x + b + s,
    "BiasDropout": lambda x, b, r, *_: x + b + r,
    "BiasSoftmax": lambda x, b: _softmax(x + b),
    "BiasSplitGelu": lambda x, b: (x + b)[..., :4] * _gelu((x + b)[..., 4:]),
    "CausalConvWithState": _convolution,
    "GatedAdd": lambda x, y, g, w: x + y * _sigmoid(g @ w),
    "GatedRMSNorm": _gated_norm,
    "GatedRelativePositionBias": _gated_bias,
    "LinearAttention": _delta,
    "LinearAttentionGate": lambda a, b, s, _: s * np.logaddexp(0, a + b),
    "ScaledSiLU": lambda x: _silu(1.5 * x),
    "SwiGLU": _swiglu,
    "FusedMatMulActivation": lambda a, b: _sigmoid(0.5 * a @ b),
    "GemmFastGelu": lambda a, b, c: _fast_gelu(a @ b + c),
    "GroupNorm": lambda x, g, b: _silu(_group_norm(x, g, b)),
    "SkipGroupNorm": lambda x, g, b, s, c: _group_norm(x + s[:, None, None] + c, g, b),
}
