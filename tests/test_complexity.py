"""What differentiation emits grows linearly with what is differentiated."""

from __future__ import annotations

import pytest
from tvm import relax

import relax_grad  # noqa: F401

OP = relax.op


def bindings(params, body) -> int:
    """The number of bindings of the adjoint of the sum of what ``body(bb, *params)`` returns."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(params)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(OP.sum(bb.emit(body(bb, *params))))
        bb.emit_func_output(loss)
    adjoint = relax.transform.Gradient("main")(bb.get())["main_adjoint"]
    return sum(len(block.bindings) for block in adjoint.body.blocks)


def is_linear(count) -> bool:
    """Tell whether a function of n grows by the same for each of several more."""
    counts = [count(n) for n in (8, 16, 24)]
    return counts[2] - counts[1] == counts[1] - counts[0] > 0


#: Functions of a (4, 4) matrix to a (4, 4) matrix, one for each way in which rules are made.
STEPS = {
    "tanh": OP.tanh,
    "erf": OP.erf,
    "gelu": OP.nn.gelu,
    "multiply": lambda x: OP.multiply(x, x),
    "divide": lambda x: OP.divide(x, relax.const([1.0, 2.0, 3.0, 4.0], "float32")),
    "matmul": lambda x: OP.matmul(x, x),
    "einsum": lambda x: OP.einsum((x, x), "ij,jk->ik"),
    "softmax": lambda x: OP.nn.softmax(x, axis=-1),
    "layer_norm": lambda x: OP.nn.layer_norm(
        x, relax.const([1.0] * 4, "float32"), relax.const([0.0] * 4, "float32"), axes=[-1]
    ),
    "max": lambda x: OP.subtract(x, OP.max(x, axis=1, keepdims=True)),
    "prod": lambda x: OP.add(x, OP.prod(x, axis=1, keepdims=True)),
    "cumprod": lambda x: OP.cumprod(x, axis=1),
    "sort": lambda x: OP.sort(x, axis=1),
    "pad": lambda x: OP.strided_slice(
        OP.nn.pad(x, (1, 1, 1, 1), pad_mode="reflect"), [0, 1], [0, 0], [4, 4]
    ),
    "take": lambda x: OP.take(x, relax.const([3, 0, 0, 1], "int64"), axis=1),
    "scatter": lambda x: OP.scatter_elements(
        x, relax.const([[0, 0, 1, 1]], "int64"), relax.const([[1.0, 2.0, 3.0, 4.0]], "float32")
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_chain(name):
    def chain(n):
        def body(bb, x):
            for _ in range(n):
                x = bb.emit(STEPS[name](x))
            return x

        return bindings([(4, 4)], body)

    assert is_linear(chain)


@pytest.mark.parametrize("name", ["concat", "stack", "meshgrid", "einsum"])
def test_an_operator_of_many_tensors(name):
    def many(n):
        def body(bb, *tensors):
            if name == "concat":
                return OP.concat(tensors)
            if name == "stack":
                return OP.stack(tensors)
            if name == "meshgrid":
                return relax.TupleGetItem(bb.emit(OP.meshgrid(tensors)), 0)
            return OP.einsum(tensors, ",".join(["i"] * n) + "->i")

        return bindings([(2,)] * n, body)

    # A meshgrid of n tensors has n axes and n results: reshaping and summing them is work of its own.
    assert is_linear(many)


def test_many_parts_that_are_put_together_again():
    """The rule of split is one concat; what a part for itself costs is the pass's affair."""

    def parts(n):
        def body(bb, x):
            return OP.concat(bb.emit(OP.split(x, n)))

        return bindings([(48,)], body)

    assert parts(24) == parts(8)
