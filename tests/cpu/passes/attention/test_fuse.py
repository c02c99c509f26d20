"""Attentions that are written out become operators with the same values and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from fused import before_and_after, by_moves
from programs import build, tensor, to_numpy
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.frontend import random
from relax_grad.ir.bindings import bindings_of
from relax_grad.op import stop_gradient
from relax_grad.transform import FuseAttention

RNG = np.random.default_rng(0)
B, H, T, S, D, E = 2, 3, 6, 9, 8, 5
N = tirx.Var("n", "int64")

INFINITE = -math.inf
LEAST = float(np.finfo("float32").min)


def number(value, dtype="float32"):
    return relax.const(np.asarray(value, dtype))


def attention(
    *steps, batch=(B, H), queries=T, keys=S, extra=None, kind="float32", on_weights=(), before=0
):
    """Return the module of an attention with steps between its products, and the shapes of its
    parameters.

    A step takes the block builder, the scores and the extra tensor. ``on_weights`` are steps after
    the softmax.
    """
    shapes = [(*batch, queries, D), (*batch, keys, D), (*batch, keys, E)]
    params = [tensor(name, shape, "float32") for name, shape in zip("qkv", shapes, strict=True)]
    if extra is not None:
        params.append(tensor("extra", extra, kind))
        shapes.append(extra)

    def body(bb, q, k, v, *others):
        rank = len(batch) + 2
        turned = bb.emit(op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
        scores = bb.emit(op.matmul(q, turned))
        for step in steps:
            scores = bb.emit(step(bb, scores, *others))
        weights = bb.emit(op.nn.softmax(scores, -1))
        for step in on_weights:
            made = step(bb, weights, *others)
            weights = made if isinstance(made, relax.Var) else bb.emit(made)
        y = bb.emit(op.matmul(weights, v))
        return bb.emit(op.sum(bb.emit(op.multiply(y, bb.emit(op.sin(y))))))

    return build(params, body), shapes


def times(factor):
    return lambda bb, scores, *_: op.multiply(scores, number(factor))


def over(divisor):
    return lambda bb, scores, *_: op.divide(scores, number(divisor))


def plus(bb, scores, extra):
    return op.add(extra, scores)


def constant_bias(value):
    return lambda bb, scores, *_: op.add(scores, number(value))


def where(value, keeps=True, mask=None):
    """Return a step that replaces scores by a number where a mask, by default the extra tensor,
    says so."""

    def step(bb, scores, extra=None):
        kept = extra if mask is None else relax.const(mask)
        hidden = number(value)
        return op.where(kept, *((scores, hidden) if keeps else (hidden, scores)))

    return step


def zeros(keeps=True, mask=None):
    """Return a step that replaces weights by zero where a mask says so."""
    return where(0.0, keeps, mask)


def computed_triangle(bb, scores, *_):
    """A causal mask as PyTorch's programs compute it."""
    ones = bb.emit(op.ones((T, S), "bool"))
    above = bb.emit(op.triu(bb.emit(op.astype(ones, "int8")), 1))
    return op.where(bb.emit(op.not_equal(above, number(0, "int8"))), number(INFINITE), scores)


def dropout(rate, seed=7):
    return lambda bb, weights, *_: random.dropout(bb, seed, 3, weights, rate)[0]


def as_bmm(*steps, scores=((B, H, T, S),), weights=((B * H, T, S),)):
    """An attention whose products have one axis for batch and heads."""
    shapes = [(B, H, T, D), (B, H, S, D), (B, H, S, E)]
    keys = [(B * H, S, D), [0, 2, 1]]
    values, result = [(B * H, S, E)], [(B, H, T, E)]
    return by_moves(shapes, [(B * H, T, D)], keys, values, scores, weights, result, *steps)


