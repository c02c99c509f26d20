"""The output of differentiation grows linearly with its input."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tvm import relax

import relax_grad

OP = relax.op

#: TVM's pass and ours.
PASSES = {"stock": relax.transform.Gradient, "ours": relax_grad.transform.Gradient}


def bindings(params, body, gradient=relax.transform.Gradient) -> int:
    """Return the number of bindings of the adjoint of the sum of ``body(bb, *params)``."""
    adjoint = gradient("main")(module(params, body))["main_adjoint"]
    return sum(len(block.bindings) for block in adjoint.body.blocks)


def calls(params, body) -> int:
    """Return the number of calls of the package's functions while our pass differentiates the same
    sum."""
    forward = module(params, body)
    package = str(Path(relax_grad.__file__).parent)
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        relax_grad.transform.Gradient("main")(forward)
    finally:
        sys.setprofile(before)
    return count


def module(params, body):
    """Return a module whose function ``main`` returns the sum of ``body(bb, *params)``."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(params)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(OP.sum(bb.emit(body(bb, *params))))
        bb.emit_func_output(loss)
    return bb.get()


def is_linear(count) -> bool:
    """Tell whether a function of n grows by the same positive amount at each step of n."""
    counts = [count(n) for n in (8, 16, 24)]
    return counts[2] - counts[1] == counts[1] - counts[0] > 0


#: Functions from a (4, 4) matrix to a (4, 4) matrix, one for each way to make a rule.
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


def chain_of(name):
    """Return a function of n that chains ``n`` steps of one kind."""

    def chain(n):
        def body(bb, x):
            for _ in range(n):
                x = bb.emit(STEPS[name](x))
            return x

        return [(4, 4)], body

    return chain


@pytest.mark.parametrize("gradient", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("name", STEPS)
def test_a_chain(name, gradient):
    chain = chain_of(name)
    assert is_linear(lambda n: bindings(*chain(n), gradient))


@pytest.mark.parametrize("name", ["tanh", "multiply", "matmul", "layer_norm"])
def test_the_work_of_a_chain(name):
    """The work of our pass, counted in calls of its functions and of the rules."""
    chain = chain_of(name)
    assert is_linear(lambda n: calls(*chain(n)))


def test_the_work_of_a_tuple_whose_elements_are_used_one_by_one():
    """Work and bindings grow linearly in our pass. TVM's pass copies the whole tuple for each
    element."""

    def parts(n):
        def body(bb, x):
            split = bb.emit(OP.split(x, n))
            total = bb.emit(relax.TupleGetItem(split, 0))
            for i in range(1, n):
                total = bb.emit(OP.add(total, bb.emit(relax.TupleGetItem(split, i))))
            return total

        return [(48,)], body

    for n in (8, 16, 24):  # 48 can be divided by each
        assert bindings(*parts(n), PASSES["ours"]) <= bindings(*parts(n))
    assert is_linear(lambda n: bindings(*parts(n), PASSES["ours"]))
    assert is_linear(lambda n: calls(*parts(n)))
    assert not is_linear(lambda n: bindings(*parts(n)))


@pytest.mark.parametrize("gradient", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("name", ["concat", "stack", "meshgrid", "einsum"])
def test_an_operator_of_many_tensors(name, gradient):
    def many(n):
        def body(bb, *tensors):
            if name == "concat":
                return OP.concat(tensors)
            if name == "stack":
                return OP.stack(tensors)
            if name == "meshgrid":
                return relax.TupleGetItem(bb.emit(OP.meshgrid(tensors)), 0)
            return OP.einsum(tensors, ",".join(["i"] * n) + "->i")

        return bindings([(2,)] * n, body, gradient)

    # A meshgrid of n tensors has n axes and n results. Reshaping and summing these is separate
    # work.
    assert is_linear(many)


def test_many_parts_that_are_put_together_again():
    """The rule of split emits one concat for any number of parts. Only the pass can add a cost per
    part."""

    def parts(n):
        def body(bb, x):
            return OP.concat(bb.emit(OP.split(x, n)))

        return bindings([(48,)], body)

    assert parts(24) == parts(8)
