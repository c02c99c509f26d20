"""The backward operators of convolution: builders, type inference and round trips."""

from __future__ import annotations

import pytest
import tvm
from calls import same, type_of, var
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import ir as I  # noqa: F401  (scripts name it)

from relax_grad.op import conv as op_conv

ATTRS = {"strides": (2, 1), "padding": (1, 0, 1, 0), "dilation": (1, 2), "groups": 2}
# The output shape of conv2d for these data, weight and attributes.
DATA, WEIGHT, OUTPUT = (2, 4, 7, 8), (6, 2, 3, 2), (2, 6, 4, 6)


def backward_data(grad=None, shape=DATA, weight=None, **attrs):
    return backward.conv2d_backward_data(
        var("dy", OUTPUT) if grad is None else grad,
        shape,
        var("w", WEIGHT) if weight is None else weight,
        **{**ATTRS, **attrs},
    )


def backward_weight(grad=None, data=None, shape=WEIGHT, **attrs):
    return backward.conv2d_backward_weight(
        var("dy", OUTPUT) if grad is None else grad,
        var("x", DATA) if data is None else data,
        shape,
        **{**ATTRS, **attrs},
    )


def module(build):
    """Return a function that makes a module, for a given batch, with one function that calls both
    operators."""

    def make(batch):
        params = [
            var("dy", (batch, *OUTPUT[1:])),
            var("x", (batch, *DATA[1:])),
            var("w", WEIGHT),
        ]
        bb = relax.BlockBuilder()
        with bb.function("main", params):
            with bb.dataflow():
                result = bb.emit_output(bb.emit(build(*params)))
            bb.emit_func_output(result)
        return bb.get()

    return make


MODULES = {
    "data": module(lambda dy, x, w: backward_data(dy, x.ty.shape, w)),
    "data, shape of": module(lambda dy, x, w: backward_data(dy, relax.op.shape_of(x), w)),
    "data, out_dtype": module(
        lambda dy, x, w: backward_data(dy, x.ty.shape, w, out_dtype="float16")
    ),
    "weight": module(lambda dy, x, w: backward_weight(dy, x, w.ty.shape)),
    "weight, out_dtype": module(
        lambda dy, x, w: backward_weight(dy, x, w.ty.shape, out_dtype="float64")
    ),
}
BATCHES = {"static": lambda: 2, "symbolic": lambda: tirx.Var("n", "int64")}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", MODULES)
def test_script_round_trip(case, batch):
    before = MODULES[case](BATCHES[batch]())
    script = before.script()
    assert f"R.grad.conv2d_backward_{case.partition(',')[0]}(" in script
    tvm.ir.assert_structural_equal(tvm.script.from_source(script), before)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", MODULES)
def test_json_round_trip(case, batch):
    before = MODULES[case](BATCHES[batch]())
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(before)), before)


def test_result_has_the_given_shape_and_by_default_the_dtype_of_output_grad():
    half = var("dy", OUTPUT, "float16")
    assert same(type_of(backward_data()), relax.TensorType(DATA, "float32"))
    assert same(type_of(backward_weight()), relax.TensorType(WEIGHT, "float32"))
    assert same(type_of(backward_data(half)), relax.TensorType(DATA, "float16"))
    assert same(
        type_of(backward_weight(half, out_dtype="float32")), relax.TensorType(WEIGHT, "float32")
    )


def test_attributes_are_completed_as_by_the_forward_operator():
    attrs = backward_data(var("dy", (1, 2, 3, 4)), (1, 2, 3, 4), padding=1, strides=1).attrs
    assert list(attrs.padding) == [1, 1, 1, 1]
    assert list(attrs.strides) == [1, 1]
    assert attrs.out_layout == attrs.data_layout == "NCHW"


def test_symbolic_extents():
    n, h, w = (tirx.Var(name, "int64") for name in "nhw")
    data = var("x", (n, 4, h, w))
    forward = type_of(relax.op.nn.conv2d(data, var("w", WEIGHT), **ATTRS))
    grad = relax.Var("dy", forward)
    assert same(type_of(backward_data(grad, data.ty.shape)), data.ty)
    assert same(type_of(backward_weight(grad, data)), relax.TensorType(WEIGHT, "float32"))
    # A shape read from a tensor gives the same type.
    bb = relax.BlockBuilder()
    with bb.function("main", [data, grad]):
        result = bb.emit(backward_data(grad, relax.op.shape_of(data)))
        assert same(result.ty, data.ty)
        bb.emit_func_output(result)


