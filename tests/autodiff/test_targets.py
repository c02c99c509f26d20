"""The targets of differentiation, their cotangents, and the variables of the gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import build, check, is_sound, run, tensor, to_numpy
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.transform import Gradient

X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


def test_a_target_of_one_element():
    x = tensor("x", (3, 4))
    check(build([x], lambda bb, x: op.reshape(op.sum(op.exp(x)), (1,))), X)


def test_the_parameter_itself_as_target():
    x = tensor("x", ())
    _, (grad,) = run(Gradient("main")(build([x], lambda bb, x: x)), "main_adjoint", np.array(2.0))
    assert grad == 1


def test_an_element_of_a_tuple_of_tuples():
    def body(bb, x):
        inner = bb.emit(relax.Tuple([op.exp(x), bb.emit(op.sum(op.multiply(x, x)))]))
        return relax.Tuple([x, inner])

    module = build([tensor("x", (3, 4))], body)
    _, (grad,) = run(Gradient("main", target_index=(1, 1))(module), "main_adjoint", X)
    np.testing.assert_allclose(grad, 2 * X)
    adjoint = Gradient("main", target_index=(1, 0), cotangents=True)(module)
    _, (grad,) = run(adjoint, "main_adjoint", X, X)
    np.testing.assert_allclose(grad, X * np.exp(X))


@pytest.mark.parametrize("index", [np.int64(1), [1], (np.int32(1),)])
def test_indices_of_any_kind(index):
    module = build([tensor("x", (3, 4))], lambda bb, x: relax.Tuple([op.sum(x), op.sum(op.exp(x))]))
    adjoint = Gradient("main", target_index=index)(module)
    tvm.ir.assert_structural_equal(adjoint, Gradient("main", target_index=1)(module))


@pytest.mark.parametrize("index", [True, "0", 0.0, [False]])
def test_a_target_index_that_is_not_an_integer_is_refused(index):
    with pytest.raises(TypeError, match="target_index must be an integer"):
        Gradient("main", target_index=index)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "one floating-point tensor, but its type is .*Tuple"),
        ({"target_index": 0}, r"scalar or have one element, but its type is R.Tensor\(\(3, 4\)"),
        ({"target_index": 3}, "target_index: 3 is out of range .* a tuple of 3 elements"),
        ({"target_index": (0, 0)}, "target_index: 0 is out of range .* one value"),
        ({"target_index": 2}, "one floating-point tensor, but its type is R.Tensor.*int64"),
        ({"target_index": 2, "cotangents": True}, "must hold floating-point tensors"),
        ({"target_index": 1, "require_grads": tensor("y", ())}, "main has no variable y"),
    ],
)
def test_targets_that_are_refused(settings, match):
    def body(bb, x):
        return relax.Tuple([op.exp(x), op.sum(x), op.argmax(x)])

    module = build([tensor("x", (3, 4))], body)
    if not settings:
        settings = {"target_index": None}
    with pytest.raises(ValueError, match=match):
        Gradient("main", **settings)(module)


# Cotangents


def test_cotangents_of_the_whole_result():
    def body(bb, x):
        return relax.Tuple([op.exp(x), relax.Tuple([op.argmax(x), op.sum(x, [1])])])

    adjoint = Gradient("main", target_index=None, cotangents=True)(
        build([tensor("x", (3, 4))], body)
    )
    is_sound(adjoint)
    assert [param.name for param in adjoint["main_adjoint"].params[1:]] == [
        "cotangent0",
        "cotangent1",
    ]
    rows = np.array([1.0, 2.0, 3.0])
    _, (grad,) = run(adjoint, "main_adjoint", X, X, rows)
    np.testing.assert_allclose(grad, X * np.exp(X) + rows[:, None])


def weighted(rows=3):
    """Return a module with two floating-point results, one of them in a parameter's shape, and an
    integer result."""

    def body(bb, x, w):
        kept = bb.emit(op.exp(x), name_hint="kept")
        return relax.Tuple([op.multiply(kept, x), op.argmax(x), op.sum(x, [0])])

    return build([tensor("x", (rows, 4)), tensor("w", (rows, 4))], body)


@pytest.mark.parametrize("rows", [3, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_cotangents_as_values(rows):
    """Cotangents may be parameters, intermediate variables, numbers, arrays and names, in nested
    sequences."""
    module = weighted(rows)
    x, w = module["main"].params
    kept = module["main"].body.blocks[0].bindings[0].var
    y, e = X * np.exp(X) + np.exp(X), np.exp(X)
    row = np.array([1.0, 2.0, -3.0, 0.5])
    for cotangents, wanted in [
        ((w, 0.0), y * 2),
        ([kept, row], y * e + row),
        ((x, (relax.const(row, "float64"),)), y * X + row),
        (relax.Tuple([w, relax.const(row, "float64")]), y * 2 + row),
        ((-1.5, tvm.runtime.tensor(row)), -1.5 * y + row),
    ]:
        adjoint = Gradient("main", "x", None, cotangents=cotangents)(module)
        is_sound(adjoint)
        _, (grad,) = run(adjoint, "main_adjoint", X, np.full_like(X, 2.0))
        np.testing.assert_allclose(grad, wanted, rtol=1e-12)

    adjoint = Gradient("main", "x", None, cotangents=("dy", 1))(module)
    assert [param.name for param in adjoint["main_adjoint"].params] == ["x", "w", "dy"]
    _, (grad,) = run(adjoint, "main_adjoint", X, X, X)
    np.testing.assert_allclose(grad, X * y + 1)


@pytest.mark.parametrize(
    ("cotangents", "error", "match"),
    [
        ([1.0], ValueError, "holds 2 floating-point tensors, but there are 1 cotangents"),
        ((1.0, np.zeros(3)), ValueError, r"cotangents\[1\] has the type .*3,.*float64"),
        ((1.0, np.zeros(4, "float32")), ValueError, r"cotangents\[1\] has the type .*float32"),
        ((np.zeros((3, 4)), 1.0), ValueError, "whose shape is known at run time only"),
        ((tensor("v", (3, 4)), 1.0), ValueError, "cotangents: main has no variable v"),
        ((None, 1.0), TypeError, r"cotangents\[0\] must be the name of a new parameter"),
    ],
)
def test_cotangents_that_are_refused(cotangents, error, match):
    module = weighted(tirx.Var("n", "int64"))
    with pytest.raises(error, match=match):
        Gradient("main", target_index=None, cotangents=cotangents)(module)


# Parameters and other variables


def test_variables_by_name():
    module = weighted()
    x = module["main"].params[0]
    for wanted in ("x", ["x"], [x], x):
        adjoint = Gradient("main", wanted, target_index=2, cotangents=1)(module)
        assert len(adjoint["main_adjoint"].ret_ty.fields[1].fields) == 1
    both = Gradient("main", ["kept", "x"], target_index=0, cotangents=1)(module)
    _, (of_kept, _) = run(both, "main_adjoint", X, X)
    np.testing.assert_allclose(of_kept, X)
    with pytest.raises(ValueError, match="require_grads: main has no variable 'nothing'"):
        Gradient("main", "nothing")(module)
    with pytest.raises(ValueError, match="require_grads: x appears more than once"):
        Gradient("main", ["x", x])(module)


def test_a_name_that_two_variables_share_is_refused():
    x = [tensor("x", ()), tensor("x", ())]
    module = build(x, lambda bb, x, y: op.multiply(x, y))
    with pytest.raises(
        ValueError,
        match="'x' is ambiguous, as 2 variables of main have this name",
    ):
        Gradient("main", "x")(module)


def test_parameters_without_gradients():
    """Integers, shapes, scalars and objects stay parameters; floating-point tensors get
    gradients."""
    n = tirx.Var("n", "int64")
    params = [
        tensor("x", (n, 4)),
        tensor("index", (2,), "int64"),
        relax.Var("shape", relax.ShapeType([n])),
        relax.Var("pair", relax.TupleType([tensor("a", (4,)).ty, tensor("b", (2,), "int32").ty])),
        relax.Var("thing", relax.ObjectType()),
    ]

    def body(bb, x, index, shape, pair, thing):
        rows = bb.emit(op.take(x, index, axis=0))
        first = bb.emit(relax.TupleGetItem(pair, 0))
        return op.sum(op.multiply(op.exp(rows), first))

    module = build(params, body)
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    machine = relax.VirtualMachine(tvm.compile(adjoint, TARGET), tvm.cpu())
    index, a, b = np.array([2, 0]), np.arange(4.0), np.zeros(2, "int32")
    pair = tvm.runtime.convert([tvm.runtime.tensor(a), tvm.runtime.tensor(b)])
    _, gradients = to_numpy(
        machine["main_adjoint"](
            tvm.runtime.tensor(X), tvm.runtime.tensor(index), tvm_ffi.Shape([3]), pair, pair
        )
    )
    wanted = np.exp(X) * a
    wanted[1] = 0
    np.testing.assert_allclose(gradients[0], wanted)
    np.testing.assert_allclose(gradients[1][0], np.exp(X[index]).sum(0))
    assert len(gradients) == 2


def test_unused_repeated_and_intermediate_variables():
    x, y = tensor("x", (3, 4)), tensor("y", (2,))
    kept = []

    def body(bb, x, y):
        kept.append(bb.emit(op.exp(x)))
        return op.sum(op.multiply(kept[0], op.multiply(x, kept[0])))

    module = build([x, y], body)
    _, (of_x, of_y, of_kept) = run(
        Gradient("main", [x, y, *kept])(module), "main_adjoint", X, np.zeros(2)
    )
    e = np.exp(X)
    np.testing.assert_allclose(of_kept, 2 * X * e)
    np.testing.assert_allclose(of_x, e * e + 2 * X * e * e)
    np.testing.assert_array_equal(of_y, [0, 0])


def test_the_result_itself_as_intermediate_variable():
    def body(bb, x):
        y = bb.emit(op.exp(x))
        return relax.Tuple([y, bb.emit(op.sum(y))])

    module = build([tensor("x", (3, 4))], body)
    result = module["main"].body.body
    adjoint = Gradient("main", [result], target_index=1)(module)
    is_sound(adjoint)
    _, ((first, second),) = run(adjoint, "main_adjoint", X)
    np.testing.assert_array_equal(first, np.zeros_like(X))
    np.testing.assert_array_equal(second, 1.0)


def test_an_intermediate_variable_of_an_operator_without_a_gradient():
    """The operator that computes the variable has no gradient, and its arguments are not
    differentiated."""

    def body(bb, x):
        y = bb.emit(op.call_pure_packed("f", x, ty_args=[x.ty]))
        return op.sum(bb.emit(op.exp(y)))

    module = build([tensor("x", (3, 4))], body)
    (y, *_) = (binding.var for binding in module["main"].body.blocks[0].bindings)
    is_sound(Gradient("main", [y])(module))


def test_without_a_variable_and_without_a_binding():
    module = build([tensor("x", ())], lambda bb, x: x, dataflow=False)
    adjoint = Gradient("main", [])(module)
    is_sound(adjoint)
    assert list(adjoint["main_adjoint"].ret_ty.fields[1].fields) == []


def test_bfloat16_parameters():
    import ml_dtypes

    x = tensor("x", (3, 4), "bfloat16")
    adjoint = Gradient("main")(build([x], lambda bb, x: op.sum(op.multiply(x, x))))
    is_sound(adjoint)
    assert "bfloat16" in str(adjoint["main_adjoint"].ret_ty)
    value = X.astype(ml_dtypes.bfloat16)
    bits = tvm.runtime.empty(value.shape, "bfloat16")
    bits.copyfrom(value)
    machine = relax.VirtualMachine(tvm.compile(adjoint, TARGET), tvm.cpu())
    _, (grad,) = machine["main_adjoint"](bits)
    np.testing.assert_allclose(
        grad.numpy().astype("float64"), 2 * value.astype("float64"), rtol=1e-2
    )
