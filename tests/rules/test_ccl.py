"""Gradients of collectives. The workers are threads, and the collectives are written in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from thread_workers import thread_workers
from tvm import relax
from tvm.relax.op import ccl
from tvm.relax.op import grad as backward
from tvm.relax.op.distributed import redistribute_replica_to_shard
from tvm.script import from_source
from tvm_ffi import structural_equal

from relax_grad import GradientError


@pytest.fixture
def session():
    """Yield a maker of sessions, whose collectives replace the runtime's until the test ends."""
    with thread_workers() as start:
        yield start


def gradient_module(function, *types):
    """Return the gradient of ``sum(weight * function(x))``, and the type of the result."""
    params = [relax.Var(f"x{i}", ty) for i, ty in enumerate(types)]
    bb = relax.BlockBuilder()
    out_type = bb.normalize(function(*params)).ty
    weight = relax.Var("weight", out_type)
    bb = relax.BlockBuilder()
    with bb.function("main", [*params, weight]):
        with bb.dataflow():
            result = bb.emit(function(*params))
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(result, weight))))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main", params)(bb.get()), out_type


def check(workers, function, shape, seed=0):
    """Compare the gradient on all workers with differences of the sum of their functions."""
    module, out_type = gradient_module(function, relax.TensorType(shape, "float64"))
    executable = tvm.compile(module, target=TARGET)
    rng = np.random.default_rng(seed)
    out_shape = [int(dim) for dim in out_type.shape.values]
    xs = [rng.normal(size=shape) for _ in range(workers.count)]
    weights = [rng.normal(size=out_shape) for _ in xs]

    def total(points):
        losses = workers.run(executable, "main", list(zip(points, weights, strict=True)))
        return sum(float(loss.numpy()) for loss in losses)

    results = workers.run(executable, "main_adjoint", list(zip(xs, weights, strict=True)))
    grads = [result[1][0].numpy() for result in results]
    for _ in range(3):
        along = [rng.normal(size=shape) for _ in xs]
        step = 1e-4
        ahead, behind = (
            total([x + sign * step * d for x, d in zip(xs, along, strict=True)]) for sign in (1, -1)
        )
        slope = sum((g * d).sum() for g, d in zip(grads, along, strict=True))
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


FUNCTIONS = {
    **{
        f"allreduce {kind}": (lambda x, kind=kind: ccl.allreduce(x, kind), (2, 3))
        for kind in ("sum", "avg", "min", "max")
    },
    "allreduce of all groups": (lambda x: ccl.allreduce(x, "sum", in_group=False), (2,)),
    "allgather": (lambda x: ccl.allgather(x, 2), (2, 3)),
    "broadcast": (lambda x: ccl.broadcast_from_worker0(x), (2, 3)),
    "scatter": (lambda x: ccl.scatter_from_worker0(x, 2, 0), (4, 3)),
    "scatter along another axis": (lambda x: ccl.scatter_from_worker0(x, 2, 1), (3, 4, 2)),
    "replica to shard": (lambda x: redistribute_replica_to_shard(x, 2, 1), (3, 4)),
    "allgather_backward_x": (lambda g: backward.allgather_backward_x(g, (2, 3), 2), (4, 3)),
    "broadcast_backward_x": (lambda g: backward.broadcast_from_worker0_backward_x(g), (2,)),
    "scatter_backward_x": (
        lambda g: backward.scatter_from_worker0_backward_x(g, (3, 4), 2, 1),
        (3, 2),
    ),
    "replica_to_shard_backward_input": (
        lambda g: backward.redistribute_replica_to_shard_backward_input(g, (4, 3), 2, 0),
        (2, 3),
    ),
}


def test_copies_and_sums_of_tensor_parallelism_are_transposes():
    """Each is the other's gradient, and so are the gradients of gradients."""
    pairs = {"copy_to_tensor_parallel": "reduce_from_tensor_parallel"}
    for name, other in {**pairs, **{v: k for k, v in pairs.items()}}.items():
        kind = relax.TensorType((2, 3), "float32")
        module, _ = gradient_module(getattr(backward, name), kind)
        text = module["main_adjoint"].script()
        assert text.count(f"R.grad.{name}(") == 1
        assert text.count(f"R.grad.{other}(") == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_workers(session, name):
    check(session(2), *FUNCTIONS[name])


