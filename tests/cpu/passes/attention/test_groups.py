"""Attentions read keys and values before they are repeated for heads that share them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from fused import before_and_after
from programs import build, tensor, to_numpy
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.frontend import random
from relax_grad.ir.bindings import bindings_of
from relax_grad.transform import FuseAttention

RNG = np.random.default_rng(0)
B, H, G, T, S, D, E = 2, 6, 2, 5, 7, 8, 3
N = tirx.Var("n", "int64")


def repeated(bb, x):
    """Repeat the heads of (batch, heads, keys, features)."""
    return bb.emit(op.repeat(x, H // G, 1))


def joined(bb, x):
    """Repeat heads as models for transformers do, by a broadcast of a new axis."""
    batch, heads, keys, size = x.ty.shape.values
    x = bb.emit(op.reshape(x, (batch, heads, 1, keys, size)))
    x = bb.emit(op.broadcast_to(x, (batch, heads, H // G, keys, size)))
    return bb.emit(op.reshape(x, (batch, heads * (H // G), keys, size)))


def broadcast(bb, x):
    """Repeat the only head."""
    batch, _, keys, size = x.ty.shape.values
    return bb.emit(op.broadcast_to(x, (batch, H, keys, size)))


def permuted(bb, x):
    """Repeat the heads behind the positions."""
    x = bb.emit(op.repeat(bb.emit(op.permute_dims(x, [0, 2, 1, 3])), H // G, 2))
    return bb.emit(op.permute_dims(x, [0, 2, 1, 3]))


def tiled(bb, x):
    """Repeat all heads one behind the other, not each of them."""
    return bb.emit(op.tile(x, [1, H // G, 1, 1]))


def batches(bb, x):
    """Broadcast the batch too."""
    _, heads, keys, size = x.ty.shape.values
    return bb.emit(op.broadcast_to(bb.emit(op.sum(x, [0], True)), (B, heads, keys, size)))


def module_of(key, value=None, *, form="operator", groups=G, batch=B):
    """Return the module of an attention of repeated keys and values, and its parameters' shapes."""
    shapes = (batch, H, T, D), (batch, groups, S, D), (batch, groups, S, E)
    params = [tensor(name, shape, "float32") for name, shape in zip("qkv", shapes, strict=True)]

    def body(bb, q, k, v):
        k, v = key(bb, k), (value or key)(bb, v)
        if form == "written out":
            scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
            y = bb.emit(op.matmul(bb.emit(op.nn.softmax(scores, -1)), v))
        else:
            q, k, v = (bb.emit(op.permute_dims(x, [0, 2, 1, 3])) for x in (q, k, v))
            bias = [relax.const(BIAS)] if form == "bias" else []
            attention = op.nn.attention_bias if bias else op.nn.attention
            y = bb.emit(attention(q, k, v, *bias, scale=0.4, causal_mask="TopLeft"))
        return bb.emit(op.sum(bb.emit(op.multiply(y, bb.emit(op.sin(y))))))

    return build(params, body), shapes


def with_dropout(key):
    """Return the module of an attention that is written out, with dropout of its weights."""
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, E)
    params = [tensor(name, shape, "float32") for name, shape in zip("qkv", shapes, strict=True)]

    def body(bb, q, k, v):
        k, v = key(bb, k), key(bb, v)
        scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        weights = random.dropout(bb, 7, 3, bb.emit(op.nn.softmax(scores, -1)), 0.25)[0]
        return bb.emit(op.sum(bb.emit(op.sin(bb.emit(op.matmul(weights, v))))))

    return build(params, body), shapes


BIAS = RNG.normal(size=(1, H, T, S)).astype("float32")

SHARED = {
    "repeat": module_of(repeated),
    "expand and reshape": module_of(joined),
    "expand": module_of(broadcast, groups=1),
    "repeat behind the positions": module_of(permuted),
    "two spellings": module_of(joined, repeated),
    "symbolic": module_of(joined, batch=N),
    "bias of heads": module_of(joined, form="bias"),
    "written out": module_of(joined, form="written out"),
    "dropout": with_dropout(joined),
}

LEFT = {
    "order of heads": module_of(tiled),
    "keys only": module_of(repeated, tiled),
    "batch": module_of(lambda bb, x: batches(bb, repeated(bb, x))),
}


def attentions(module) -> list[relax.Call]:
    values = [binding.value for binding in bindings_of(module["main"].body)]
    return [v for v in values if isinstance(v, relax.Call) and "attention" in str(v.op)]


@pytest.fixture(scope="module")
def differentiated():
    return before_and_after(
        {case: (module, ["q", "k", "v"]) for case, (module, _) in SHARED.items()}
    )


@pytest.mark.parametrize("case", SHARED)
def test_shared_heads(case, differentiated):
    module, shapes = SHARED[case]
    changed = FuseAttention()(module)
    relax.analysis.well_formed(changed)
    (call,) = attentions(changed)
    groups = shapes[1][1]
    assert [int(operand.ty.shape.values[2]) for operand in call.args[:3]] == [H, groups, groups]
    sizes = [[3 if extent is N else extent for extent in shape] for shape in shapes]
    values = [tvm.runtime.tensor(RNG.normal(size=size).astype("float32")) for size in sizes]
    before, after = (to_numpy(differentiated[when, case](*values)) for when in ("before", "after"))
    np.testing.assert_allclose(after[0], before[0], rtol=1e-4, atol=1e-5)
    for result, wanted in zip(after[1], before[1], strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left(case):
    module, _ = LEFT[case]
    tvm.ir.assert_structural_equal(FuseAttention()(module), module)
