"""The operators of the statistics of normalisations: type inference, TVMScript, JSON and numbers
without kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.script import from_source
from tvm_ffi import structural_equal

from relax_grad.op import norm_statistics
from relax_grad.target import host
from relax_grad.transform import DispatchKernels

N = tirx.Var("n", "int64")
SHAPE = (N, 4, 5)

#: For each operator, its attributes, the number of results, and their shape.
OPERATORS = {
    "batch_norm_statistics": ({"axis": -2, "training": False, "momentum": 0.5}, 2, (4,)),
    "layer_norm_statistics": ({"axes": [2, 1], "scale": False}, 2, (N, 1, 1)),
    "instance_norm_statistics": ({"channel_axis": 1, "axes": [-1], "center": False}, 2, (N, 4, 1)),
    "group_norm_statistics": ({"num_groups": 2, "channel_axis": -2, "axes": [2]}, 2, (N, 4, 1)),
    "rms_norm_statistics": ({"axes": [-1], "epsilon": 0.5}, 1, (N, 4, 1)),
}


def tensor(shape, dtype="float16"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def module_of(name, data, **changed):
    bb = relax.BlockBuilder()
    with bb.function("main", [data]):
        call = getattr(backward, name)(data, **{**OPERATORS[name][0], **changed})
        bb.emit_func_output(bb.emit(call))
    return bb.get()


@pytest.mark.parametrize("name", OPERATORS)
def test_round_trip_and_type(name):
    module, (_, count, shape) = module_of(name, tensor(SHAPE)), OPERATORS[name]
    kind = relax.TensorType(list(shape), "float32")
    expected = kind if count == 1 else relax.TupleType([kind] * count)
    assert structural_equal(module["main"].ret_ty, expected)
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize("name", OPERATORS)
def test_attributes_are_the_forward_operators(name):
    forward, attrs = getattr(relax.op.nn, name.removesuffix("_statistics")), OPERATORS[name][0]
    unknown = relax.Var("x", relax.TensorType(dtype="float32"))
    count = {"batch": 5, "rms": 2}.get(name.partition("_")[0], 3)
    call = getattr(backward, name)(tensor(SHAPE), **attrs)
    assert structural_equal(call.attrs, forward(*[unknown] * count, **attrs).attrs)


@pytest.mark.parametrize("name", OPERATORS)
def test_unsuitable_arguments_are_refused(name):
    def refused(kind, match, data=None, **changed):
        with pytest.raises(kind, match=rf"relax\.grad\.{name}: {match}"):
            module_of(name, tensor(SHAPE) if data is None else data, **changed)

    attrs = OPERATORS[name][0]
    refused(TypeError, "data must be floating-point", tensor(SHAPE, "int32"))
    refused(TypeError, "data must be a tensor", relax.Var("x", relax.ShapeType([2])))
    refused(ValueError, "the rank of data", relax.Var("x", relax.TensorType(dtype="float32")))
    for axis in attrs.keys() & {"axis", "axes", "channel_axis"}:
        wrong = [3] if axis == "axes" else -4
        refused(ValueError, rf"{axis} must lie in \[-3, 3\)", **{axis: wrong})
    if "axes" in attrs:
        refused(ValueError, "axes must differ", axes=[-1, 2])
    if "num_groups" in attrs:
        refused(ValueError, "axes must not contain the channel axis", axes=[1, 2])
        for groups in (-1, 0, 3):
            refused(ValueError, "num_groups must be positive and divide", num_groups=groups)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "kind", [{"ndim": 3, "dtype": "float32"}, {"shape": [2, 4, 5], "dtype": None}]
)
def test_calls_of_unknown_type_are_left_to_later_passes(name, kind):
    """A shape or a dtype may become known after the dispatch, which neither fails nor changes the
    call."""
    module = module_of(name, relax.Var("x", relax.TensorType(**kind)))
    assert structural_equal(DispatchKernels(host())(module), module)


@pytest.mark.parametrize("shape", [(2, 4, 0), (2, 0, 5), (0, 4, 5)])
@pytest.mark.parametrize("axes", [[], [2], [0, 2]])
@pytest.mark.parametrize("pipeline", ["relax_grad", "default"])
def test_groups_of_data_without_elements(shape, axes, pipeline):
    """The statistics of no numbers are NaN; a batch or channels of extent 0 have none."""
    data = tensor(shape, "float32")
    bb = relax.BlockBuilder()
    with bb.function("main", [data]):
        call = norm_statistics.group_norm_statistics(data, 2, 1, axes)
        bb.emit_func_output(bb.emit(call))
    built = tvm.compile(bb.get(), host(), relax_pipeline=pipeline)
    results = relax.VirtualMachine(built, tvm.cpu())["main"](
        tvm.runtime.tensor(np.ones(shape, "float32"))
    )
    for result in results:
        extents = tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
        np.testing.assert_array_equal(result.numpy(), np.full(extents, np.nan, "float32"))