def as_einsum(*steps):
    """An attention of heads behind positions, as PyTorch decomposes its two ``einsum``."""
    swap, turn = [0, 2, 1, 4, 3], [0, 1, 2, 4, 3]
    return by_moves(
        [(B, T, H, D), (B, S, H, D), (B, S, H, E)],
        [(B, T, H, D, 1), swap, turn, (B * H, T, D)],
        [(B, S, H, D, 1), [0, 2, 4, 1, 3], [0, 1, 4, 3, 2], (B * H, D, S)],
        [(B, S, H, E, 1), [0, 4, 2, 3, 1], [0, 2, 4, 3, 1], (B * H, S, E)],
        [(B, H, T, 1, S), turn, (B, H, T, S)],
        [(B, H, T, S, 1), swap, swap, (B * H, T, S)],
        [(B, H, T, 1, E), swap, (B, T, H, E)],
        *steps,
    )


CAUSAL = np.tri(T, S, dtype=bool)
BOTTOM = np.tri(T, S, S - T, dtype=bool)
ALL = (B, H, T, S)
HIDES_ALL = CAUSAL & (np.arange(T) != 2)[:, None]

#: The attention, the operator, its attribute causal_mask, and the values of the extra tensor.
FUSED = {
    "plain": (attention(), "attention", None),
    "three axes": (attention(times(0.3), batch=(4,)), "attention", None),
    "symbolic": (attention(over(2.0), batch=(N, H)), "attention", None),
    "one factor": (
        attention(lambda bb, s, f: op.multiply(s, f), extra=(1, 1, 1, 1)),
        "attention",
        None,
    ),
    "bias": (attention(times(0.5), plus, extra=(H, T, S)), "attention_bias", None),
    "bias of three axes": (attention(plus, batch=(4,), extra=(T, S)), "attention_bias", None),
    "subtracted bias": (
        attention(lambda bb, s, f: op.subtract(s, f), times(1), extra=(H, T, S)),
        "attention_bias",
        None,
    ),
    "bias of keys": (attention(plus, extra=(B, 1, 1, S)), "attention_bias", None),
    "causal": (attention(times(0.5), where(INFINITE, mask=CAUSAL)), "attention", "TopLeft"),
    "causal, least": (attention(where(LEAST, False, mask=~CAUSAL)), "attention", "TopLeft"),
    "causal bias": (attention(constant_bias(np.where(CAUSAL, 0, -1e9))), "attention", "TopLeft"),
    "causal, last": (attention(where(-1e4, mask=BOTTOM[None])), "attention", "BottomRight"),
    "computed triangle": (attention(over(3.0), computed_triangle), "attention", "TopLeft"),
    "causal with bias": (
        attention(constant_bias(RNG.normal(size=(T, S))), where(INFINITE, mask=CAUSAL)),
        "attention_bias",
        "TopLeft",
    ),
    "constant mask": (attention(where(INFINITE, mask=RNG.random(ALL) < 2)), "attention_bias", None),
    "mask": (attention(where(-1e9), extra=ALL, kind="bool"), "attention_bias", None),
    "infinite mask": (
        attention(where(INFINITE), extra=(B, 1, T, S), kind="bool"),
        "attention_bias",
        None,
    ),
    "hiding mask": (
        attention(where(LEAST, False), extra=(S,), kind="bool"),
        "attention_bias",
        None,
    ),
    "causal and padding": (
        attention(where(LEAST, mask=CAUSAL), where(LEAST), extra=(B, 1, 1, S), kind="bool"),
        "attention_bias",
        None,
    ),
    "query without keys": (attention(where(LEAST, mask=HIDES_ALL)), "attention_bias", None),
    "query without keys, infinite": (
        attention(where(INFINITE, mask=HIDES_ALL)),
        "attention_bias",
        None,
    ),
    "selection and bias": (
        attention(constant_bias(RNG.normal(size=(T, S))), where(-1e9), extra=(T, S), kind="bool"),
        "attention_bias",
        None,
    ),
    "causal and infinite padding": (
        attention(where(INFINITE, mask=CAUSAL), where(INFINITE), extra=(B, 1, 1, S), kind="bool"),
        "attention_bias",
        None,
    ),
    "bmm": (as_bmm(times(0.3), where(INFINITE, mask=CAUSAL)), "attention", "TopLeft"),
    "bmm with a bias of each head": (
        as_bmm(constant_bias(RNG.normal(size=(H, T, S)))),
        "attention_bias",
        None,
    ),
    "bmm, axes of the batch swapped": (
        as_bmm(constant_bias(RNG.normal(size=(H, 1, T, S))), scores=((H, B, T, S),)),
        "attention_bias",
        None,
    ),
    "einsum": (as_einsum(times(0.3), where(INFINITE, mask=CAUSAL)), "attention", "TopLeft"),
    "einsum with a bias": (
        as_einsum(constant_bias(RNG.normal(size=(B, 1, T, S)))),
        "attention_bias",
        None,
    ),
    "scale of a bias": (
        attention(times(0.3), plus, times(0.5), over(3.0), extra=(H, T, S)),
        "attention_bias",
        None,
    ),
    "scale of a mask and a bias": (
        attention(
            constant_bias(RNG.normal(size=(T, S))), where(LEAST), over(2.0), extra=ALL, kind="bool"
        ),
        "attention_bias",
        None,
    ),
    "infinite by a scale": (
        attention(where(LEAST), times(2.0), extra=ALL, kind="bool"),
        "attention_bias",
        None,
    ),
    "scale of a causal mask": (
        attention(where(-1e20, mask=CAUSAL), over(4.0)),
        "attention",
        "TopLeft",
    ),
    "numbers of tensors": (
        attention(
            lambda bb, s, m: op.divide(s, bb.emit(op.full((), number(3.0), "float32"))),
            lambda bb, s, m: op.where(m, s, bb.emit(stop_gradient(bb.emit(number(-1e9))))),
            extra=(B, 1, 1, S),
            kind="bool",
        ),
        "attention_bias",
        None,
    ),
    "zeros of masked weights": (
        attention(times(0.3), where(-1e9), extra=ALL, kind="bool", on_weights=[zeros()]),
        "attention_bias",
        None,
    ),
    "zeros of masked weights, -inf": (
        attention(where(-math.inf), times(0.4), extra=ALL, kind="bool", on_weights=[zeros()]),
        "attention_bias",
        None,
    ),
    "zeros by two negations": (
        attention(
            lambda bb, s, m: where(-1e9, keeps=False)(bb, s, bb.emit(op.logical_not(m))),
            extra=ALL,
            kind="bool",
            on_weights=[
                lambda bb, w, m: zeros(keeps=False)(bb, w, bb.emit(op.logical_not(m))),
                dropout(0.25),
            ],
        ),
        "attention_dropout",
        None,
    ),
    "zeros of a causal mask with a bias": (
        attention(
            constant_bias(RNG.normal(size=(H, T, S))),
            where(-1e9, mask=CAUSAL),
            on_weights=[zeros(mask=CAUSAL)],
        ),
        "attention_bias",
        "TopLeft",
    ),
    "dropout": (
        attention(times(0.3), where(INFINITE, mask=CAUSAL), on_weights=[dropout(0.25)]),
        "attention_dropout",
        "TopLeft",
    ),
    "dropout of whole rows of the generator": (
        attention(batch=(4,), queries=8, keys=16, on_weights=[dropout(0.9)]),
        "attention_dropout",
        None,
    ),
    "dropout and a bias, symbolic": (
        attention(plus, batch=(N, H), extra=(T, S), on_weights=[dropout(0.5)]),
        "attention_dropout",
        None,
    ),
}

