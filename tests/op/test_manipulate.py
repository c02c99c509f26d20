"""Backward operators of data movement: type inference, TVMScript and JSON."""

from __future__ import annotations

import pytest
import tvm
from calls import type_of
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal


def tensor(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(list(shape), dtype))


CALLS = [
    pytest.param(lambda g: backward.tile_backward_data(g, (2, 3), [2, 3]), (4, 9), id="tile"),
    pytest.param(lambda g: backward.tile_backward_data(g, (), 2), (2,), id="tile-int"),
    pytest.param(lambda g: backward.repeat_backward_data(g, (2, 3), 2, -1), (2, 6), id="repeat"),
    pytest.param(lambda g: backward.repeat_backward_data(g, (2, 3), 2), (12,), id="repeat-flat"),
    pytest.param(
        lambda g: backward.concat_backward_tensors(g, [(2, 3), (0, 3)], 0), (2, 3), id="concat"
    ),
    pytest.param(
        lambda g: backward.split_backward_x([g, g], (6, 2), 2, axis=-2), (3, 2), id="split"
    ),
    pytest.param(
        lambda g: backward.split_backward_x([g, g], (4, 2), [2]), (2, 2), id="split-indices"
    ),
    pytest.param(lambda g: backward.stack_backward_tensors(g, -1), (2, 3), id="stack"),
    pytest.param(
        lambda g: backward.layout_transform_backward_x(g, (5,), lambda i: (i // 4, i % 4)),
        (2, 4),
        id="layout",
    ),
    pytest.param(
        lambda g: backward.pixel_shuffle_backward_data(g, (1, 4, 2, 1), 2),
        (1, 1, 4, 2),
        id="pixel",
    ),
    pytest.param(
        lambda g: backward.pad_backward_data(g, (2, 3), (1, 0, -1, 2), "circular"),
        (3, 4),
        id="pad",
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
    assert structural_equal(type_of(backward.tile_backward_data(grad, (n, 3), [2, 1])), expected)
    assert structural_equal(type_of(backward.repeat_backward_data(grad, (n, 3), 2, 0)), expected)
    shapes = [(n, 3), (n, 3)]
    result = type_of(backward.concat_backward_tensors(grad, shapes))
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
        (lambda: backward.split_backward_x([tensor(2), tensor(2)], (5,), 2), r"output_grads\[0\]"),
        (lambda: backward.split_backward_x([tensor(2), tensor(2)], (6,), 3), "the 3 parts"),
        (lambda: backward.split_backward_x([tensor(2), tensor(2)], (4,), 1), "the 1 parts"),
        (lambda: backward.stack_backward_tensors(tensor(4), 1), "with the axis 1"),
        (lambda: backward.stack_backward_tensors(tensor(0, 3), 0), "positive constant"),
        (
            lambda: backward.stack_backward_tensors(tensor(tirx.Var("n", "int64"), 3), 0),
            "positive constant",
        ),
        (
            lambda: backward.layout_transform_backward_x(
                tensor(2, 4), (9,), lambda i: (i // 4, i % 4)
            ),
            "output_grad must have",
        ),
        (lambda: backward.pixel_shuffle_backward_data(tensor(1, 4, 4), (4, 2, 1), 2), "must have"),
        (lambda: backward.pad_backward_data(tensor(4), (3,), (1, 1)), "output_grad must have"),
        (lambda: backward.pad_backward_data(tensor(4), (3,), (1, 1, 0, 0)), "two widths"),
        (lambda: backward.pad_backward_data(tensor(5), (3,), (1, 1), "edge"), "'edge'"),
        (lambda: backward.concat_backward_tensors(tensor(4, 3), [(1, 3), (3, 2)], 0), "same shape"),
    ],
)
def test_mismatched_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        type_of(make())


@pytest.mark.parametrize(
    "call",
    [
        lambda: backward.tile_backward_data(tensor(4), tensor(2), [2]),
        lambda: backward.repeat_backward_data(relax.ShapeExpr([4]), (2,), 2),
        lambda: backward.concat_backward_tensors(tensor(4), relax.ShapeExpr([4])),
        lambda: backward.concat_backward_tensors(tensor(4), relax.Tuple([])),
        lambda: backward.split_backward_x(tensor(4), (4,), 2),
        lambda: backward.split_backward_x([tensor(4)], (4,), 1),
        lambda: backward.split_backward_x([tensor(2), tensor(2)], tensor(4), 2),
        lambda: backward.stack_backward_tensors(relax.ShapeExpr([4])),
        lambda: backward.layout_transform_backward_x(tensor(4), tensor(4), lambda i: (i,)),
        lambda: backward.pixel_shuffle_backward_data(tensor(4), tensor(4), 2),
    ],
)
def test_refuses_arguments_of_another_kind(call):
    with pytest.raises(TypeError, match=r"relax\.grad\.\w+: \w+ must be a"):
        type_of(call())


def test_type_inference_that_is_corrected():
    """meshgrid "xy" swaps axes, and the type of a split does not depend on the scope of its
    inference."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    grids = type_of(relax.op.meshgrid([tensor(n), tensor(m), tensor(4)], "xy"))
    expected = relax.TensorType([m, n, 4], "float32")
    assert structural_equal(grids, relax.TupleType([expected] * 3))
    vector = relax.TensorType([n], "float32")
    assert structural_equal(
        type_of(relax.op.meshgrid([tensor(n)], "xy")), relax.TupleType([vector])
    )

    x = tensor(n, 2)
    outside = type_of(relax.op.split(x, [1, 3]))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        inside = bb.emit(relax.op.split(x, [1, 3])).ty
        bb.emit_func_output(x)
    assert structural_equal(inside, outside)
