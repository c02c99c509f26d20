"""The transformations of functions against those of torch.func."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import tvm
from programs import build, is_sound, run, tensor
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad import functional

pytestmark = pytest.mark.core

RNG = np.random.default_rng(0)
X, W, DX, DW = (RNG.normal(size=shape) for shape in 2 * [(3, 4), (4, 2)])
n = tirx.Var("n", "int64")


def network(rows=3):
    """Return a module from data and weight to a loss and a tensor."""

    def body(bb, x, w):
        y = bb.emit(op.tanh(bb.emit(op.matmul(x, w))))
        loss = op.sum(op.multiply(y, y))
        return relax.Tuple([loss, op.nn.softmax(y)])

    return build([tensor("x", (rows, 4)), tensor("w", (4, 2))], body)


def torch_network(torch):
    def function(x, w):
        y = torch.tanh(x @ w)
        return (y * y).sum(), torch.softmax(y, -1)

    return function


def close(actual, wanted):
    for result, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(result, other.detach().numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [3, n], ids=["static", "symbolic"])
def test_vjp(torch, rows):
    module = relax_grad.vjp(network(rows))
    is_sound(module)
    cotangents = np.array(0.5), RNG.normal(size=(3, 2))
    result, products = run(module, "main_vjp", X, W, *cotangents)
    value, pull = torch.func.vjp(torch_network(torch), *map(torch.from_numpy, (X, W)))
    close(result, value)
    close(products, pull(tuple(map(torch.from_numpy, cotangents))))


@pytest.mark.parametrize("rows", [3, n], ids=["static", "symbolic"])
def test_jvp(torch, rows):
    module = relax_grad.jvp(network(rows))
    is_sound(module)
    assert [p.name for p in module["main_jvp"].params] == ["x", "w", "x_tangent", "w_tangent"]
    result, products = run(module, "main_jvp", X, W, DX, DW)
    primals, tangents = (tuple(map(torch.from_numpy, pair)) for pair in ((X, W), (DX, DW)))
    close(result, (torch_result := torch.func.jvp(torch_network(torch), primals, tangents))[0])
    close(products, torch_result[1])


def test_jvp_with_respect_to_some():
    module = relax_grad.jvp(network(), wrt="w")
    _, tangents = run(module, "main_jvp", X, W, DW)
    _, both = run(relax_grad.jvp(network()), "main_jvp", X, W, np.zeros_like(X), DW)
    for tangent, other in zip(tangents, both, strict=True):
        np.testing.assert_allclose(tangent, other, rtol=1e-12)


def test_jvp_of_an_independent_result_is_zero():
    module = build([tensor("x", (3,)), tensor("y", (3,))], lambda bb, x, y: op.exp(y))
    _, (tangent,) = run(relax_grad.jvp(module, wrt="x"), "main_jvp", DX[:, 0], DX[:, 1], DX[:, 2])
    np.testing.assert_array_equal(tangent, np.zeros(3))


@pytest.mark.parametrize("rows", [3, n], ids=["static", "symbolic"])
def test_hvp(torch, rows):
    module = relax_grad.hvp(network(rows))
    is_sound(module)
    (_, gradients), products = run(module, "main_hvp", X, W, DX, DW)

    def loss(x, w):
        return torch_network(torch)(x, w)[0]

    gradient = torch.func.grad(loss, (0, 1))
    first, pull = torch.func.vjp(gradient, *map(torch.from_numpy, (X, W)))
    close(gradients, first)
    close(products, pull(tuple(map(torch.from_numpy, (DX, DW)))))


def test_third_order():
    """The transformations apply to their own results."""
    module = build([tensor("x", ())], lambda bb, x: op.power(x, relax.const(5.0, "float64")))
    first = relax_grad.value_and_grad(module)
    second = relax_grad.vjp(first, "main_adjoint")
    _, (slope,) = run(second, "main_adjoint_vjp", *map(np.array, (2.0, 0.0, 1.0)))
    np.testing.assert_allclose(slope, 20 * 2.0**3)
    third = relax_grad.jvp(second, "main_adjoint_vjp", wrt=0)
    _, tangents = run(third, "main_adjoint_vjp_jvp", *map(np.array, (2.0, 0.0, 1.0, 1.0)))
    np.testing.assert_allclose(tangents[-1], 60 * 2.0**2)


def test_orders_up_to_four(torch):
    """Each order uses its own vectors and is compared with PyTorch's gradients of gradients."""
    module = relax_grad.derivatives(network(n), order=4, wrt=["w"])
    is_sound(module)
    assert [p.name for p in module["main_order4"].params] == [
        "x",
        "w",
        "w_vector",
        "w_vector2",
        "w_vector3",
    ]
    vectors = [RNG.normal(size=W.shape) for _ in range(3)]
    result, *slopes = run(module, "main_order4", X, W, *vectors)
    w = torch.from_numpy(W).requires_grad_()
    value = torch_network(torch)(torch.from_numpy(X), w)[0]
    np.testing.assert_allclose(result[0], value.detach())
    for order, vector in zip(slopes, [*vectors, np.zeros_like(W)], strict=True):
        (wanted,) = torch.autograd.grad(value, [w], create_graph=True)
        close(order, [wanted])
        value = (wanted * torch.from_numpy(vector)).sum()


def test_orders_of_tuples_and_integers():
    params = [
        relax.Var("pair", relax.TupleType([tensor("a", (3,)).ty, tensor("b", (3,)).ty])),
        tensor("index", (2,), "int64"),
    ]

    def body(bb, pair, index):
        a, b = (bb.emit(relax.TupleGetItem(pair, i)) for i in range(2))
        return op.sum(op.multiply(op.take(op.multiply(a, a), index), op.take(b, index)))

    module = relax_grad.derivatives(build(params, body), order=2)
    is_sound(module)
    function = module["main_order2"]
    assert [p.name for p in function.params[2:]] == ["pair_0_vector", "pair_1_vector"]
    assert len(function.ret_ty.fields) == 3