LEFT = {
    "factors of weights": attention(
        on_weights=[lambda bb, w: op.multiply(w, number(RNG.random((T, S))))]
    ),
    "dropout of whole rows": attention(
        on_weights=[lambda bb, w: random.dropout(bb, 7, 3, w, 0.5, (B, H, T, 1))[0]]
    ),
    "another factor than that of dropout": attention(on_weights=[dropout(0.5), times(0.5)]),
    "dropout of all": attention(on_weights=[dropout(1.0)]),
    "number above the limit": attention(where(-100.0), extra=ALL, kind="bool"),
    "negative scale of a mask": attention(where(-1e9), times(-0.5), extra=ALL, kind="bool"),
    "scale that lifts a mask": attention(where(-1e4), times(0.5), extra=ALL, kind="bool"),
    "zeros of another mask": attention(
        where(-1e9), extra=(T, S), kind="bool", on_weights=[zeros(mask=RNG.random((T, S)) < 0.5)]
    ),
    "zeros in the place of the others": attention(
        where(-1e9), extra=ALL, kind="bool", on_weights=[zeros(keeps=False)]
    ),
    "zeros without a mask": attention(plus, extra=ALL, on_weights=[zeros(mask=CAUSAL)]),
    "zeros and a bias that may hide": attention(
        plus, where(-1e9, mask=CAUSAL), extra=ALL, on_weights=[zeros(mask=CAUSAL)]
    ),
    "factors of rows": attention(lambda bb, s, f: op.multiply(s, f), extra=(T, 1)),
    "mask of rows": attention(where(LEAST), extra=(T, 1), kind="bool"),
    "mask and bias that may hide": attention(where(-1e9, mask=CAUSAL), plus, extra=(B, 1, 1, S)),
    "moves between steps": as_bmm(
        times(0.3), lambda bb, s: op.reshape(s, (B * H, T, S)), constant_bias(RNG.normal(size=S))
    ),
    "rows and columns mixed": as_bmm(
        scores=((B, H, S, T), (B, H, T, S)), weights=((B * H, S, T), [0, 2, 1])
    ),
    "other function": attention(lambda bb, s: op.tanh(s)),
}


