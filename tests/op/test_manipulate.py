"""Backward operators of data movement: type inference, TVMScript and JSON."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal


def tensor(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(list(shape), dtype))


def infer(call):
    return relax.BlockBuilder().normalize(call).ty


CALLS = [
    pytest.param(lambda g: backward.tile_backward_data(g, (2, 3), [2, 3]), (4, 9), id="tile"),
    pytest.param(lambda g: backward.tile_backward_data(g, (), 2), (2,), id="tile-int"),
    pytest.param(lambda g: backward.repeat_backward_data(g, (2, 3), 2, -1), (2, 6), id="repeat"),
    pytest.param(lambda g: backward.repeat_backward_data(g, (2, 3), 2), (12,), id="repeat-flat"),
    pytest.param(
        lambda g: backward.concat_backward_tensors(g, [(2, 3), (0, 3)], 0), (2, 3), id="concat"
    ),
]


def module_of(make, shape):
    grad = relax.Var("g", relax.TensorType(shape, "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [grad]):
        with bb.dataflow():
            out = bb.emit_output(make(grad))
        bb.emit_func_output(out)
    return bb.get()


@pytest.mark.parametrize(("make", "shape"), CALLS)
def test_round_trip(make, shape):
    module = module_of(make, shape)
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_type_of_the_result():
    n = tirx.Var("n", "int64")
    expected = relax.TensorType([n, 3], "float16")
    grad = tensor(n * 2, 3, dtype="float16")
    assert structural_equal(infer(backward.tile_backward_data(grad, (n, 3), [2, 1])), expected)
    assert structural_equal(infer(backward.repeat_backward_data(grad, (n, 3), 2, 0)), expected)
    shapes = [(n, 3), (n, 3)]
    result = infer(backward.concat_backward_tensors(grad, shapes))
    assert structural_equal(result, relax.TupleType([expected, expected]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: backward.tile_backward_data(tensor(4, 9), (2, 3), [2, 2]),
            "output_grad must have",
        ),
        (lambda: backward.tile_backward_data(tensor(4, 9), (2, 3), [-2, 3]), "repeats must be"),
        (lambda: backward.tile_backward_data(tensor(9), (2, 3), [2, 3]), "2 dimensions"),
        (
            lambda: backward.repeat_backward_data(tensor(4, 3), (2, 3), 3, 0),
            "output_grad must have",
        ),
        (lambda: backward.repeat_backward_data(tensor(4, 3), (2, 3), -1, 0), "repeats must be"),
        (lambda: backward.repeat_backward_data(tensor(4, 3), (2, 3), 2, 2), "axis"),
        (lambda: backward.concat_backward_tensors(tensor(4, 3), [(1, 3)], 0), "output_grad must"),
        (lambda: backward.concat_backward_tensors(tensor(4, 3), [(1, 3), (3, 2)], 0), "same shape"),
    ],
)
def test_refuses_what_does_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        infer(make())


@pytest.mark.parametrize(
    "call",
    [
        lambda: backward.tile_backward_data(tensor(4), tensor(2), [2]),
        lambda: backward.repeat_backward_data(relax.ShapeExpr([4]), (2,), 2),
        lambda: backward.concat_backward_tensors(tensor(4), relax.ShapeExpr([4])),
        lambda: backward.concat_backward_tensors(tensor(4), relax.Tuple([])),
    ],
)
def test_refuses_arguments_of_another_kind(call):
    with pytest.raises(TypeError, match=r"relax\.grad\.\w+: \w+ must be a"):
        infer(call())
