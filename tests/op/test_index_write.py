"""The operators of reads and writes at indices: builders, type inference and round trips."""

from __future__ import annotations

import pytest
import tvm
from calls import check_round_trip, module_of, same, type_of, var
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import ir as I  # noqa: F401  (scripts name it)


def index(*shape, dtype="int64"):
    return var("i", shape, dtype)


def tensor(*shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


def ints(*shape, dtype="int64"):
    return relax.TensorType(shape, dtype)


def modules(n):
    """Return one call of each operator on data with ``n`` rows."""
    scans = {
        f"{name}{terms}": module_of(
            [tensor(n, 3), ints(n, 2), *[tensor(n, 2)] * count],
            lambda *args, name=name: getattr(backward, name)(*args, axis=1),
        )
        for name in ("scatter_elements_scan", "scatter_elements_scan_reverse")
        for terms, count in (("", 1), (", terms", 2))
    }
    nd_scans = {
        f"{name}{terms}": module_of(
            [tensor(n, 3), ints(4, 1, dtype="int32"), *[tensor(4, 3)] * count],
            getattr(backward, name),
        )
        for name in ("scatter_nd_scan", "scatter_nd_scan_reverse")
        for terms, count in (("", 1), (", terms", 2))
    }
    return {
        "gather_nd_jvp": module_of(
            [tensor(n, 3, 2), ints(n, 5, 1)], lambda x, i: backward.gather_nd_jvp(x, i, 1)
        ),
        "gather_nd_backward_data": module_of(
            [tensor(4, 2), tensor(n, 2), ints(4, 1, dtype="uint8")],
            lambda dy, x, i: backward.gather_nd_backward_data(dy, relax.op.shape_of(x), i),
        ),
        "gather_nd_backward_data, shape": module_of(
            [tensor(n, 5, 2), ints(n, 5, 1)],
            lambda dy, i: backward.gather_nd_backward_data(dy, (n, 3, 2), i, batch_dims=1),
        ),
        "index_tensor_jvp": module_of(
            [tensor(n, 3, 2), ints(4, 1), ints(5, dtype="uint8")],
            lambda x, i, j: backward.index_tensor_jvp(x, [i, j]),
        ),
        "index_tensor_backward_data": module_of(
            [tensor(4, 5, n), ints(4, 1), ints(5)],
            lambda dy, i, j: backward.index_tensor_backward_data(dy, (2, 3, n), [i, j]),
        ),
        "index_tensor_backward_data, variable": module_of(
            [tensor(4, 2), relax.TupleType([ints(4)]), tensor(n, 2)],
            lambda dy, i, x: backward.index_tensor_backward_data(dy, relax.op.shape_of(x), i),
        ),
        "scatter_elements_backward_updates": module_of(
            [tensor(n, 3), ints(n, 2)],
            lambda dy, i: backward.scatter_elements_backward_updates(dy, i, -1, "mean"),
        ),
        "scatter_nd_backward_updates": module_of(
            [tensor(n, 3), ints(4, 1)], backward.scatter_nd_backward_updates
        ),
        "index_put_backward_values": module_of(
            [tensor(n, 3), ints(4, 1), ints(5)],
            lambda dy, i, j: backward.index_put_backward_values(dy, [i, j]),
        ),
        "slice_scatter_backward_src": module_of(
            [tensor(n, 5)],
            lambda dy: backward.slice_scatter_backward_src(dy, (n, 2), 1, 4, 2, axis=1),
        ),
        **scans,
        **nd_scans,
    }


EXTENTS = {"static": lambda: 4, "symbolic": lambda: tirx.Var("n", "int64")}


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("case", modules(4))
def test_round_trips(case, extent):
    check_round_trip(modules(EXTENTS[extent]())[case], f"grad.{case.partition(',')[0]}")


def test_types():
    n = tirx.Var("n", "int64")
    x, dy = var("x", (n, 3, 2), "float16"), var("dy", (4, 2), "float16")
    result_type = type_of(backward.gather_nd_jvp(x, index(n, 5, 1), 1))
    assert same(result_type, tensor(n, 5, 2, dtype="float16"))
    result_type = type_of(backward.gather_nd_backward_data(dy, (n, 2), index(4, 1)))
    assert same(result_type, tensor(n, 2, dtype="float16"))
    indices = [index(4, 1), index(5, dtype="uint16")]
    assert same(type_of(backward.index_tensor_jvp(x, indices)), tensor(4, 5, 2, dtype="float16"))
    grad = var("dy", (4, 5, 2), "float16")
    assert same(type_of(backward.index_tensor_backward_data(grad, (n, 3, 2), indices)), x.ty)
    result_type = type_of(
        backward.scatter_elements_backward_updates(x, index(n, 7, 2, dtype="uint8"), 1)
    )
    assert same(result_type, tensor(n, 7, 2, dtype="float16"))
    result_type = type_of(backward.scatter_nd_backward_updates(x, index(7, 1, dtype="uint8")))
    assert same(result_type, tensor(7, 3, 2, dtype="float16"))
    result_type = type_of(backward.index_put_backward_values(var("x", (n, 3)), indices))
    assert same(result_type, tensor(4, 5))
    result_type = type_of(backward.slice_scatter_backward_src(x, (n, 1, 2), 2, 3, 1, 1))
    assert same(result_type, tensor(n, 1, 2, dtype="float16"))


def test_unknown_shapes():
    shape = relax.Var("s", relax.ShapeType(ndim=2))
    rank2 = relax.TensorType(dtype="float32", ndim=2)
    dy, i = var("dy"), index(3, 1)
    assert same(type_of(backward.gather_nd_backward_data(dy, shape, i)), rank2)
    assert same(type_of(backward.index_tensor_backward_data(dy, shape, [i])), rank2)
    assert same(type_of(backward.gather_nd_backward_data(dy, (4, 2), i)), tensor(4, 2))
    rows = var("i", dtype="int64", ndim=2)
    assert same(type_of(backward.scatter_elements_backward_updates(dy, rows)), rank2)
    assert same(type_of(backward.slice_scatter_backward_src(dy, shape, 0, 2, 1)), rank2)


def test_output_grad_must_have_the_shape_of_the_result():
    for call in (
        backward.gather_nd_backward_data(var("dy", (4, 3)), (5, 2), index(4, 1)),
        backward.index_tensor_backward_data(var("dy", (4, 3)), (5, 2), [index(4)]),
    ):
        with pytest.raises(ValueError, match=r"backward_data: output_grad .* \(4, 2\) .* \(4, 3\)"):
            type_of(call)


def test_arguments_invalid_for_the_forward_operators_are_refused():
    x, floats = var("x", (4, 2)), var("f", (4, 2))
    with pytest.raises(TypeError, match="int64 dtype"):
        type_of(backward.gather_nd_jvp(x, floats))
    with pytest.raises(ValueError, match="last dimension"):
        type_of(backward.gather_nd_backward_data(x, (4, 2), index(4, 3)))
    with pytest.raises(TypeError, match="integer dtype"):
        type_of(backward.index_tensor_jvp(x, [floats]))
    with pytest.raises(ValueError, match="3 index tensors"):
        type_of(backward.index_tensor_jvp(x, [index(1)] * 3))
    with pytest.raises(ValueError, match="rank"):
        type_of(backward.scatter_elements_backward_updates(x, index(4)))
    with pytest.raises(ValueError, match="shape"):
        type_of(backward.scatter_elements_scan(x, index(4, 1), x))
    with pytest.raises(ValueError, match="shape"):
        type_of(backward.scatter_nd_scan_reverse(x, index(3, 1), x))
    with pytest.raises(ValueError, match="number of elements"):
        type_of(backward.slice_scatter_backward_src(x, (3, 2), 0, 2, 1))


def test_arguments_invalid_only_for_the_backward_operators_are_refused():
    x, i = var("x", (4, 2)), index(4, 2)
    with pytest.raises(ValueError, match="reduction must be 'update' or 'mean', but it is 'mul'"):
        type_of(backward.scatter_elements_backward_updates(x, i, 0, "mul"))
    with pytest.raises(ValueError, match=r"indices must be 2 tensors, .* but there are 1"):
        type_of(backward.index_put_backward_values(x, [i]))
    with pytest.raises(TypeError, match="terms must have the dtype of factors, float32"):
        type_of(backward.scatter_elements_scan(x, i, x, var("t", (4, 2), "float16")))
    with pytest.raises(ValueError, match="terms must have the shape"):
        type_of(backward.scatter_nd_scan(x, index(3, 1), var("f", (3, 2)), x))


def test_arguments_of_the_wrong_kind():
    shape, x = relax.Var("s", relax.ShapeType(ndim=2)), var("x", (4, 2))
    for call, name in (
        (backward.gather_nd_jvp(shape, index(4, 1)), "data_direction must be a tensor"),
        (backward.gather_nd_jvp(x, shape), "indices must be a tensor"),
        (backward.gather_nd_backward_data(x, x, index(4, 1)), "data_shape must be a shape"),
        (backward.index_tensor_jvp(x, x), "indices must be a tuple of one or more tensors"),
        (backward.index_tensor_jvp(x, []), "indices must be a tuple of one or more tensors"),
        (backward.index_tensor_backward_data(x, (4, 2), [shape]), "indices must be a tuple"),
        (backward.scatter_elements_backward_updates(x, shape), "indices must be a tensor"),
        (backward.scatter_nd_backward_updates(shape, index(4, 1)), "output_grad must be a tensor"),
        (backward.index_put_backward_values(x, index(4)), "indices must be a tuple"),
        (backward.slice_scatter_backward_src(x, x, 0, 1, 1), "src_shape must be a shape"),
        (backward.scatter_elements_scan(shape, index(4, 2), x), "start must be a tensor"),
        (backward.scatter_nd_scan(x, index(4, 1), shape), "factors must be a tensor"),
    ):
        with pytest.raises(TypeError, match=f"{call.op.name}: {name}"):
            type_of(call)


@pytest.mark.parametrize("name", sorted({case.partition(",")[0] for case in modules(4)}))
def test_operators_are_pure(name):
    assert tvm.ir.Op.get(f"relax.grad.{name}").get_attr("FPurity")
