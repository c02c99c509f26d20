"""Indexing and its gradients become kernels."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from tvm import relax, tirx

import relax_grad
from relax_grad.op.index import gather_elements_backward_data, take_backward
from relax_grad.op.index_nd import gather_nd_backward_data, index_tensor_backward_data

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def module(shape, indices, axis, dtype, mode="fast"):
    result = (*shape[:axis], *indices, *shape[axis + 1 :])
    params = [
        tensor("dy", result, "float32"),
        tensor("x", shape, "float32"),
        tensor("indices", indices, dtype),
    ]
    return build(params, lambda dy, x, i: take_backward(dy, x, i, axis=axis, mode=mode))


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap", "nan"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
def test_embedding(dtype, mode):
    values = [
        RNG.normal(size=(4, 5, 24)).astype("float32"),
        RNG.normal(size=(7, 24)).astype("float32"),
        RNG.integers(-9, 9, (4, 5)).astype(dtype),
    ]
    mod = module((7, 24), (N, 5), 0, dtype, mode)
    check_dispatch(mod, "main", values, ["grad_take_backward_kernel"])


def test_an_inner_axis():
    values = [
        RNG.normal(size=(2, 5, 6)).astype("float32"),
        RNG.normal(size=(2, 3, 6)).astype("float32"),
        RNG.integers(-4, 4, 5),
    ]
    mod = module((2, 3, 6), (5,), 1, "int64")
    check_dispatch(mod, "main", values, ["grad_take_backward_kernel"])


def test_short_rows():
    values = [
        RNG.normal(size=(5, 2)).astype("float32"),
        RNG.normal(size=(4, 2)).astype("float32"),
        RNG.integers(-4, 4, 5),
    ]
    check_dispatch(module((4, 2), (N,), 0, "int64"), "main", values, ["grad_take_backward_kernel"])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_taking_columns(dtype):
    params = [tensor("x", (N, 3, 40), "float32"), tensor("indices", (4, 5), dtype)]
    values = [
        RNG.normal(size=(2, 3, 40)).astype("float32"),
        RNG.integers(-40, 40, (4, 5)).astype(dtype),
    ]
    taken = build(params, lambda x, i: relax.op.take(x, i, axis=2, mode="fast"))
    check_dispatch(taken, "main", values, ["take_kernel"])
    rows = build(params, lambda x, i: relax.op.take(x, i, axis=1))
    assert kernels_in(rows) == []


def test_gathering():
    """The gradients of gathering, where indices read an element several times."""
    dy, shape = tensor("dy", (N, 3, 40), "float32"), (N, 3, 7)
    values = [RNG.normal(size=(2, 3, 40)).astype("float32"), RNG.integers(-9, 9, (2, 3, 40))]
    params = [dy, tensor("indices", (N, 3, 40), "int64")]
    program = build(params, lambda dy, i: gather_elements_backward_data(dy, shape, i, -1))
    check_dispatch(program, "main", values, ["grad_gather_elements_backward_data_kernel"])

    values = [RNG.normal(size=(40, 5)).astype("float32"), RNG.integers(-9, 9, (40, 2))]
    params = [tensor("dy", (N, 5), "float32"), tensor("indices", (N, 2), "int64")]
    program = build(params, lambda dy, i: gather_nd_backward_data(dy, (3, 8, 5), i))
    check_dispatch(program, "main", values, ["grad_gather_nd_backward_data_kernel"])

    values = [values[0], *(values[1].astype("int32")[:, i].copy() for i in range(2))]
    params = [params[0], *(tensor(name, (N,), "int32") for name in ("first", "second"))]
    program = build(params, lambda dy, *i: index_tensor_backward_data(dy, (3, 8, 5), list(i)))
    check_dispatch(program, "main", values, ["grad_index_tensor_backward_data_kernel"])


def test_unsupported_index_operators_have_no_kernel():
    assert kernels_in(module((4, 24), (5,), 0, "uint8")) == []
    params = [tensor("dy", (4, 3, 6), "float32"), tensor("indices", (4, 3, 6), "int64")]
    program = build(params, lambda dy, i: gather_elements_backward_data(dy, (4, 9, 6), i, 1))
    assert kernels_in(program) == []
    program = build(params, lambda dy, i: gather_elements_backward_data(dy, (5, 3, 9), i, 2))
    assert kernels_in(program) == []
    params = [tensor("dy", (4, 3), "float32"), tensor("indices", (4, 3, 1), "int64")]
    program = build(params, lambda dy, i: gather_nd_backward_data(dy, (4, 9), i, 1))
    assert kernels_in(program) == []
    params = [
        tensor("dy", (4, 3), "float32"),
        tensor("first", (4, 1), "int64"),
        tensor("second", (3,), "int64"),
    ]
    program = build(params, lambda dy, *i: index_tensor_backward_data(dy, (5, 9), list(i)))
    assert kernels_in(program) == []


def test_calls_built_before_the_import_are_checked():
    """TVM infers the type of its own operator from the type of the data alone."""
    params = [
        tensor("dy", (2, 4), "float32"),
        tensor("x", (9, 4), "float32"),
        tensor("indices", (5,), "int64"),
    ]
    relax_grad.uninstall()
    try:
        program = build(params, lambda *arguments: take_backward(*arguments, axis=0))
    finally:
        relax_grad.install()
    message = r"take_backward: output_grad must have the shape \(5, 4\)"
    with pytest.raises(ValueError, match=message):
        kernels_in(program)
    with pytest.raises(ValueError, match=message):
        relax.transform.LegalizeOps()(program)
