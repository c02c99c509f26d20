"""The guarantees of relax.transform.Gradient hold after the import too, on graphs with our
operators."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.op import grad as relax_op_grad

import relax_grad  # noqa: F401
from relax_grad.errors import GradientError

X = (2, 3, 6, 6)
W = (4, 3, 3, 3)


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def function(params, body):
    """Return a module whose ``main`` has one dataflow block: ``body(bb, *params)`` returns its
    result(s)."""
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = body(bb, *params)
            if isinstance(result, tuple):
                outputs = [bb.emit_output(value) for value in result]
                output = relax.Tuple(outputs)
            else:
                output = bb.emit_output(result)
        bb.emit_func_output(output)
    return bb.get()


def conv_loss(bb, x, w):
    return relax.op.sum(bb.emit(relax.op.nn.conv2d(x, w)))


def conv_module():
    return function([tensor("x", X), tensor("w", W)], conv_loss)


def run(module, *values, name="main_adjoint"):
    vm = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return vm[name](*(tvm.runtime.tensor(value) for value in values))


def values(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def operators(func):
    """Return the operators that a function's bindings call, in order."""
    return [
        binding.value.op.name
        for block in func.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


def test_contract_of_the_adjoint():
    module = relax.transform.Gradient("main")(conv_module())
    adjoint = module["main_adjoint"]
    assert adjoint.attrs["global_symbol"] == "main_adjoint"
    assert relax.analysis.well_formed(module) is not False  # raises, or says so in 0.26
    loss, (x_grad, w_grad) = adjoint.ret_ty.fields[0], adjoint.ret_ty.fields[1].fields
    assert loss.ndim == 0
    assert [int(d) for d in x_grad.shape] == list(X)
    assert [int(d) for d in w_grad.shape] == list(W)
    x, w = values(X, W)
    result = run(module, x, w)
    np.testing.assert_allclose(
        result[0].numpy(), run(conv_module(), x, w, name="main").numpy(), rtol=1e-5
    )


def test_conv2d_emits_the_two_backward_operators_and_nothing_else():
    module = relax.transform.Gradient("main")(conv_module())
    assert operators(module["main_adjoint"]) == [
        "relax.nn.conv2d",
        "relax.sum",
        "relax.ones",
        "relax.broadcast_to",
        "relax.grad.conv2d_backward_data",
        "relax.grad.conv2d_backward_weight",
    ]


def test_require_grads_drops_other_gradients():
    module = conv_module()
    w = module["main"].params[1]
    differentiated = relax.transform.Gradient("main", require_grads=w)(module)
    emitted = operators(differentiated["main_adjoint"])
    assert "relax.grad.conv2d_backward_weight" in emitted
    assert "relax.grad.conv2d_backward_data" not in emitted


def test_require_grads_of_an_intermediate_variable():
    x, w = tensor("x", X), tensor("w", W)
    kept = []

    def body(bb, x, w):
        kept.append(bb.emit(relax.op.nn.conv2d(x, w)))
        return relax.op.sum(bb.emit(relax.op.multiply(kept[0], kept[0])))

    built = function([x, w], body)
    module = relax.transform.Gradient("main", require_grads=[kept[-1]])(built)
    x_value, w_value = values(X, W)
    (gradient,) = run(module, x_value, w_value)[1]
    forward = function([x, w], lambda bb, x, w: relax.op.nn.conv2d(x, w))
    expected = 2 * run(forward, x_value, w_value, name="main").numpy()
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target_index", [0, 1])
def test_target_index(target_index):
    def body(bb, x, w):
        y = bb.emit(relax.op.nn.conv2d(x, w))
        return relax.op.sum(y), relax.op.sum(bb.emit(relax.op.multiply(y, y)))

    params = [tensor("x", X), tensor("w", W)]
    module = relax.transform.Gradient("main", target_index=target_index)(function(params, body))
    x, w = values(X, W)
    grads = run(module, x, w)[1]

    def alone(bb, x, w):
        return body(bb, x, w)[target_index]

    expected = run(relax.transform.Gradient("main")(function(params, alone)), x, w)[1]
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)


def test_tuples_are_taken_apart_and_put_together():
    def body(bb, x, w):
        pair = bb.emit(relax.Tuple([x, w]))
        y = bb.emit(relax.op.nn.conv2d(relax.TupleGetItem(pair, 0), relax.TupleGetItem(pair, 1)))
        nested = bb.emit(relax.Tuple([relax.Tuple([y, y]), x]))
        inner = bb.emit(relax.TupleGetItem(nested, 0))
        return relax.op.sum(
            bb.emit(relax.op.add(relax.TupleGetItem(inner, 0), relax.TupleGetItem(inner, 1)))
        )

    params = [tensor("x", X), tensor("w", W)]
    x, w = values(X, W)
    grads = run(relax.transform.Gradient("main")(function(params, body)), x, w)[1]
    expected = run(relax.transform.Gradient("main")(conv_module()), x, w)[1]
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), 2 * b.numpy(), rtol=1e-5)