def calls(function, name: str) -> list[relax.Call]:
    values = [binding.value for binding in bindings_of(function.body)]
    part = "grad" if "dropout" in name else "nn"
    operator = tvm.ir.Op.get(f"relax.{part}.{name}")
    return [v for v in values if isinstance(v, relax.Call) and v.op == operator]


def drawn(shapes, module) -> list[np.ndarray]:
    """Return values of the parameters; a mask hides all keys of one query."""
    values = []
    for shape, param in zip(shapes, module["main"].params, strict=True):
        shape = [4 if extent is N else extent for extent in shape]
        if param.name != "extra" or str(param.ty.dtype) != "bool":
            values.append(RNG.normal(size=shape).astype("float32"))
            continue
        mask = RNG.random(shape) < 0.6
        mask[..., 0] = True
        if len(shape) > 1:
            mask[(0,) * (len(shape) - 2) + (-1,)] = False
        values.append(mask)
    return values


@pytest.fixture(scope="module")
def differentiated():
    return before_and_after(
        {
            case: (module, [p.name for p in module["main"].params if str(p.ty.dtype) == "float32"])
            for case, ((module, _), *_) in FUSED.items()
        }
    )


@pytest.mark.parametrize("case", FUSED)
def test_fused_attention(case, differentiated):
    (module, shapes), name, causal = FUSED[case]
    fused = FuseAttention()(module)
    relax.analysis.well_formed(fused)
    (call,) = calls(fused["main"], name)
    assert call.attrs.causal_mask == causal
    assert not calls(fused["main"], "softmax")
    assert "R.call_tir" not in fused["main"].script()
    values = [tvm.runtime.tensor(value) for value in drawn(shapes, module)]
    before, after = (to_numpy(differentiated[when, case](*values)) for when in ("before", "after"))
    assert np.isnan(before[0]) == ("infinite" in case)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-4)
    for result, wanted in zip(after[1], before[1], strict=True):
        # Where the loss is NaN, the gradient of keys is NaN too; a selection passes zeros to them.
        assert not np.any(np.isnan(wanted) & ~np.isnan(result))
        if not np.isnan(before[0]):
            np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", LEFT)
def test_others_are_left(case):
    module, _ = LEFT[case]
    tvm.ir.assert_structural_equal(FuseAttention()(module), module)


