"""Gradients of linear algebra: random shapes and subscripts, out_dtype, and the emitted
operators."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax
from tvm.relax.op import _op_gradient as stock
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal

from relax_grad import GradientError
from relax_grad.registry import declarations
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch
from relax_grad.testing._program import numpy_dtype

(MATMUL,) = (
    d.function for d in declarations() if (d.op_name, d.attr) == ("relax.matmul", "FPrimalGradient")
)


@st.composite
def matmuls(draw):
    extent = st.integers(0, 3)
    batch = draw(st.lists(extent, max_size=2))
    n, k, m = draw(extent), draw(extent), draw(extent)
    shapes = []
    for matrix in ((n, k), (k, m)):
        own = [1 if draw(st.booleans()) else length for length in batch]
        shapes.append((*own[draw(st.integers(0, len(own))) :], *matrix))
    if draw(st.integers(0, 3)) == 0:
        shapes[0] = (k,)
    if draw(st.integers(0, 3)) == 0:
        shapes[1] = (k,)
    return shapes


def matmul_case(shapes):
    rng = np.random.default_rng(0)
    return TorchCase(
        "relax.matmul",
        [rng.normal(size=shape) for shape in shapes],
        lambda torch, x1, x2: x1 @ x2,
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(shapes=matmuls())
def test_matmul(torch, shapes):
    check_many_against_torch([matmul_case(shapes)])


@pytest.mark.slow
@at_length(200)
@given(batches(matmuls()))
def test_matmul_at_length(torch, batch):
    check_many_against_torch(list(map(matmul_case, batch)), target=TARGET)


@st.composite
def einsums(draw):
    extents = {letter: draw(st.integers(1, 3)) for letter in "abCd"}
    hidden = draw(st.lists(st.integers(1, 2), max_size=2))
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 3))):
        letters = draw(st.lists(st.sampled_from("abCd"), max_size=3))
        shape = [
            1 if letters.count(letter) == 1 and draw(st.integers(0, 4)) == 0 else extents[letter]
            for letter in letters
        ]
        term = "".join(letters)
        if draw(st.booleans()):
            at = draw(st.integers(0, len(letters)))
            own = hidden[draw(st.integers(0, len(hidden))) :]
            term = term[:at] + "..." + term[at:]
            shape[at:at] = own
        terms.append(term)
        shapes.append(tuple(shape))
    subscripts = ",".join(terms)
    if draw(st.booleans()):
        kept = [letter for letter in "dabC" if letter in subscripts and draw(st.booleans())]
        subscripts += "->" + "".join(kept) + "..." * ("..." in subscripts)
    return subscripts, shapes


def einsum_case(case):
    subscripts, shapes = case
    rng = np.random.default_rng(0)
    return TorchCase(
        "relax.einsum",
        [tuple(np.asarray(rng.normal(size=shape)) for shape in shapes)],
        lambda torch, operands: torch.einsum(subscripts, *operands),
        {"subscripts": subscripts},
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=einsums())
def test_einsum(torch, case):
    check_many_against_torch([einsum_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(einsums()))
def test_einsum_at_length(torch, batch):
    check_many_against_torch(list(map(einsum_case, batch)), target=TARGET)


def test_einsum_that_sums_over_an_ellipsis():
    rng = np.random.default_rng(0)
    check_gradients(
        "relax.einsum", [(rng.normal(size=(2, 3)), rng.normal(size=(2,)))], subscripts="i...,i->i"
    )


def test_an_empty_symbolic_batch():
    """The gradient of an operand that all elements of an empty batch share is an empty sum."""
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 2, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3, 4), "float32"))
    for function in (
        relax.op.matmul,
        lambda x, w: relax.op.einsum((x, w), "nij,jk->nik"),
    ):
        values = [np.ones(shape, "float32") for shape in ((0, 2, 3), (3, 4))]
        grads = run(gradient_of(function, x, w), *values)
        np.testing.assert_array_equal(grads[1], np.zeros((3, 4)))


def test_einsum_refuses_extents_that_may_differ():
    n, m = (tvm.tirx.Var(name, "int64") for name in "nm")
    x1, x2 = (relax.Var("x", relax.TensorType((dim,), "float32")) for dim in (n, m))
    with pytest.raises(GradientError, match="n and m of one subscript must be known to be equal"):
        gradient_of(lambda x1, x2: relax.op.einsum((x1, x2), "i,i->"), x1, x2)


def gradient_of(function, *params):
    """Return the gradient module of the sum of a function, and its script."""
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit(function(*params))
            out = bb.emit_output(relax.op.sum(out) if out.ty.ndim else out)
        bb.emit_func_output(out)
    return relax.transform.Gradient("main", list(params))(bb.get())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape1", "shape2"),
    [((2, 3), (3, 2)), ((3,), (3,)), ((2, 2, 3), (3, 2)), ((3,), (2, 3, 2)), ((2, 2, 3), (3,))],
)
def test_out_dtype(dtype, shape1, shape2):
    """Each gradient has the dtype of its argument, whatever the dtype of the result."""
    rng = np.random.default_rng(0)
    check_gradients(
        lambda x1, x2: relax.op.matmul(x1, x2, out_dtype="float32"),
        [rng.normal(size=shape).astype(numpy_dtype(dtype)) for shape in (shape1, shape2)],
    )


def run(module, *values):
    """Run a gradient module, and return the gradients."""
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    results = machine["main_adjoint"](*map(tvm.runtime.tensor, values))
    return [grad.numpy() for grad in results[1]]


def run_gradient(function, *values):
    params = [
        relax.Var(f"x{i}", relax.TensorType(value.shape, value.dtype.name))
        for i, value in enumerate(values)
    ]
    return run(gradient_of(function, *params), *values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        relax.op.matmul,
        lambda x, w: relax.op.einsum((x, w), "nk,km->nm"),
        lambda x, w: relax.op.matmul(relax.op.expand_dims(x, [0, 2]), w),
    ],
)
def test_half_precision_accumulates_in_float32(function, dtype):
    """A sum of ones stops at 2048 in float16, and at 256 in bfloat16."""
    count = 2560

    def of_half(x, w):
        product = function(relax.op.astype(x, dtype), relax.op.astype(w, dtype))
        return relax.op.astype(product, "float32")

    _, slope = run_gradient(of_half, np.ones((count, 1), "float32"), np.ones((1, 1), "float32"))
    np.testing.assert_array_equal(slope, [[count]])


def test_outer_in_half_precision():
    _, slope = run_gradient(relax.op.outer, np.ones(2560, "float16"), np.ones(1, "float16"))
    np.testing.assert_array_equal(slope, [2560])


@pytest.mark.parametrize(("shape1", "shape2"), [((2, 3), (3, 4)), ((2, 3, 4), (2, 4, 3))])
def test_static_float32_stays_as_tvm_has_it(partials_of, shape1, shape2):
    types = [relax.TensorType(shape, "float32") for shape in (shape1, shape2)]
    partials, expected = (
        partials_of(relax.op.matmul, rule, types)
        for rule in (MATMUL.__wrapped__, stock.matmul_grad)
    )
    assert structural_equal(partials, expected)


@pytest.mark.parametrize("batch", [4, tvm.tirx.Var("n", "int64")])
def test_products_of_a_batch_are_not_stored(batch):
    """No tensor of the gradient of a linear layer is larger than its data or its result."""
    x = relax.Var("x", relax.TensorType((batch, 8, 2), "float32"))
    w = relax.Var("w", relax.TensorType((2, 3), "float32"))
    module = gradient_of(relax.op.matmul, x, w)
    shapes = [
        list(binding.var.ty.shape.values)
        for block in module["main_adjoint"].body.blocks
        for binding in block.bindings
        if isinstance(binding.var.ty, relax.TensorType)
    ]
    assert not any(len(shape) == 3 and [int(d) for d in shape[1:]] == [2, 3] for shape in shapes)


def test_einsum_of_a_tuple_variable():
    x = relax.Var("x", relax.TupleType([relax.TensorType((2,), "float32")] * 2))
    module = gradient_of(lambda x: relax.op.einsum(x, "i,i->"), x)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    values = [np.array(v, "float32") for v in ([1, 2], [3, 4])]
    (grads,) = machine["main_adjoint"](tuple(map(tvm.runtime.tensor, values)))[1]
    for slope, expected in zip(grads, reversed(values), strict=True):
        np.testing.assert_array_equal(slope.numpy(), expected)


def test_integers_have_no_gradient():
    i = relax.const(np.ones((2, 2), "int32"))

    def function(x):
        products = [
            relax.op.matmul(i, i),
            relax.op.einsum((i, i), "ij,jk->ik"),
            relax.op.outer(relax.const(np.ones(2, "int32")), relax.const(np.ones(2, "int32"))),
        ]
        for product in products:
            x = relax.op.multiply(x, relax.op.astype(product, "float32"))
        return x

    (slope,) = run_gradient(function, np.ones((2, 2), "float32"))
    np.testing.assert_array_equal(slope, np.full((2, 2), 4.0))


def test_matmul_of_floats_by_integers():
    weights = relax.const(np.array([[1, 2], [3, 4]], "int8"))
    (slope,) = run_gradient(
        lambda x: relax.op.matmul(x, weights, out_dtype="float32"), np.ones((1, 2), "float16")
    )
    assert slope.dtype == "float16"
    np.testing.assert_array_equal(slope, [[3, 7]])


def test_backward_operator_round_trip():
    grad = relax.Var("g", relax.TensorType((3, 2), "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [grad]):
        bb.emit_func_output(bb.emit(backward.einsum_backward_operand(grad, (2, 2, 3), "iij->ji")))
    module = bb.get()
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)