def test_a_tuple_parameter_gets_a_tuple_of_gradients():
    pair = relax.Var(
        "pair", relax.TupleType([relax.TensorType(X, "float32"), relax.TensorType(W, "float32")])
    )

    def body(bb, pair):
        x = bb.emit(relax.TupleGetItem(pair, 0))
        w = bb.emit(relax.TupleGetItem(pair, 1))
        return conv_loss(bb, x, w)

    module = relax.transform.Gradient("main")(function([pair], body))
    (gradient,) = module["main_adjoint"].ret_ty.fields[1].fields
    assert isinstance(gradient, relax.TupleType)
    assert len(gradient.fields) == 2


def test_no_grad_stops_the_gradient():
    def body(bb, x, w):
        y = bb.emit(relax.op.nn.conv2d(x, w))
        stopped = bb.emit(relax.op.sum(bb.emit(relax_op_grad.no_grad(y))))
        return relax.op.add(bb.emit(relax.op.sum(x)), stopped)

    module = function([tensor("x", X), tensor("w", W)], body)
    x, w = values(X, W)
    x_grad, w_grad = run(relax.transform.Gradient("main")(module), x, w)[1]
    np.testing.assert_array_equal(w_grad.numpy(), np.zeros(W))
    np.testing.assert_array_equal(x_grad.numpy(), np.ones(X))


def test_checkpointing_recomputes_and_agrees():
    def body(bb, x, w, checkpoint):
        start = relax_op_grad.start_checkpoint if checkpoint else lambda value: value
        end = relax_op_grad.end_checkpoint if checkpoint else lambda value: value
        inner_x, inner_w = bb.emit(start(x)), bb.emit(start(w))
        y = bb.emit(relax.op.nn.conv2d(inner_x, inner_w))
        z = bb.emit(relax.op.exp(bb.emit(relax.op.multiply(y, relax.const(0.1)))))
        out = bb.emit(end(z))
        return relax.op.sum(bb.emit(relax.op.multiply(out, out)))

    modules = {
        checkpoint: relax.transform.Gradient("main")(
            function(
                [tensor("x", X), tensor("w", W)],
                lambda bb, x, w, c=checkpoint: body(bb, x, w, c),
            )
        )
        for checkpoint in (False, True)
    }
    recomputed = operators(modules[True]["main_adjoint"])
    assert recomputed.count("relax.nn.conv2d") == 2
    assert operators(modules[False]["main_adjoint"]).count("relax.nn.conv2d") == 1
    assert not any("checkpoint" in name for name in recomputed)
    x, w = values(X, W)
    for a, b in zip(run(modules[True], x, w)[1], run(modules[False], x, w)[1], strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)


def test_a_value_used_twice_sums_its_adjoints():
    def body(bb, x, w):
        first = bb.emit(relax.op.nn.conv2d(x, w))
        second = bb.emit(relax.op.nn.conv2d(x, w))
        return relax.op.sum(bb.emit(relax.op.add(first, second)))

    params = [tensor("x", X), tensor("w", W)]
    x, w = values(X, W)
    grads = run(relax.transform.Gradient("main")(function(params, body)), x, w)[1]
    expected = run(relax.transform.Gradient("main")(conv_module()), x, w)[1]
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), 2 * b.numpy(), rtol=1e-5)


def test_integer_require_grads_is_an_error():
    x = tensor("x", (4, 3))
    index = tensor("index", (2,), "int64")
    module = function(
        [x, index], lambda bb, x, i: relax.op.sum(bb.emit(relax.op.take(x, i, axis=0)))
    )
    with pytest.raises(tvm.error.InternalError, match=r"(?s)floating point.*index.*int64"):
        relax.transform.Gradient("main", require_grads=module["main"].params)(module)


def test_an_operator_without_a_gradient_is_an_error_that_names_it():
    def body(bb, x):
        return relax.op.sum(bb.emit(relax.op.unique(x, axis=0), name_hint="distinct"))

    with pytest.raises(GradientError, match=r"gradient of relax\.unique, binding '\w+': selects"):
        relax.transform.Gradient("main")(function([tensor("x", (4,))], body))


def test_a_packed_layout_is_an_error_that_names_operator_and_layout():
    x, w = tensor("x", (1, 1, 6, 6, 4)), tensor("w", (1, 1, 3, 3, 4, 4))

    def body(bb, x, w):
        y = bb.emit(
            relax.op.nn.conv2d(
                x, w, data_layout="NCHW4c", kernel_layout="OIHW4i4o", out_layout="NCHW4c"
            )
        )
        return relax.op.sum(y)

    with pytest.raises(
        GradientError, match=r"(?s)gradient of relax\.nn\.conv2d, binding .*data_layout.*NCHW4c"
    ):
        relax.transform.Gradient("main")(function([x, w], body))
