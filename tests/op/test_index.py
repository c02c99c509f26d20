"""The operators of take and gather_elements: builders, type inference and round trips."""

from __future__ import annotations

import pytest
import tvm
from calls import check_round_trip, module_of, same, type_of, var
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import ir as I  # noqa: F401  (scripts name it)


def modules(n):
    """Return one call of each operator on data with ``n`` rows."""

    def tensor(*shape, dtype="float32"):
        return relax.TensorType(shape, dtype)

    indices = tensor(n, 2, dtype="int32")
    return {
        "take_backward": module_of(
            [tensor(n, 2, 4), tensor(n, 3), tensor(2, 4, dtype="int64")],
            lambda dy, x, i: backward.take_backward(dy, x, i, axis=-1, mode="clip"),
        ),
        "take_backward, scalar": module_of(
            [tensor(n), tensor(n, 3)],
            lambda dy, x: backward.take_backward(dy, x, relax.prim_value(-1), axis=1),
        ),
        "take_jvp": module_of(
            [tensor(n, 3), tensor(2, 4, dtype="int64")],
            lambda x, i: backward.take_jvp(x, i, axis=-1, mode="wrap"),
        ),
        "take_jvp, scalar": module_of(
            [tensor(n, 3)], lambda x: backward.take_jvp(x, relax.prim_value(-1), axis=1)
        ),
        "take_jvp, no axis": module_of([tensor(n), indices], lambda x, i: backward.take_jvp(x, i)),
        "gather_elements_jvp": module_of(
            [tensor(n, 3), indices], lambda x, i: backward.gather_elements_jvp(x, i, axis=1)
        ),
        "gather_elements_backward_data": module_of(
            [tensor(n, 2), tensor(n, 3), indices],
            lambda dy, x, i: backward.gather_elements_backward_data(
                dy, relax.op.shape_of(x), i, axis=-1
            ),
        ),
        "gather_elements_backward_data, shape": module_of(
            [tensor(n, 2), indices],
            lambda dy, i: backward.gather_elements_backward_data(dy, (n, 5), i, axis=1),
        ),
    }


EXTENTS = {"static": lambda: 4, "symbolic": lambda: tirx.Var("n", "int64")}


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("case", modules(4))
def test_round_trips(case, extent):
    check_round_trip(modules(EXTENTS[extent]())[case], f"grad.{case.partition(',')[0]}")


def test_types():
    n = tirx.Var("n", "int64")
    x, i = var("x", (n, 3), "float16"), var("i", (2, 5), "int64")
    taken = type_of(backward.take_jvp(x, i, axis=0))
    assert same(taken, relax.TensorType((2, 5, 3), "float16"))
    i = var("i", (n, 7), "int32")
    assert same(type_of(backward.gather_elements_jvp(x, i, 1)), relax.TensorType((n, 7), "float16"))
    grad = var("dy", (n, 7), "float16")
    assert same(type_of(backward.gather_elements_backward_data(grad, (n, 3), i, 1)), x.ty)


def test_unknown_shapes():
    grad, i = var("dy"), var("i", dtype="int64", ndim=2)
    shape = relax.Var("s", relax.ShapeType(ndim=2))
    rank2 = relax.TensorType(dtype="float32", ndim=2)
    assert same(type_of(backward.gather_elements_backward_data(grad, shape, i)), rank2)
    result_type = type_of(backward.gather_elements_backward_data(grad, (3, 2), i))
    assert same(result_type, relax.TensorType((3, 2), "float32"))
    assert same(type_of(backward.take_jvp(var("x", ndim=2), i, 0)).ndim, 3)


def test_output_grad_must_have_the_shape_of_the_indices():
    indices = var("i", (4, 2), "int64")
    message = r"gather_elements_backward_data: output_grad .* \(4, 2\) .* \(4, 3\)"
    with pytest.raises(ValueError, match=message):
        type_of(backward.gather_elements_backward_data(var("dy", (4, 3)), (4, 9), indices, 1))
    with pytest.raises(ValueError, match="output_grad must have 2 dimensions"):
        type_of(backward.gather_elements_backward_data(var("dy", (4,)), (4, 9), indices, 1))


def test_arguments_invalid_for_the_forward_operators_are_refused():
    grad, indices = var("dy", (4, 2)), var("i", (4, 2), "int64")
    for axis in (2, -3):
        with pytest.raises(ValueError, match="axis"):
            type_of(backward.gather_elements_backward_data(grad, (4, 9), indices, axis))
    with pytest.raises(ValueError, match="rank"):
        type_of(backward.gather_elements_backward_data(grad, (4, 9, 1), indices, 0))
    with pytest.raises(TypeError, match="dtype"):
        type_of(backward.gather_elements_jvp(grad, var("i", (4, 2)), 0))
    with pytest.raises(TypeError, match="dtype"):
        type_of(backward.take_jvp(grad, var("i", (4, 2)), 0))
    with pytest.raises(ValueError, match="1-dimensional"):
        type_of(backward.take_jvp(grad, indices))


def test_arguments_of_the_wrong_kind():
    shape = relax.Var("s", relax.ShapeType(ndim=2))
    grad, indices = var("dy", (4, 2)), var("i", (4, 2), "int64")
    with pytest.raises(TypeError, match="take_jvp: x_direction must be a tensor"):
        type_of(backward.take_jvp(shape, indices, 0))
    with pytest.raises(TypeError, match="gather_elements_jvp: indices must be a tensor"):
        type_of(backward.gather_elements_jvp(grad, shape, 0))
    for arguments, name in (
        ((shape, (4, 9), indices), "output_grad must be a tensor"),
        ((grad, grad, indices), "data_shape must be a shape"),
        ((grad, (4, 9), shape), "indices must be a tensor"),
    ):
        with pytest.raises(TypeError, match=f"gather_elements_backward_data: {name}"):
            type_of(backward.gather_elements_backward_data(*arguments, 1))


@pytest.mark.parametrize(
    "name",
    ["take_jvp", "gather_elements_jvp", "gather_elements_backward_data"],
)
def test_operators_are_pure(name):
    assert tvm.ir.Op.get(f"relax.grad.{name}").get_attr("FPurity")