def test_unknown_shapes():
    """A known rank gives the rank of the result; unknown extents are accepted."""
    rank4 = relax.TensorType(dtype="float32", ndim=4)
    shape = relax.Var("s", relax.ShapeType(ndim=4))
    assert same(type_of(backward_data(var("dy", ndim=4), shape)), rank4)
    assert same(type_of(backward_weight(var("dy"), shape=shape)), rank4)
    assert same(
        type_of(backward_weight(var("dy", OUTPUT), var("x", ndim=4))),
        relax.TensorType(WEIGHT, "float32"),
    )


@pytest.mark.parametrize("operator", [backward_data, backward_weight])
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (1, 6, 4, 6), (2, 4, 4, 6), (2, 6, 4, 0)], ids=str)
def test_wrong_shape_of_output_grad(operator, shape):
    with pytest.raises(ValueError, match=r"conv2d_backward_\w+: output_grad .*\(2, 6, 4, 6\)"):
        type_of(operator(var("dy", shape)))


@pytest.mark.parametrize("operator", [backward_data, backward_weight])
def test_wrong_rank_of_output_grad(operator):
    with pytest.raises(
        ValueError, match=r"conv2d_backward_\w+: output_grad must have 4 dimensions"
    ):
        type_of(operator(var("dy", (2, 6, 4))))


def test_channels_that_do_not_fit():
    with pytest.raises(ValueError, match="channel"):
        type_of(backward_data(shape=(2, 6, 7, 8)))
    with pytest.raises(ValueError, match="channel"):
        type_of(backward_weight(shape=(6, 3, 3, 2)))
    with pytest.raises(ValueError, match="divisible"):
        type_of(backward_weight(var("dy", (2, 5, 4, 6)), shape=(5, 2, 3, 2)))


@pytest.mark.parametrize(
    ("argument", "layout", "shape"),
    [
        ("data_layout", "NCHW4c", (2, 1, 7, 8, 4)),
        ("kernel_layout", "OIHW2i", (6, 1, 3, 2, 2)),
        ("out_layout", "NCHW2c", (2, 3, 4, 6, 2)),
    ],
)
def test_packed_layouts_are_refused(argument, layout, shape):
    grad = var("dy", shape if argument == "out_layout" else OUTPUT)
    data = shape if argument == "data_layout" else DATA
    weight = shape if argument == "kernel_layout" else WEIGHT
    layouts = {"out_layout": "NCHW", argument: layout}
    message = rf"relax.grad.conv2d_backward_\w+: {argument} must be a permutation .*'{layout}'"
    with pytest.raises(ValueError, match=message):
        type_of(backward_data(grad, data, var("w", weight), **layouts))
    with pytest.raises(ValueError, match=message):
        type_of(backward_weight(grad, var("x", data), weight, **layouts))


def test_arguments_of_the_wrong_kind():
    shape = relax.Var("s", relax.ShapeType(ndim=4))
    pair = relax.Var("t", relax.TupleType([relax.TensorType(DATA, "float32")]))
    with pytest.raises(TypeError, match="conv2d_backward_data: output_grad must be a tensor"):
        type_of(backward_data(pair))
    with pytest.raises(TypeError, match="conv2d_backward_data: data_shape must be a shape"):
        type_of(backward_data(shape=var("x", DATA)))
    with pytest.raises(TypeError, match="conv2d_backward_data: weight must be a tensor"):
        type_of(backward_data(weight=shape))
    with pytest.raises(TypeError, match="conv2d_backward_weight: data must be a tensor"):
        type_of(backward_weight(data=pair))
    with pytest.raises(TypeError, match="conv2d_backward_weight: weight_shape must be a shape"):
        type_of(backward_weight(shape=var("w", WEIGHT)))


@pytest.mark.parametrize("operator", [backward_data, backward_weight])
def test_unknown_attribute(operator):
    with pytest.raises(TypeError, match="stride"):
        operator(stride=2)


@pytest.mark.parametrize("operator", [backward_data, backward_weight])
def test_operators_are_pure(operator):
    assert operator().op.get_attr("FPurity")


