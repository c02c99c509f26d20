"""Adjoints divided into a forward and a backward function: same gradients, and no residual more
than needed."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import relax_grad
from relax_grad.autodiff.split import split
from relax_grad.errors import GradientError

op = relax.op


def function(build, *shapes):
    """Return a module whose function ``main`` is an expression of tensors of float32."""
    params = [
        relax.Var(name, relax.TensorType(s, "float32"))
        for name, s in zip("xyz", shapes, strict=False)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(build(bb, *params))
        bb.emit_func_output(result)
    return bb.get()


def divided(mod, wrt=None, cotangents=1):
    joint = relax_grad.vjp(mod, "main", wrt)
    return joint, split(joint, "main_vjp", cotangents, "forward", "backward")


def names(function):
    return [param.name for param in function.params]


def operators(function):
    names_found = []
    relax.analysis.post_order_visit(
        function.body,
        lambda e: (
            names_found.append(e.op.name)
            if isinstance(e, relax.Call) and hasattr(e.op, "name")
            else None
        ),
    )
    return names_found


def compare(joint, parts, *arrays):
    """Assert that the two functions together give the result and the gradients of the joint one."""
    values = [tvm.runtime.tensor(np.asarray(array, "float32")) for array in arrays]
    count = len(parts.module["forward"].params)
    before = tvm.compile(joint, "llvm"), tvm.compile(parts.module, "llvm")
    whole, divided = (relax.VirtualMachine(executable, tvm.cpu()) for executable in before)
    result, gradients = whole["main_vjp"](*values)
    again, residuals = divided["forward"](*values[:count])
    leaves = [again] if isinstance(again, tvm.runtime.Tensor) else list(again)
    grads = divided["backward"](
        *(values[i] for i in parts.arguments),
        *(leaves[i] for i in parts.results),
        *([residuals] if parts.residuals else []),
        *values[count:],
    )
    wanted = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    for own, other in zip([*leaves, *grads], [*wanted, *gradients], strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-6)


rng = np.random.default_rng(0)


def test_layers_save_values_that_are_no_arguments():
    def build(bb, x, y, z):
        hidden = bb.emit(op.nn.relu(bb.emit(op.matmul(x, bb.emit(op.permute_dims(y))))))
        return op.matmul(hidden, z)

    joint, parts = divided(function(build, (3, 4), (5, 4), (5, 2)))
    # relu's result is for the second product and decides its own gradient's mask.
    assert parts.residuals <= 2
    assert parts.arguments == [0, 1, 2]
    compare(joint, parts, *(rng.normal(size=s) for s in ((3, 4), (5, 4), (5, 2), (3, 2))))


def test_a_result_is_no_residual():
    joint, parts = divided(function(lambda bb, x: op.exp(x), (4,)))
    assert (parts.arguments, parts.results, parts.residuals) == ([], [0], 0)
    assert names(parts.module["backward"]) == ["result0", "cotangent0"]
    compare(joint, parts, rng.normal(size=4), rng.normal(size=4))


def test_elementwise_factors_are_computed_in_the_backward_pass():
    joint, parts = divided(function(lambda bb, x: op.sin(x), (4,)))
    assert (parts.arguments, parts.residuals) == ([0], 0)
    assert "relax.cos" in operators(parts.module["backward"])
    compare(joint, parts, rng.normal(size=4), rng.normal(size=4))


def test_a_mask_is_saved_in_the_place_of_its_operand():
    def build(bb, x, y):
        return op.nn.relu(bb.emit(op.matmul(x, y)))

    joint, parts = divided(function(build, (8, 4), (4, 8)), "y")
    assert parts.arguments == [0]
    assert [str(field.dtype) for field in parts.module["forward"].ret_ty.fields[1].fields] == [
        "bool"
    ]
    compare(joint, parts, *(rng.normal(size=s) for s in ((8, 4), (4, 8), (8, 8))))


def test_statistics_are_computed_in_the_forward_pass():
    def build(bb, x, y, z):
        return op.nn.layer_norm(x, y, z, axes=[-1])

    joint, parts = divided(function(build, (4, 6), (6,), (6,)))
    assert "relax.grad.layer_norm_statistics" in operators(parts.module["forward"])
    assert "relax.grad.layer_norm_statistics" not in operators(parts.module["backward"])
    compare(joint, parts, *(rng.normal(size=s) for s in ((4, 6), (6,), (6,), (4, 6))))


def test_checkpointed_sections_are_computed_in_the_backward_pass():
    def build(bb, x, y):
        def section(bb, x, y):
            return bb.emit(op.exp(bb.emit(op.matmul(bb.emit(op.exp(bb.emit(op.matmul(x, y)))), y))))

        start = bb.emit(op.grad.start_checkpoint(x))
        return op.matmul(bb.emit(op.grad.end_checkpoint(section(bb, start, y))), y)

    joint, parts = divided(function(build, (3, 3), (3, 3)))
    plain = function(lambda bb, x, y: op.matmul(x, y), (3, 3), (3, 3))
    assert operators(parts.module["forward"]).count("relax.matmul") == 3
    assert operators(parts.module["backward"]).count("relax.exp") >= 1
    assert parts.residuals == 0
    assert divided(plain)[1].residuals == 0
    compare(joint, parts, *(rng.normal(size=(3, 3)) / 3 for _ in range(3)))


def test_symbolic_extents_have_a_definition():
    n = tirx.Var("n", "int64")

    def build(bb, x):
        return op.sum(bb.emit(op.reshape(x, (n * 4,))))

    joint, parts = divided(function(build, (n, 4)))
    assert parts.arguments == [0]  # the shape of the gradient
    compare(joint, parts, rng.normal(size=(3, 4)), rng.normal(size=()))


def test_tuples_cross_as_their_tensors():
    def build(bb, x, y):
        parts = bb.emit(op.split(bb.emit(op.matmul(x, y)), 2, 1))
        first, other = (bb.emit(relax.TupleGetItem(parts, i)) for i in range(2))
        return relax.Tuple([bb.emit(op.multiply(first, other)), bb.emit(op.exp(first))])

    joint, parts = divided(function(build, (3, 4), (4, 6)), cotangents=2)
    assert parts.results == [1]
    compare(joint, parts, *(rng.normal(size=s) for s in ((3, 4), (4, 6), (3, 3), (3, 3))))


def test_writes_are_refused():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    c = relax.Var("c", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, c]):
        with bb.dataflow():
            y = bb.emit(op.add(x, x))
            z = bb.emit(op.call_inplace_packed("write", y, inplace_indices=[0], ty_args=x.ty))
            result = bb.emit_output(relax.Tuple([z, relax.Tuple([c])]))
        bb.emit_func_output(result)
    with pytest.raises(GradientError, match="write to their arguments"):
        split(bb.get(), "main", 1, "forward", "backward")
