"""Models with divided parameters, their shapes and annotations."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as own_op

from relax_grad.distributed import along, column, row

BATCH = 3


def module_of(build, shapes, dtype="float64"):
    """Return the module of the loss ``build(emit, **params)``; a first extent "n" is symbolic."""
    n = tirx.Var("n", "int64")
    params = {
        name: relax.Var(name, relax.TensorType([n if e == "n" else e for e in shape], dtype))
        for name, shape in shapes.items()
    }
    bb = relax.BlockBuilder()
    with bb.function("loss", list(params.values())):
        with bb.dataflow():
            result = bb.emit_output(build(bb.emit, **params))
        bb.emit_func_output(result)
    return bb.get()


def mean_of(emit, y):
    return emit(op.mean(emit(op.sin(y))))


def mlp(emit, x, up, bias, down, last):
    y = emit(op.nn.gelu(emit(op.add(emit(op.matmul(x, up)), bias))))
    return mean_of(emit, emit(op.add(emit(op.matmul(y, down)), last)))


MLP = {"x": ("n", 4), "up": (4, 6), "bias": (6,), "down": (6, 4), "last": (4,)}
MLP_SHARDS = {"up": column(), "bias": column(), "down": row()}


def linear(emit, x, weight):
    """Return the product with a weight in PyTorch's order."""
    return emit(op.matmul(x, emit(op.permute_dims(weight))))


def attended(emit, q, k, v):
    """Return attention of tensors (batch, heads, places, features)."""
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    mask = np.triu(np.full((4, 4), -1e9), 1)
    scores = emit(op.add(scores, relax.const(mask, "float64")))
    return emit(op.matmul(emit(op.nn.softmax(scores, -1)), v))


def joined(emit, x, qkv, bias, out):
    """Attention with one weight for queries, keys and values: an axis of 3 before the heads."""
    n = x.ty.shape.values[0]
    y = emit(op.add(linear(emit, x, qkv), bias))
    y = emit(op.permute_dims(emit(op.reshape(y, (n, 4, 3, 2, 2))), [2, 0, 3, 1, 4]))
    parts = emit(op.split(y, 3, 0))
    q, k, v = (emit(op.squeeze(emit(relax.TupleGetItem(parts, i)), 0)) for i in range(3))
    y = emit(op.permute_dims(attended(emit, q, k, v), [0, 2, 1, 3]))
    return mean_of(emit, linear(emit, emit(op.reshape(y, (n, 4, 4))), out))


def chunked(emit, x, qkv, bias, out):
    """The same with a split or slices of the divided axis, and heads joined with a symbolic
    batch."""
    n = x.ty.shape.values[0]
    y = emit(op.add(linear(emit, x, qkv), bias))
    parts = emit(op.split(y, [4, 8], 2))
    q, k = (emit(relax.TupleGetItem(parts, i)) for i in range(2))
    v = emit(op.strided_slice(y, [2], [8], [12]))
    q, k, v = (
        emit(
            op.reshape(
                emit(op.permute_dims(emit(op.reshape(e, (n, 4, 2, 2))), [0, 2, 1, 3])),
                (n * 2, 4, 2),
            )
        )
        for e in (q, k, v)
    )
    q, k, v = (emit(op.expand_dims(head, 1)) for head in (q, k, v))
    y = emit(op.reshape(attended(emit, q, k, v), (n, 2, 4, 2)))
    y = emit(op.flatten(emit(op.permute_dims(y, [0, 2, 1, 3]))))
    return mean_of(emit, linear(emit, emit(op.reshape(y, (n, 4, 4))), out))


def fused(emit, x, qkv, bias, out):
    """The same with the operator for attention, and norms of the features of a head."""
    n = x.ty.shape.values[0]
    y = emit(op.reshape(emit(op.add(linear(emit, x, qkv), bias)), (n, 4, 3, 2, 2)))
    parts = emit(op.split(y, 3, 2))
    q, k, v = (emit(op.squeeze(emit(relax.TupleGetItem(parts, i)), 2)) for i in range(3))
    y = emit(op.reshape(emit(op.nn.attention(q, k, v)), (n, 4, 4)))
    return mean_of(emit, linear(emit, y, out))