def test_unknown_dtype():
    grad = relax.Var("dy", relax.TensorType(OUTPUT, dtype=None))
    assert type_of(backward_data(grad)).dtype is None
    assert same(
        type_of(backward_data(grad, out_dtype="float16")), relax.TensorType(DATA, "float16")
    )


# Other ranks: the tests above cover the behaviour in common with conv2d.

RANKS = {
    # Shapes of data, weight and output, and attributes.
    1: ((2, 4, 7), (6, 2, 3), (2, 6, 2), {"strides": 3, "padding": (1, 0), "dilation": 2}),
    3: (
        (2, 4, 5, 4, 3),
        (6, 2, 2, 3, 1),
        (2, 6, 2, 3, 3),
        {"strides": (3, 1, 2), "padding": (0, 1, 1, 1, 0, 1), "dilation": (2, 1, 1)},
    ),
}


def builders(rank):
    return (
        getattr(backward, f"conv{rank}d_backward_data"),
        getattr(backward, f"conv{rank}d_backward_weight"),
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rank", RANKS)
def test_round_trips_of_rank(rank, batch):
    extent = BATCHES[batch]()
    data, weight, output, attrs = RANKS[rank]
    params = [var("dy", (extent, *output[1:])), var("x", (extent, *data[1:])), var("w", weight)]
    grad, data, weight = params
    backward_data, backward_weight = builders(rank)
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            dx = bb.emit(backward_data(grad, data.ty.shape, weight, groups=2, **attrs))
            dw = bb.emit(backward_weight(grad, data, weight.ty.shape, groups=2, **attrs))
            result = bb.emit_output(relax.Tuple([dx, dw]))
        bb.emit_func_output(result)
    before = bb.get()
    assert same(dx.ty, data.ty)
    assert same(dw.ty, weight.ty)
    script = before.script()
    assert f"R.grad.conv{rank}d_backward_data(" in script
    assert f"R.grad.conv{rank}d_backward_weight(" in script
    tvm.ir.assert_structural_equal(tvm.script.from_source(script), before)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(before)), before)


@pytest.mark.parametrize("rank", RANKS)
def test_errors_of_rank(rank):
    data, weight, output, attrs = RANKS[rank]
    attrs = {**attrs, "groups": 2}
    backward_data, backward_weight = builders(rank)
    wrong = var("dy", (*output[:-1], output[-1] + 1))
    message = rf"relax.grad.conv{rank}d_backward_\w+: output_grad must have the shape"
    for call in (
        backward_data(wrong, data, var("w", weight), **attrs),
        backward_weight(wrong, var("x", data), weight, **attrs),
    ):
        with pytest.raises(ValueError, match=message):
            type_of(call)
    batches = [var(name, (tirx.Var(name, "int64"), *output[1:])) for name in "mn"]
    for call in (
        backward_data(
            batches[0], (*batches[1].ty.shape.values[:1], *data[1:]), var("w", weight), **attrs
        ),
        backward_weight(
            batches[0],
            var("x", (*batches[1].ty.shape.values[:1], *data[1:])),
            weight,
            **attrs,
        ),
    ):
        with pytest.raises(ValueError, match=message + r" .* which may differ from it at run time"):
            type_of(call)
    with pytest.raises(ValueError, match=f"output_grad must have {rank + 2} dimensions"):
        type_of(backward_data(var("dy", output[1:]), data, var("w", weight), **attrs))
    spatial = "DHW"[-rank:]
    layouts = {"data_layout": f"NC{spatial}4c", "out_layout": f"NC{spatial}"}
    call = backward_data(var("dy", output), (*data, 4), var("w", weight), **attrs, **layouts)
    with pytest.raises(ValueError, match=f"data_layout must be a permutation .*'NC{spatial}4c'"):
        type_of(call)
    with pytest.raises(ValueError, match="channel"):
        type_of(
            backward_weight(var("dy", output), var("x", data), weight, **{**attrs, "groups": 1})
        )


@pytest.mark.parametrize("rank", RANKS)
def test_builders_are_documented_by_name(rank):
    for builder in builders(rank):
        assert builder.__name__.startswith(f"conv{rank}d_backward_")
        assert getattr(op_conv, builder.__name__) is builder
        assert f"``conv{rank}d(data, weight, **attrs)``" in builder.__doc__
