"""Layout inference: of each operator, between two convolutions that are converted."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from layouts import CHANNELS_LAST, calls, converted, edges
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as backward

from relax_grad import registry
from relax_grad.op._layout import chosen, first, moved, moved_axes, order, trailing
from relax_grad.testing._program import compile_together

TARGET = {"kind": "llvm", "opt-level": 0}
RNG = np.random.default_rng(5)


def shape(rank: int, *, batch: int = 2, channels: int = 4) -> tuple[int, ...]:
    return (batch, channels, 6, 5, 4)[: rank + 2]


def between_convolutions(rank: int, function):
    """Build a function of two convolutions with what is to be converted in between."""
    data = relax.Var("data", relax.TensorType(shape(rank), "float32"))
    weights = [
        relax.Var(name, relax.TensorType((4, 4, *[1] * rank), "float32")) for name in ("u", "v")
    ]
    conv = getattr(op.nn, f"conv{rank}d")
    bb = relax.BlockBuilder()
    with bb.function("main", [data, *weights]):
        with bb.dataflow():
            x = bb.emit(conv(data, weights[0]))
            y = bb.emit(function(bb, x))
            result = bb.emit_output(conv(y, weights[1]))
        bb.emit_func_output(result)
    return bb.get()


def _pooling(name: str, rank: int):
    """The gradient of a pooling for a gradient that the pooling itself makes."""
    attrs = {"pool_size": [3, 2, 2][:rank], "strides": [2, 1, 1][:rank]}
    attrs.update(padding=[1, 0, 1][:rank] * 2, ceil_mode=True)
    if name.startswith("adaptive"):
        attrs = {"output_size": [3, 2, 3][:rank]}
    forward = getattr(op.nn, f"{name}{rank}d")
    gradient = getattr(backward, f"{name}{rank}d_backward")
    return lambda bb, x: gradient(bb.emit(forward(x, **attrs)), x, **attrs)


def _max_pool_jvp(rank: int):
    attrs = {"pool_size": [3, 2, 2][:rank], "strides": [2, 1, 1][:rank]}
    jvp = getattr(backward, f"max_pool{rank}d_jvp")
    return lambda bb, x: jvp(bb.emit(op.multiply(x, x)), x, **attrs)


def _of_zero(x):
    return relax.const(0, "float32")


PLAIN = shape(2)
CASES = {
    **{
        f"{name}{rank}d_backward": (rank, _pooling(name, rank))
        for name in ("max_pool", "avg_pool", "adaptive_avg_pool")
        for rank in (1, 2, 3)
    },
    **{f"max_pool{rank}d_jvp": (rank, _max_pool_jvp(rank)) for rank in (1, 2, 3)},
    "divide_by_count": (2, lambda bb, x: backward.divide_by_count(x, PLAIN, [0, -1])),
    "pad_backward_data": (
        2,
        lambda bb, x: backward.pad_backward_data(
            x, (2, 4, 3, 7), (0, 0, 0, 0, 1, 2, 0, -2), "reflect"
        ),
    ),
    "resize2d_backward_data": (
        2,
        lambda bb, x: backward.resize2d_backward_data(x, (2, 4, 3, 7), (6, 5), method="linear"),
    ),
    "resize3d_backward_data": (
        3,
        lambda bb, x: backward.resize3d_backward_data(
            x, (2, 4, 3, 7, 4), (6, 5, 4), method="nearest_neighbor", rounding_method="floor"
        ),
    ),
    "tile_backward_data": (
        2,
        lambda bb, x: backward.tile_backward_data(x, (2, 4, 2, 5), (3, 1)),
    ),
    "repeat_backward_data": (
        2,
        lambda bb, x: backward.repeat_backward_data(x, (2, 4, 3, 5), 2, -2),
    ),
    "mean_backward_x": (
        2,
        lambda bb, x: backward.mean_backward_x(
            bb.emit(op.mean(x, [1, -1], keepdims=True)), PLAIN, [1, -1], keepdims=True
        ),
    ),
    "strided_slice_backward_data": (
        2,
        lambda bb, x: backward.strided_slice_backward_data(
            x, (2, 4, 6, 9), [3, -2], [8, 0], [-10, 6], [-2, 1]
        ),
    ),
    "split_backward_x": (
        2,
        lambda bb, x: backward.split_backward_x(
            bb.emit(op.split(x, [2, 3], -2)), (2, 4, 6, 5), [2, 3], -2
        ),
    ),
    "where": (2, lambda bb, x: op.where(op.greater(x, _of_zero(x)), op.negative(x), _of_zero(x))),
    "where_of_less_rank": (
        2,
        lambda bb, x: op.where(
            relax.const(RNG.normal(size=(4, 1, 5)) > 0), x, relax.const(0, "float32")
        ),
    ),
    "clip": (2, lambda bb, x: op.clip(x, -0.5, 0.75)),
    "leakyrelu": (2, lambda bb, x: op.nn.leakyrelu(x, 0.3)),
    "softplus": (2, lambda bb, x: op.nn.softplus(x, beta=2.0, threshold=3.0)),
    "log_softmax": (2, lambda bb, x: op.nn.log_softmax(x, axis=-3)),
    "zeros_like": (2, lambda bb, x: op.add(x, op.zeros_like(x))),
    "ones_like": (2, lambda bb, x: op.add(x, op.ones_like(x))),
    "full_like": (2, lambda bb, x: op.add(x, op.full_like(x, relax.const(3, "float32")))),
    "pad": (2, lambda bb, x: op.nn.pad(x, (0, 0, 0, 0, 1, 2, 0, 1), "constant", 0.5)),
    "broadcast_to": (
        2,
        lambda bb, x: op.broadcast_to(bb.emit(op.sum(x, [0, 2], keepdims=True)), (3, 4, 6, 5)),
    ),
    "collapse_sum_to": (2, lambda bb, x: op.add(x, bb.emit(op.collapse_sum_to(x, (4, 1, 5))))),
    "collapse_sum_like": (
        2,
        lambda bb, x: op.collapse_sum_like(x, bb.emit(op.max(x, [0, 2], keepdims=True))),
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    """The outcome of every case, converted and as it was; compiled together."""
    originals = {name: between_convolutions(*case) for name, case in CASES.items()}
    after = {name: converted(module) for name, module in originals.items()}
    run = compile_together([*originals.values(), *after.values()], TARGET)
    values = {}
    for number, (name, (rank, _)) in enumerate(CASES.items(), start=1):
        inputs = [
            RNG.normal(size=size).astype("float32")
            for size in (shape(rank), (4, 4, *[1] * rank), (4, 4, *[1] * rank))
        ]
        expected = run(f"main_{number}", inputs)
        values[name] = expected, run(f"main_{number + len(CASES)}", inputs)
    return after, values


@pytest.mark.parametrize("name", CASES)
def test_an_operator_between_two_convolutions(outcomes, name):
    """Only the parameters and the result are transposed, and the numbers are the same."""
    after, values = outcomes
    parameters, results, inside = edges(after[name]["main"])
    rank = CASES[name][0]
    # The result of the second convolution is the function's, and the kernels are of extent 1.
    assert (parameters, inside) == (["data"], 0)
    assert len(results) == 1
    (conv, *_) = calls(after[name]["main"], f"relax.nn.conv{rank}d")
    assert conv.value.attrs.data_layout == CHANNELS_LAST[f"relax.nn.conv{rank}d"][0]
    expected, found = values[name]
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * largest)


def test_every_layout_inference_has_a_case():
    """A new registration cannot be forgotten here; those of convolution have a module of their own."""
    registered = {
        d.op_name
        for d in registry.declarations()
        if d.attr == "FRelaxInferLayout" and d.corrects is None
    }
    used = {
        binding.value.op.name
        for case in CASES.values()
        for block in between_convolutions(*case)["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    }
    convolutions = {name for name in registered if name.startswith("relax.grad.conv")}
    assert len(convolutions) == 6
    assert registered - convolutions <= used


def test_orders_of_axes():
    assert first(4) == "ABCD"
    assert order("NCHW", "NHWC") == "ACDB"
    assert order("NHWC", "CHWN") == "DBCA"
    assert "".join(moved("NCHW", "ACDB")) == "NHWC"
    assert moved_axes(1, "ACDB") == moved_axes(-3, "ACDB") == 3
    assert moved_axes([0, -1, 1], "ACDB") == [0, 2, 3]
    assert moved_axes(None, "ACDB") is None


def test_the_layout_of_a_tensor_that_is_broadcast():
    """Its axes must stay the last ones."""
    assert trailing("ACDB", 4) == "ACDB"
    assert trailing("ACDB", 3) == "BCA"
    assert trailing("ACDB", 0) == ""
    assert trailing("BCDA", 3) is None


def test_the_layout_that_tensors_share():
    assert chosen(["ABCD", "ACDB", "DCBA"]) == "ACDB"
    assert chosen(["", "CAB", "ABCD"]) == "ABCD"
    assert chosen(["", ""]) == ""


def test_what_cannot_be_broadcast_otherwise_stays_in_order():
    """With the batch as the last axis, the axes of the condition are not the last ones."""
    condition = relax.const(RNG.normal(size=shape(2)[1:]) > 0)
    module = between_convolutions(2, lambda bb, x: op.where(condition, x, op.negative(x)))
    main = converted(module, {"relax.nn.conv2d": ["CHWN", "OIHW"]})["main"]
    (where,) = calls(main, "relax.where")
    assert [int(extent) for extent in where.var.ty.shape.values] == list(shape(2))
    assert edges(main) == (["data"], ["gv"], 3)


def test_a_scalar_stays_a_scalar():
    """TVM's inference permutes the axes of a scalar, of which there are none."""
    x = relax.Var("x", relax.TensorType((1, 3), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            results = [
                *(reduce(x) for reduce in (op.max, op.mean, op.min, op.prod)),
                *(reduce(x) for reduce in (op.std, op.sum, op.variance)),
                op.squeeze(bb.emit(op.max(x, [1])), [0]),
            ]
            total = bb.emit(results[0])
            for result in results[1:]:
                total = bb.emit(op.add(total, bb.emit(result)))
            loss = bb.emit_output(total)
        bb.emit_func_output(loss)
    module = converted(bb.get())
    assert not list(calls(module["main"], "relax.permute_dims"))
    relax.transform.Gradient("main")(module)


def test_a_result_of_unknown_rank_stays():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    extents = relax.Var("extents", relax.ShapeType(ndim=-1))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, extents]):
        with bb.dataflow():
            result = bb.emit_output(op.broadcast_to(x, extents))
        bb.emit_func_output(result)
    module = bb.get()
    tvm.ir.assert_structural_equal(converted(module), module)


