"""Collectives of two workers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sessions import scatter, values
from tvm import relax

RNG = np.random.default_rng(0)
REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "min": lambda x: x.min(0),
    "max": lambda x: x.max(0),
    "avg": lambda x: x.mean(0),
}


@pytest.fixture(params=["pair", "gloo_pair"], ids=["memory", "gloo"])
def workers(request):
    """Return two workers of one machine, which share memory or use gloo."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_allreduce(workers, kind, dtype):
    inputs = RNG.integers(1, 9, (2, 3, 2)).astype(dtype)
    result = workers.empty((3, 2), dtype)
    workers.allreduce(scatter(workers, list(inputs)), result, kind)
    wanted = REDUCTIONS[kind](inputs.astype("float64")).astype(dtype)  # integers: towards 0
    for array in values(workers, result):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_reduced_in_float32(workers, dtype):
    """The sum of float16 would overflow, and the mean does not."""
    import ml_dtypes

    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    inputs = np.array([[40000.0, 1.0], [50000.0, 2.0**-9]]).astype(kind)
    result = workers.empty((2,), dtype)
    workers.allreduce(scatter(workers, list(inputs)), result, "avg")
    wanted = inputs.astype("float32").mean(0).astype(kind)
    for array in values(workers, result):
        assert np.array_equal(array, wanted)


def test_prod_of_negative_numbers_and_nan(workers):
    inputs = [np.array([-2.0, np.nan], "float32"), np.array([3.0, 1.0], "float32")]
    result = workers.empty((2,), "float32")
    workers.allreduce(scatter(workers, inputs), result, "prod")
    assert [array.tolist()[0] for array in values(workers, result)] == [-6.0, -6.0]
    assert all(np.isnan(array[1]) for array in values(workers, result))


def test_gather_and_scatter(workers):
    inputs = RNG.normal(size=(2, 3)).astype("float32")
    whole = workers.empty((2, 3), "float32")
    workers.allgather(scatter(workers, list(inputs)), whole)
    for array in values(workers, whole):
        np.testing.assert_array_equal(array, inputs)
    at_first = workers.empty((2, 3), "float32", None, True, False)
    workers.gather_to_worker0(scatter(workers, list(inputs)), at_first)
    np.testing.assert_array_equal(workers.debug(at_first, 0).numpy(), inputs)
    part = workers.empty((3,), "float32")
    workers.scatter_from_worker0(at_first, part)
    for array, wanted in zip(values(workers, part), inputs, strict=True):
        np.testing.assert_array_equal(array, wanted)
    for array in values(workers, workers.broadcast(inputs)):
        np.testing.assert_array_equal(array, inputs)


def test_send_and_recv(workers):
    """Only one of two workers calls each function: the branch is in a task."""
    workers.import_python_module("worker_tasks")
    assert workers.run("send_and_recv", count=5) == [[5.0] * 5, [5.0] * 5]


def test_in_compiled_functions(workers, tmp_path):
    """The operators of Relax, with the gradients of their rules."""
    import relax_grad

    x = relax.Var("x", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            total = bb.emit(relax.op.ccl.allreduce(relax.op.multiply(x, x), "sum", False))
            whole = bb.emit(relax.op.ccl.allgather(total, 2, False))
            loss = bb.emit_output(relax.op.sum(relax.op.multiply(whole, whole)))
        bb.emit_func_output(loss)
    module = relax_grad.value_and_grad(bb.get(), wrt="x")
    executable = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    executable.export_library(str(tmp_path / "main.so"))
    inputs = RNG.normal(size=(2, 4)).astype("float32")
    loaded = workers.load_vm_module(str(tmp_path / "main.so"), tvm.cpu())
    results = loaded["main_adjoint"](scatter(workers, list(inputs)))
    workers.synchronize()
    total = (inputs.astype("float64") ** 2).sum(0)
    for rank in range(2):
        loss, (gradient,) = results.debug_get_from_remote(rank)
        np.testing.assert_allclose(loss.numpy(), 2 * (total**2).sum(), 1e-5)
        # The function that is differentiated is the sum of those of both workers.
        np.testing.assert_allclose(gradient.numpy(), 16 * total * inputs[rank], 1e-5)