@pytest.mark.parametrize("name", ["allreduce max", "allreduce of all groups", "allgather"])
def test_two_groups(session, name):
    check(session(4, group_size=2), *FUNCTIONS[name])


def test_allgather_of_all_groups(session):
    check(session(4, group_size=2), lambda x: ccl.allgather(x, 4, in_group=False), (1, 2))


def test_equal_extrema_share_the_gradient(session):
    workers = session(3)
    module, _ = gradient_module(
        lambda x: ccl.allreduce(x, "max"), relax.TensorType((2,), "float32")
    )
    xs = [np.array(x, "float32") for x in ([1, 5], [1, 2], [0, 5])]
    weights = [np.array(w, "float32") for w in ([1, 2], [3, 4], [5, 6])]
    results = workers.run(
        tvm.compile(module, target=TARGET), "main_adjoint", list(zip(xs, weights, strict=True))
    )
    grads = [result[1][0].numpy() for result in results]
    np.testing.assert_array_equal(grads, [[4.5, 6], [4.5, 0], [0, 6]])


def test_symbolic_shapes():
    n = tvm.tirx.Var("n", "int64")
    x = relax.TensorType((n, 4), "float32")
    for function in (
        lambda x: ccl.allgather(x, 2),
        lambda x: ccl.scatter_from_worker0(x, 2, 1),
        lambda x: ccl.allreduce(x, "max"),
    ):
        module, _ = gradient_module(function, x)
        (grad,) = module["main_adjoint"].ret_ty.fields[1].fields
        assert structural_equal(list(grad.shape.values), list(x.shape.values), True)
        tvm.compile(module, target=TARGET)


def test_product_is_refused():
    with pytest.raises(GradientError, match=r"relax\.ccl\.allreduce.*not for 'prod'"):
        gradient_module(lambda x: ccl.allreduce(x, "prod"), relax.TensorType((2,), "float32"))


def test_annotate_sharding_places_the_gradient_alike():
    mesh = relax.distributed.DeviceMesh((2,), tvm.ir.Range(0, 2))
    placement = relax.distributed.Placement.from_text("S[0]")
    module, _ = gradient_module(
        lambda x: relax.op.distributed.annotate_sharding(x, mesh, placement),
        relax.TensorType((4,), "float32"),
    )
    script = module["main_adjoint"].script()
    assert script.count("R.dist.annotate_sharding") == 2


BACKWARD = {
    "allgather_backward_x": (lambda g: backward.allgather_backward_x(g, (2, 3), 2, False), (4, 3)),
    "broadcast_from_worker0_backward_x": (backward.broadcast_from_worker0_backward_x, (2,)),
    "scatter_from_worker0_backward_x": (
        lambda g: backward.scatter_from_worker0_backward_x(g, (3, 4), 2, 1),
        (3, 2),
    ),
    "redistribute_replica_to_shard_backward_input": (
        lambda g: backward.redistribute_replica_to_shard_backward_input(g, (4, 3), 2, 0),
        (2, 3),
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_round_trip(name):
    function, shape = BACKWARD[name]
    grad = relax.Var("g", relax.TensorType(shape, "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [grad]):
        bb.emit_func_output(bb.emit(function(grad)))
    module = bb.get()
    assert f"R.grad.{name}" in module.script()
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize("name", [name for name in BACKWARD if name[:9] != "broadcast"])
def test_backward_operators_refuse_mismatched_gradients(name):
    function, _ = BACKWARD[name]
    bb = relax.BlockBuilder()
    grad = relax.Var("g", relax.TensorType((5, 5), "float32"))
    with pytest.raises(ValueError, match=rf"relax\.grad\.{name}: output_grad must have"):
        bb.normalize(function(grad))
    flat = relax.Var("g", relax.ShapeType([5, 5]))
    with pytest.raises(TypeError, match="output_grad must be a tensor"):
        bb.normalize(function(flat))