def test_a_shape_is_written_out():
    """Reading it off a tensor that was converted would bring the axes back in order."""
    n = tirx.Var("n", "int64")
    data = relax.Var("data", relax.TensorType((n, 4, 6, 5), "float32"))
    weight = relax.Var("weight", relax.TensorType((4, 4, 1, 1), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [data, weight]):
        with bb.dataflow():
            x = bb.emit(op.nn.conv2d(data, weight))
            wide = op.nn.pad(x, (0, 0, 0, 0, 1, 1, 0, 2))
            cropped = backward.pad_backward_data(wide, op.shape_of(x), (0, 0, 0, 0, 1, 1, 0, 2))
            share = backward.divide_by_count(op.sum(cropped, [0, 2, 3]), op.shape_of(x), [0, 2, 3])
            result = bb.emit_output(share)
        bb.emit_func_output(result)
    main = converted(bb.get())["main"]
    assert not list(calls(main, "relax.shape_of"))
    assert edges(main) == (["data"], [], 0)
    (pad,) = calls(main, "relax.grad.pad_backward_data")
    assert list(pad.value.args[1].values[1:]) == [6, 5, 4]
    (divide,) = calls(main, "relax.grad.divide_by_count")
    assert list(divide.value.args[1].values[1:]) == [4, 6, 5]
