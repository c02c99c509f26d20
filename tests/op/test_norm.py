"""The backward operators of the normalisations: type inference, TVMScript and JSON."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal


@pytest.mark.parametrize("axis", [None, [], [0, -1], 1])
def test_round_trip(axis):
    data = relax.Var("x", relax.TensorType([4], "float16"))
    bb = relax.BlockBuilder()
    with bb.function("main", [data]):
        bb.emit_func_output(bb.emit(backward.divide_by_count(data, (2, 3), axis)))
    module = bb.get()
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_divide_by_count_infers():
    bb, n = relax.BlockBuilder(), tirx.Var("n", "int64")
    data = relax.Var("x", relax.TensorType([n, 3], "float16"))
    assert structural_equal(bb.normalize(backward.divide_by_count(data, (n, 2))).ty, data.ty)
    with pytest.raises(ValueError, match=r"divide_by_count: axis must lie in \[-2, 2\)"):
        bb.normalize(backward.divide_by_count(data, (n, 2), [0, 2]))
    with pytest.raises(TypeError, match="of_shape must be a shape"):
        bb.normalize(backward.divide_by_count(data, data))
    unknown = relax.Var("s", relax.ShapeType(ndim=-1))
    with pytest.raises(ValueError, match="rank of of_shape must be known"):
        bb.normalize(backward.divide_by_count(data, unknown))


N = tirx.Var("n", "int64")
SHAPE = (N, 4, 5)
CHANNELS, ROWS, INSTANCES = (4,), (N, 1, 1), (N, 4, 1)


def tensor(name, shape, dtype="float16"):
    return relax.Var(name, relax.TensorType(list(shape), dtype))


#: For each operator, the shapes of the arguments after the data, the attributes, and the result's
#: shape.
OPERATORS = {
    "batch_norm_backward_data": ([CHANNELS] * 5, {"axis": -2}, SHAPE),
    "batch_norm_backward_gamma": ([CHANNELS] * 2, {"axis": 1, "training": False}, CHANNELS),
    "instance_norm_backward_data": (
        [CHANNELS, *[INSTANCES] * 4],
        {"channel_axis": 1, "axes": [-1]},
        SHAPE,
    ),
    "instance_norm_backward_gamma": (
        [INSTANCES] * 2,
        {"channel_axis": 1, "axes": [2], "epsilon": 0.1},
        INSTANCES,
    ),
    "layer_norm_backward_data": ([(5, 4), ROWS, ROWS], {"axes": [2, 1], "scale": False}, SHAPE),
    "layer_norm_backward_gamma": ([ROWS] * 2, {"axes": [-1, 1], "center": False}, (5, 4)),
    "rms_norm_backward_data": ([(4, 5), ROWS], {"axes": [1, 2]}, SHAPE),
    "rms_norm_backward_weight": ([ROWS], {"axes": [1, 2], "epsilon": 0.5}, (4, 5)),
}


def arguments(name):
    """Return variables for a call: half precision data with float32 statistics."""
    data = [tensor("output_grad", SHAPE), tensor("data", SHAPE)]
    others = OPERATORS[name][0]
    return [*data, *(tensor(f"x{i}", shape, "float32") for i, shape in enumerate(others))]


@pytest.mark.parametrize("name", OPERATORS)
def test_round_trip_and_type(name):
    params, (_, attrs, expected) = arguments(name), OPERATORS[name]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        bb.emit_func_output(bb.emit(getattr(backward, name)(*params, **attrs)))
    module = bb.get()
    dtype = "float16" if name.endswith("data") else "float32"
    assert structural_equal(module["main"].ret_ty, relax.TensorType(list(expected), dtype))
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize("name", OPERATORS)
def test_attributes_are_the_forward_operators(name):
    forward = getattr(relax.op.nn, name.partition("_backward")[0])
    attrs = OPERATORS[name][1]
    call = getattr(backward, name)(*arguments(name), **attrs)
    unknown = relax.Var("x", relax.TensorType(dtype="float32"))
    count = {"batch": 5, "rms": 2}.get(name.partition("_")[0], 3)
    assert structural_equal(call.attrs, forward(*[unknown] * count, **attrs).attrs)


@pytest.mark.parametrize("name", OPERATORS)
def test_unknown_extents(name):
    """If only the rank of the data is known, the result has the right rank."""
    params, (_, attrs, expected) = arguments(name), OPERATORS[name]
    params[1] = relax.Var("data", relax.TensorType(ndim=3, dtype="float16"))
    result_type = relax.BlockBuilder().normalize(getattr(backward, name)(*params, **attrs)).ty
    assert result_type.ndim == len(expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_mismatched_arguments_are_refused(name):
    build, attrs = getattr(backward, name), OPERATORS[name][1]
    params, prefix = arguments(name), rf"relax\.grad\.{name}: "

    def refused(kind, match, index=None, replaced=None, **changed):
        operands = list(params)
        if index is not None:
            operands[index] = replaced
        with pytest.raises(kind, match=prefix + match):
            relax.BlockBuilder().normalize(build(*operands, **{**attrs, **changed}))

    refused(ValueError, "output_grad must have the shape", 0, tensor("g", (N, 4, 6)))
    refused(TypeError, "output_grad must have the dtype", 0, tensor("g", SHAPE, "float32"))
    refused(TypeError, "data must be floating-point", 1, tensor("x", SHAPE, "int32"))
    refused(TypeError, "data must be a tensor", 1, relax.Var("x", relax.ShapeType([2])))
    unknown = relax.Var("x", relax.TensorType(dtype="float16"))
    refused(ValueError, "the rank of data must be known", 1, unknown)
    for index, param in enumerate(params[2:], start=2):
        argument = build(*params, **attrs).op.arguments[index].name
        shape = [*list(param.ty.shape.values)[:-1], 7]
        refused(ValueError, rf"{argument} must have the shape \(", index, tensor("x", shape))
    for axis in attrs.keys() & {"axis", "axes", "channel_axis"}:
        wrong = [3] if axis == "axes" else -4
        refused(ValueError, rf"{axis} must lie in \[-3, 3\)", **{axis: wrong})
    if "axes" in attrs:
        refused(ValueError, "axes must differ from each other", axes=[1, -2])


def test_batch_norm_backward_data_is_that_of_training():
    params = arguments("batch_norm_backward_data")
    call = backward.batch_norm_backward_data(*params, axis=1, training=False)
    with pytest.raises(ValueError, match="training must be True"):
        relax.BlockBuilder().normalize(call)