def test_weights_with_other_uses_are_left():
    params = [tensor(name, (B, H, T, D), "float32") for name in "qkv"]

    def body(bb, q, k, v):
        scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        weights = bb.emit(op.nn.softmax(scores, -1))
        return relax.Tuple([bb.emit(op.matmul(weights, v)), weights])

    module = build(params, body)
    tvm.ir.assert_structural_equal(FuseAttention()(module), module)


def test_permutations_are_joined():
    """Heads that stand behind the positions are permuted for the product, and need no permutation
    for the operator."""
    params = [tensor(name, (B, T, H, D), "float32") for name in "qkv"]

    def body(bb, q, k, v):
        q, v = (bb.emit(op.permute_dims(x, [0, 2, 1, 3])) for x in (q, v))
        turned = bb.emit(op.permute_dims(bb.emit(op.permute_dims(k, [0, 2, 1, 3])), [0, 1, 3, 2]))
        weights = bb.emit(op.nn.softmax(bb.emit(op.matmul(q, turned)), -1))
        return bb.emit(op.matmul(weights, v))

    fused = FuseAttention()(build(params, body))["main"]
    (call,) = calls(fused, "attention")
    assert list(call.args) == list(fused.params)


def test_moves_of_operands_are_omitted():
    fused = FuseAttention()(as_einsum()[0])["main"]
    (call,) = calls(fused, "attention")
    assert list(call.args) == list(fused.params)


def test_functions_that_call_others_are_fused():
    shape = (B, H, T, D)
    bb = relax.BlockBuilder()
    x = tensor("x", shape, "float32")
    with bb.function("halved", [x], private=True):
        with bb.dataflow():
            half = bb.emit_output(op.multiply(x, number(0.5)))
        bb.emit_func_output(half)
    halved = bb.get().get_global_var("halved")
    q, k, v = (tensor(name, shape, "float32") for name in "qkv")
    with bb.function("main", [q, k, v]):
        with bb.dataflow():
            turned = bb.emit(op.permute_dims(bb.emit(halved(k)), [0, 1, 3, 2]))
            weights = bb.emit(op.nn.softmax(bb.emit(op.matmul(q, turned)), -1))
            y = bb.emit_output(op.matmul(weights, v))
        bb.emit_func_output(y)
    fused = FuseAttention()(bb.get())
    relax.analysis.well_formed(fused)
    assert len(calls(fused["main"], "attention")) == 1


def plain(positions, features, *, is_permuted=False, symbolic=False, mask=None):
    """Return the module of an attention whose factors may be permuted, perhaps with a mask."""
    shape = [B, H, N if symbolic else positions, features]
    shape = [shape[i] for i in (0, 2, 1, 3)] if is_permuted else shape
    params = [tensor(name, shape, "float32") for name in "qkv"]

    def body(bb, *factors):
        if is_permuted:
            factors = [bb.emit(op.permute_dims(factor, [0, 2, 1, 3])) for factor in factors]
        q, k, v = factors
        scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        if mask is not None:
            scores = bb.emit(where(LEAST, mask=mask)(bb, scores))
        return op.matmul(bb.emit(op.nn.softmax(scores, -1)), v)

    return build(params, body)


@pytest.mark.parametrize(
    ("case", "stays"),
    [
        (plain(16, 64), True),
        (plain(32, 48), True),
        (plain(17, 25), False),
        (plain(33, 256), False),
        (plain(16, 64, is_permuted=True), False),
        (plain(16, 64, symbolic=True), False),
        (plain(16, 64, mask=np.tri(16, dtype=bool)), False),
        (plain(257, 80), True),
        (plain(257, 80, is_permuted=True), True),
        (plain(256, 80), False),
        (plain(257, 64), False),
        (plain(592, 80), False),
        (plain(257, 80, symbolic=True), False),
        (plain(257, 80, mask=np.tri(257, dtype=bool)), False),
    ],
)
def test_products_that_take_less_time_stay(case, stays):
    assert ("R.nn.attention" not in FuseAttention()(case).script()) == stays
