"""Operators that control differentiation and compute nothing."""

from __future__ import annotations

import numpy as np
import pytest
from programs import build, is_sound, run, tensor
from tvm import relax
from tvm.script import from_source
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.op import differentiable_once, stop_gradient, with_backward

X = np.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize("gradient", [relax.transform.Gradient, relax_grad.transform.Gradient])
def test_stop_gradient(gradient):
    module = build(
        [tensor("x", (3,))],
        lambda bb, x: relax.op.sum(relax.op.multiply(x, bb.emit(stop_gradient(relax.op.exp(x))))),
    )
    adjoint = gradient("main")(module)
    is_sound(adjoint)
    assert "stop_gradient" not in relax.transform.LegalizeOps()(adjoint).script()
    value, (grad,) = run(adjoint, "main_adjoint", X)
    np.testing.assert_allclose(value, np.sum(X * np.exp(X)))
    np.testing.assert_allclose(grad, np.exp(X))


def test_stop_gradient_of_a_tuple_is_refused():
    pair = relax.Var("pair", relax.TupleType([tensor("a", ()).ty]))
    with pytest.raises(TypeError, match="data must be a tensor"):
        relax.BlockBuilder().normalize(stop_gradient(pair))


def with_own_gradient(derivative):
    """Return a module with the square of x, whose gradient is
    ``derivative(bb, y, x, gradient)``."""
    bb = relax.BlockBuilder()
    params = [tensor(name, (3,)) for name in ("y", "x", "gradient")]
    result = derivative(bb, *params)
    with bb.function("square_backward", params, private=True):
        with bb.dataflow():
            out = bb.emit_output(relax.Tuple([bb.normalize(result)]))
        bb.emit_func_output(out)
    x = tensor("x", (3,))
    with bb.function("main", [x]):
        with bb.dataflow():
            backward = bb.get().get_global_var("square_backward")
            y = bb.emit(relax.op.multiply(*[bb.emit(stop_gradient(x))] * 2))
            outputs = bb.emit(
                with_backward(relax.Tuple([y]), relax.Tuple([x]), relax.Tuple([x]), backward)
            )
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(outputs[0], x))))
        bb.emit_func_output(loss)
    return bb.get()


def test_with_backward():
    # The gradient of the square is 5 * y + x * gradient here.
    module = with_own_gradient(
        lambda bb, y, x, g: relax.op.add(
            relax.op.multiply(relax.const(5.0, "float64"), y), relax.op.multiply(x, g)
        )
    )
    module = from_source(module.script())
    adjoint = relax_grad.value_and_grad(module, "main")
    is_sound(adjoint)
    value, (grad,) = run(adjoint, "main_adjoint", X)
    np.testing.assert_allclose(value, np.sum(X**3))
    np.testing.assert_allclose(grad, X**2 + 5 * X**2 + X**2)
    # The gradient is 6 * y + x * x, and the derivative of 6 * y is that of the square with the
    # cotangent 6.
    _, (grad,) = run(relax_grad.hvp(module, "main"), "main_hvp", X, np.ones(3))
    np.testing.assert_allclose(grad, (5 * X**2 + 6 * X) + 2 * X)


def test_differentiable_once():
    module = with_own_gradient(
        lambda bb, y, x, g: differentiable_once(relax.op.multiply(x, g), relax.Tuple([x]))
    )
    adjoint = relax_grad.value_and_grad(module, "main")
    _, (grad,) = run(adjoint, "main_adjoint", X)
    np.testing.assert_allclose(grad, X**2 + X**2)
    with pytest.raises(relax_grad.GradientError, match="defines its first derivative only"):
        relax_grad.hvp(module, "main")


def test_the_type_of_with_backward_is_that_of_its_outputs():
    module = with_own_gradient(lambda bb, y, x, g: g)
    outputs, inputs = (relax.Tuple([tensor("x", (extent,))]) for extent in (3, 5))
    backward = module.get_global_var("square_backward")
    result = with_backward(outputs, inputs, inputs, backward)
    assert structural_equal(relax.BlockBuilder(module).normalize(result).ty, outputs.ty)


def test_values_that_are_no_backward_function_are_refused():
    with pytest.raises(TypeError, match="backward must be a function of the module"):
        relax.BlockBuilder().normalize(with_backward(*[relax.Tuple([tensor("x", (3,))])] * 4))