def test_order_one_is_value_and_grad():
    module = relax_grad.derivatives(network(), order=1)
    wanted = relax_grad.value_and_grad(network())["main_adjoint"]
    function = module["main_order1"].with_attr("global_symbol", "main_adjoint")
    tvm.ir.assert_structural_equal(function, wanted)
    assert {v.name_hint for v in module.get_global_vars()} == {"main", "main_order1"}


@pytest.mark.parametrize("order", [0, -1, 1.0, True, "2"])
def test_invalid_orders_are_refused(order):
    error = ValueError if type(order) is int else TypeError
    with pytest.raises(error, match=r"order must be an? (positive )?integer"):
        relax_grad.derivatives(network(), order=order)


@pytest.mark.parametrize("wrt", ["w", 1, ["w"], [np.int64(1)]])
def test_wrt(wrt):
    module = relax_grad.value_and_grad(network(), wrt=wrt)
    assert len(module["main_adjoint"].ret_ty.fields[1].fields) == 1


@pytest.mark.parametrize("name", ["value_and_grad", "vjp", "jvp", "hvp", "derivatives"])
def test_wrt_all_parameters_in_the_list_of_the_function(name):
    """``wrt`` accepts TVM's own list type, as ``require_grads`` of the pass does."""
    module = network()
    derived = getattr(relax_grad, name)(module, wrt=module["main"].params)
    expected = getattr(relax_grad, name)(module, wrt=["x", "w"])
    tvm.ir.assert_structural_equal(derived, expected)


@pytest.mark.parametrize("wrt", ["v", 2, -1, [tensor("x", (3, 4))], 1.0, True])
def test_wrt_that_is_not_a_parameter_is_refused(wrt):
    with pytest.raises(
        ValueError,
        match=r"wrt: main has no parameter .*; (there are x, w|it is a different variable)",
    ):
        relax_grad.value_and_grad(network(), wrt=wrt)


@pytest.mark.parametrize("name", ["value_and_grad", "vjp", "jvp", "hvp", "derivatives"])
def test_other_objects_than_modules_are_refused(name):
    with pytest.raises(TypeError, match=r"mod must be a tvm\.IRModule, but it is int"):
        getattr(relax_grad, name)(3)


@pytest.mark.parametrize("module", [functional, relax_grad.autodiff.gradient])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0


def test_existing_functions_of_the_module_stay():
    """The intermediate functions take no names and do not stay in the module."""
    loss = build([tensor("x", (3, 4))], lambda bb, x: op.sum(op.exp(x)))
    module = relax_grad.value_and_grad(loss)
    for transform, name in (
        (relax_grad.vjp, "main_vjp"),
        (relax_grad.jvp, "main_jvp"),
        (relax_grad.hvp, "main_hvp"),
        (relax_grad.derivatives, "main_order2"),
    ):
        extended = transform(module)
        names = {variable.name_hint for variable in extended.get_global_vars()}
        assert names == {"main", "main_adjoint", name}
        tvm.ir.assert_structural_equal(extended["main_adjoint"], module["main_adjoint"])
        tvm.ir.assert_structural_equal(extended[name], transform(loss)[name])
        with pytest.raises(ValueError, match=f"has a function {name} already"):
            transform(extended)


def test_nothing_to_differentiate_with_respect_to():
    x = tensor("x", (3,), "int32")
    module = build([x], lambda bb, x: op.sum(op.astype(x, "float32")))
    for transform in (relax_grad.jvp, relax_grad.hvp):
        with pytest.raises(ValueError, match="main has no parameter to differentiate"):
            transform(module)


#: Names of the new parameters by transformation: with free default names, and with one default name
#: taken.
NEW_NAMES = {
    "vjp": (["cotangent0"], ["cotangent0_"]),
    "jvp": (["x_tangent", "y_tangent"], ["x_tangent_", "y_tangent"]),
    "hvp": (["x_vector", "y_vector"], ["x_vector_", "y_vector"]),
    "derivatives": (["x_vector", "y_vector"], ["x_vector_", "y_vector"]),
}


@pytest.mark.parametrize("name", NEW_NAMES)
def test_new_parameters_have_names_of_their_own(name):
    transformation = getattr(relax_grad, name)
    taken = {"vjp": "cotangent0", "jvp": "x_tangent"}.get(name, "x_vector")
    for third, new in zip(("z", taken), NEW_NAMES[name], strict=True):
        names = ["x", "y", third]
        params = [relax.Var(param_name, relax.TensorType((), "float32")) for param_name in names]
        module = build(params, lambda bb, x, y, z: op.exp(op.multiply(op.multiply(x, y), z)))
        module = transformation(module, wrt=["x", "y"])
        (function,) = (prim for v, prim in module.functions_items() if v.name_hint != "main")
        assert [param.name for param in function.params] == [*names, *new]


def test_new_parameters_of_tuples_have_names_of_their_own():
    scalar = relax.TensorType((), "float32")
    params = [relax.Var("x", relax.TupleType([scalar])), relax.Var("x_0", scalar)]
    module = build(params, lambda bb, x, y: op.multiply(op.exp(relax.TupleGetItem(x, 0)), y))
    names = [param.name for param in relax_grad.jvp(module)["main_jvp"].params]
    assert names == ["x", "x_0", "x_0_tangent", "x_0_tangent_"]
