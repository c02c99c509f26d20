"""Dropout by the generator, alone and of the weights of attention: numbers, types, TVMScript."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from philox_numbers import expected_bits
from programs import build, tensor
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.frontend import random

N = tirx.Var("n", "int64")
SCALARS = [tensor(name, (), "int64") for name in ("seed", "stream")]
Q, K, V = (
    tensor(name, (N, *shape), "float32")
    for name, shape in (("q", (3, 4, 5)), ("k", (7, 2, 5)), ("v", (7, 2, 6)))
)


@pytest.mark.parametrize("pipeline", ["relax_grad", "default"])
@pytest.mark.parametrize("rate", [0.3, 1.0, 0.0])
def test_the_elements_are_those_that_random_dropout_drops(rate, pipeline):
    shapes = [(N, 37), (2, 32, 2), (), (0, 3)]
    params = [*SCALARS[:1], *(tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes))]

    def body(bb, seed, *tensors):
        stream = relax.const(-2, "int64")
        mine = [bb.emit(backward.seeded_dropout(x, seed, stream, rate)) for x in tensors]
        return relax.Tuple([*mine, *(random.dropout(bb, seed, -2, x, rate)[0] for x in tensors)])

    module = build(params, body)
    target = relax_grad.target.host() if pipeline == "relax_grad" else TARGET
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())
    values = [np.random.default_rng(0).normal(size=(5, *shape[1:])) for shape in shapes[:1]]
    values += [np.random.default_rng(1).normal(size=shape) for shape in shapes[1:]]
    values = [tvm.runtime.tensor(np.asarray(value, "float32")) for value in values]
    results = [
        result.numpy() for result in machine["main"](tvm.runtime.tensor(np.array(9)), *values)
    ]
    for mine, wanted in zip(results[:4], results[4:], strict=True):
        np.testing.assert_allclose(mine, wanted, 1e-6)
    kept = expected_bits(results[0].size, 9, -2) < round((1 - rate) * 2**32)
    np.testing.assert_array_equal(results[0].ravel() != 0, kept)


@pytest.mark.parametrize("pipeline", ["relax_grad", "default"])
def test_parts_of_the_heads_and_the_batch_drop_the_weights_of_the_whole(pipeline):
    shapes = {"q": (N, 5, 6, 4), "k": (N, 7, 6, 4), "v": (N, 7, 6, 3), "grad": (N, 5, 6, 3)}
    params = [*SCALARS[:1], *(tensor(name, shape, "float32") for name, shape in shapes.items())]
    parts = [(2, 0, 2, 0), (2, 2, 4, 2), (2, 4, 6, 4), (0, 1, 3, 6)]

    def body(bb, seed, *tensors):
        def results(tensors, stream):
            *operands, grad = tensors
            operands += [seed, relax.const(np.array(stream), "int64"), 0.4]
            y = bb.emit(backward.attention_dropout(*operands))
            grads = bb.emit(backward.attention_dropout_backward(grad, y, *operands))
            return relax.Tuple([y, *(bb.emit(relax.TupleGetItem(grads, i)) for i in range(3))])

        def cut(axis, begin, end):
            return [bb.emit(op.strided_slice(x, [axis], [begin], [end])) for x in tensors]

        return relax.Tuple(
            [results(tensors, 11)]
            + [results(cut(*where), [11, first, 6]) for *where, first in parts]
        )

    module = build(params, body)
    target = relax_grad.target.host() if pipeline == "relax_grad" else TARGET
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, *shape[1:])).astype("float32") for shape in shapes.values()]
    whole, *others = machine["main"](*map(tvm.runtime.tensor, (np.array(9), *values)))
    for (axis, begin, end, _), results in zip(parts, others, strict=True):
        for own, wanted in zip(results, whole, strict=True):
            wanted = wanted.numpy().take(range(begin, end), axis)
            np.testing.assert_allclose(own.numpy(), wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("bias", [[], [tensor("bias", (1, 1, 3, 7), "float32")]])
@pytest.mark.parametrize("attrs", [{}, {"causal_mask": "TopLeft", "window_size": 3, "scale": 0.5}])
def test_round_trip(attrs, bias):
    result = tensor("result", (N, 3, 4, 6), "float32")
    params = [result, Q, K, V, *SCALARS, *bias]

    def body(bb, result, q, k, v, seed, stream, *bias):
        operands = [q, k, v, seed, stream, 0.1, *bias]
        y = bb.emit(backward.attention_dropout(*operands, **attrs))
        assert structural_equal(y.ty, result.ty)
        grads = bb.emit(backward.attention_dropout_backward(result, y, *operands, **attrs))
        assert structural_equal(grads.ty, relax.TupleType([q.ty, k.ty, v.ty]))
        return grads

    module = build(params, body)
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ([Q, K, V, *SCALARS, 1.5], ValueError, "rate must be between 0 and 1, but it is 1.5"),
        ([Q, K, V, *SCALARS, float("nan")], ValueError, "rate must be between 0 and 1"),
        ([Q, K, V, *SCALARS, "0.1"], TypeError, "rate must be a number or an expression"),
        ([Q, K, V, *SCALARS, Q], TypeError, "rate must be a constant number"),
        ([Q, K, V, Q, SCALARS[1], 0.1], ValueError, r"seed must be an int64 tensor of shape \(\)"),
        ([Q, K, V, SCALARS[0], tensor("s", (), "int32"), 0.1], ValueError, "stream must be an int"),
        (
            [Q, K, V, SCALARS[0], tensor("s", (2,), "int64"), 0.1],
            ValueError,
            r"or \(3,\) for a part",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        relax.BlockBuilder().normalize(backward.attention_dropout(*arguments))


def test_a_part_without_heads_is_refused():
    operands = tensor("x", (3, 4), "float32"), SCALARS[0], tensor("stream", (3,), "int64")
    with pytest.raises(ValueError, match="data must have the 4 dimensions"):
        relax.BlockBuilder().normalize(backward.seeded_dropout(*operands, 0.5))


def test_data_without_fractions_is_refused():
    with pytest.raises(ValueError, match="data must be of floating-point numbers"):
        relax.BlockBuilder().normalize(
            backward.seeded_dropout(tensor("x", (3,), "int32"), *SCALARS, 0.5)
        )