def dropped(emit, x, qkv, bias, out):
    """The same with dropout of the weights, and a bias of each head."""
    n = x.ty.shape.values[0]
    y = emit(op.reshape(emit(op.add(linear(emit, x, qkv), bias)), (n, 4, 3, 2, 2)))
    parts = emit(op.split(y, 3, 2))
    q, k, v = (emit(op.squeeze(emit(relax.TupleGetItem(parts, i)), 2)) for i in range(3))
    seed, stream = (relax.const(number, "int64") for number in (-7, 3))
    of_heads = relax.const(np.random.default_rng(1).normal(size=(1, 2, 4, 4)))
    attended = own_op.attention_dropout(q, k, v, seed, stream, 0.4, of_heads)
    return mean_of(emit, linear(emit, emit(op.reshape(emit(attended), (n, 4, 4))), out))


def grouped(emit, x, query, key, value, out):
    """Attention whose heads of queries share those of keys, by the operator for attention."""
    n = x.ty.shape.values[0]
    q, k, v = (
        emit(op.reshape(emit(op.matmul(x, weight)), (n, 4, int(weight.ty.shape.values[1]) // 2, 2)))
        for weight in (query, key, value)
    )
    y = emit(op.reshape(emit(op.nn.attention(q, k, v)), (n, 4, 8)))
    return mean_of(emit, emit(op.matmul(y, out)))


def repeated(emit, x, query, key, value, out):
    """The same with repeated heads of keys, as models write it, and those of values by an axis of
    their own."""
    n = x.ty.shape.values[0]
    q, k, v = (
        emit(op.reshape(emit(op.matmul(x, weight)), (n, 4, int(weight.ty.shape.values[1]) // 2, 2)))
        for weight in (query, key, value)
    )
    k = emit(op.repeat(k, 2, 2))
    v = emit(op.broadcast_to(emit(op.expand_dims(v, 3)), (n, 4, 2, 2, 2)))
    q, k, v = (emit(op.permute_dims(y, [0, 2, 1, 3])) for y in (q, k, op.reshape(v, (n, 4, 4, 2))))
    y = emit(op.reshape(emit(op.permute_dims(attended(emit, q, k, v), [0, 2, 1, 3])), (n, 4, 8)))
    return mean_of(emit, emit(op.matmul(y, out)))


def grouped_shapes(heads: int) -> dict:
    """Return the shapes of :func:`grouped` for so many heads of keys."""
    return {
        "x": ("n", 4, 4),
        "query": (4, 8),
        "key": (4, 2 * heads),
        "value": (4, 2 * heads),
        "out": (8, 4),
    }


ATTENTION = {"x": ("n", 4, 4), "qkv": (12, 4), "bias": (12,), "out": (4, 4)}
ATTENTION_SHARDS = {"qkv": column(parts=3), "bias": column(parts=3), "out": row()}


def head_norms(emit, x, w, gamma, beta, out):
    """A norm of each head with shared parameters, whose gradients are sums over the heads."""
    n = x.ty.shape.values[0]
    y = emit(op.reshape(emit(op.matmul(x, w)), (n, 2, 4)))
    y = emit(op.nn.layer_norm(y, gamma, beta, [-1]))
    return mean_of(emit, emit(op.matmul(emit(op.reshape(y, (n, 8))), out)))


def reductions(emit, x, w, scale):
    """A sum and a mean over the divided axis, a maximum over another, and a tensor of full extent
    that is cut."""
    y = emit(op.multiply(emit(op.matmul(x, w)), scale))
    total = emit(op.sum(emit(op.exp(y)), [1]))
    mean = emit(op.mean(emit(op.square(y)), 1, keepdims=True))
    least = emit(op.sum(emit(op.max(y, 0))))
    return emit(op.add(mean_of(emit, emit(op.add(total, emit(op.sum(mean, [1]))))), least))


def tables(emit, table, out, w):
    """A table with divided features, an einsum, and tensors that are joined."""
    rows = emit(op.take(table, relax.const(np.array([[0, 2], [1, 1]])), 0))
    more = emit(op.concat([rows, emit(op.cos(rows))], 1))
    both = emit(
        op.stack([more, emit(op.broadcast_to(emit(op.mean(more, 0, keepdims=True)), (2, 4, 4)))], 0)
    )
    y = emit(op.einsum((both, w), "abcd,de->abce"))
    return emit(op.add(mean_of(emit, y), mean_of(emit, emit(op.matmul(rows, out)))))


TARGETS = np.array([0, 5, 2, -100, 3])


def vocabulary(emit, table, head):
    """An embedding, and the cross entropy of its vocabulary; a target is ignored, and words
    repeat."""
    rows = emit(op.take(table, relax.const(np.array([[5, 0], [2, 2]])), 0))
    x = emit(
        op.concat(
            [emit(op.reshape(rows, (4, 4))), emit(op.take(table, relax.const(np.array([3])), 0))], 0
        )
    )
    scores = emit(op.nn.log_softmax(emit(op.matmul(x, emit(op.permute_dims(head)))), -1))
    return emit(op.nn.nll_loss(scores, relax.const(TARGETS), ignore_index=-100))


def weighted(emit, table, head, weights):
    """The same with weights of words, and a table whose words are the last axis."""
    x = emit(
        op.permute_dims(emit(op.take(table, relax.const(np.array([5, 0, 2, 2, 7])), 1, "clip")))
    )
    scores = emit(op.nn.log_softmax(emit(op.matmul(x, head)), 1))
    mean = emit(op.nn.nll_loss(scores, relax.const(TARGETS), weights, ignore_index=-100))
    losses = emit(op.nn.nll_loss(scores, relax.const(TARGETS), reduction="none", ignore_index=-100))
    return emit(op.add(mean, mean_of(emit, losses)))


def probabilities(emit, x, w, table):
    """A softmax over the divided axis, of which a product takes the mean of rows, and probabilities
    of chosen words."""
    chances = emit(op.nn.softmax(emit(op.matmul(x, w)), 1))
    chosen = emit(op.gather_elements(chances, relax.const(np.array([[0], [5], [2]])), 1))
    word = emit(op.take(table, relax.const(np.int64(-1)), 0, "wrap"))
    y = emit(op.add(emit(op.matmul(chances, table)), word))
    return emit(op.add(mean_of(emit, y), emit(op.sum(emit(op.log(chosen))))))


CASES = {
    "mlp": (mlp, MLP, MLP_SHARDS),
    "a bias without an annotation is cut": (mlp, MLP, {"up": column(), "down": row()}),
    "a row alone cuts its input": (mlp, MLP, {"down": row()}),
    "3 parts": (mlp, MLP, {"up": along(1, 3), "down": row(3)}),
    "attention": (joined, ATTENTION, ATTENTION_SHARDS),
    "attention, bias without an annotation": (joined, ATTENTION, {"qkv": column(3), "out": row()}),
    "attention, two heads of keys": (
        grouped,
        grouped_shapes(2),
        {"query": column(), "key": column(), "value": column(), "out": row()},
    ),
    "attention, repeated heads of keys": (
        repeated,
        grouped_shapes(2),
        {"query": column(), "key": column(), "value": column(), "out": row()},
    ),
    "attention, whole heads of keys": (
        grouped,
        grouped_shapes(2),
        {"query": column(), "out": row()},
    ),
    "attention, whole queries": (
        grouped,
        grouped_shapes(2),
        {"key": column(), "out": row()},
    ),
    "attention, one head of keys": (
        grouped,
        grouped_shapes(1),
        {"query": column(), "out": row()},
    ),
    "attention by slices": (chunked, ATTENTION, ATTENTION_SHARDS),
    "attention operator": (fused, ATTENTION, ATTENTION_SHARDS),
    "attention with dropout": (dropped, ATTENTION, ATTENTION_SHARDS),
    "a batch of attention with dropout": (
        dropped,
        {**ATTENTION, "x": (4, 4, 4)},
        {"x": along(0)},
    ),
    "norms of heads": (
        head_norms,
        {"x": ("n", 4), "w": (4, 8), "gamma": (4,), "beta": (4,), "out": (8, 3)},
        {"w": column(), "out": row()},
    ),
    "reductions": (reductions, {"x": ("n", 4), "w": (4, 6), "scale": (6,)}, {"w": column()}),
    "tables": (
        tables,
        {"table": (3, 4), "out": (4, 3), "w": (4, 5)},
        {"table": along(-1), "out": row(), "w": along(0)},
    ),
    "a vocabulary": (
        vocabulary,
        {"table": (6, 4), "head": (6, 4)},
        {"table": along(0), "head": column()},
    ),
    "a vocabulary with weights": (
        weighted,
        {"table": (4, 6), "head": (4, 6), "weights": (6,)},
        {"table": along(1), "head": column()},
    ),
    "probabilities": (
        probabilities,
        {"x": ("n", 4), "w": (4, 6), "table": (6, 2)},
        {"w": column(), "table": along(0)},
    ),
}


def values_of(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=[BATCH if e == "n" else e for e in shape])
        for name, shape in shapes.items()
    }
