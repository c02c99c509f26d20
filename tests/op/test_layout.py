"""Layout inference of each operator, between two convolutions whose layouts are converted."""

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
from relax_grad.testing.samples import sampled_operators, samples

TARGET = {"kind": "llvm", "opt-level": 0}
RNG = np.random.default_rng(5)


def shape(rank: int, *, batch: int = 2, channels: int = 4) -> tuple[int, ...]:
    return (batch, channels, 6, 5, 4)[: rank + 2]


def between_convolutions(rank: int, function):
    """Build a function that applies ``function`` between two convolutions."""
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
    """Return the gradient of a pooling, with the result of the pooling as its output gradient."""
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


def _statistics(bb, x, axes):
    """Return stand-ins for the mean and the reciprocal deviation of a normalization."""
    return [bb.emit(reduce(x, axes, keepdims=True)) for reduce in (op.mean, op.max)]


def _batch_norm(bb, x):
    gradient = bb.emit(op.negative(x))
    mean, rstd, gamma = (bb.emit(reduce(x, [0, 2, 3])) for reduce in (op.mean, op.max, op.min))
    gamma_grad = bb.emit(backward.batch_norm_backward_gamma(gradient, x, mean, rstd, axis=-3))
    return backward.batch_norm_backward_data(
        gradient, x, gamma, mean, rstd, gamma_grad, gamma, axis=-3
    )


def _instance_norm(bb, x):
    settings = {"channel_axis": 1, "axes": [2, -1]}
    mean, rstd = _statistics(bb, x, [2, 3])
    gradient = bb.emit(op.negative(x))
    gamma_grad = bb.emit(backward.instance_norm_backward_gamma(gradient, x, mean, rstd, **settings))
    gamma = relax.const([0.5, 1.5, -1.0, 2.0], "float32")
    return backward.instance_norm_backward_data(
        gradient, x, gamma, mean, rstd, gamma_grad, mean, **settings
    )


def _layer_norm(bb, x):
    """The axes are given in another order than in the data; gamma follows the given order."""
    mean, rstd = _statistics(bb, x, [1, 3])
    gradient = bb.emit(op.negative(x))
    gamma = bb.emit(backward.layer_norm_backward_gamma(gradient, x, mean, rstd, axes=[-1, 1]))
    return backward.layer_norm_backward_data(gradient, x, gamma, mean, rstd, axes=[-1, 1])


def _rms_norm(bb, x):
    _, rstd = _statistics(bb, x, [1, 3])
    gradient = bb.emit(op.negative(x))
    weight = bb.emit(backward.rms_norm_backward_weight(gradient, x, rstd, axes=[-1, 1]))
    return backward.rms_norm_backward_data(gradient, x, weight, rstd, axes=[-1, 1])


def _statistics_of(name, **attrs):
    """Return a normalization by statistics, which the data is multiplied with."""

    def normalized(bb, x):
        value = bb.emit(getattr(backward, f"{name}_norm_statistics")(x, **attrs))
        if isinstance(value.ty, relax.TupleType):
            mean, value = (bb.emit(relax.TupleGetItem(value, i)) for i in range(2))
            value = bb.emit(op.add(mean, value))
        if value.ty.ndim == 1:
            value = bb.emit(op.expand_dims(value, [0, 2, 3]))
        return op.multiply(x, value)

    return 2, normalized


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
    "batch_norm_backward": (2, _batch_norm),
    "instance_norm_backward": (2, _instance_norm),
    "layer_norm_backward": (2, _layer_norm),
    "rms_norm_backward": (2, _rms_norm),
    "batch_norm_statistics": _statistics_of("batch", axis=-3),
    "group_norm_statistics": _statistics_of("group", num_groups=2, channel_axis=1, axes=[2, -1]),
    "instance_norm_statistics": _statistics_of("instance", channel_axis=-3, axes=[3]),
    "layer_norm_statistics": _statistics_of("layer", axes=[-1, 1]),
    "rms_norm_statistics": _statistics_of("rms", axes=[2, 0]),
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


def _inferred() -> set[str]:
    """Return the operators whose layout inference is checked, except convolutions, which have their
    own module."""
    registered = {
        d.op_name
        for d in registry.declarations()
        if d.attr == "FRelaxInferLayout" and d.corrects is None
    }
    convolutions = {name for name in registered if name.startswith("relax.grad.conv")}
    assert len(convolutions) == 6
    return registered - convolutions


def _called(case) -> set[str]:
    """Return the operators that a case calls."""
    return {
        binding.value.op.name
        for block in between_convolutions(*case)["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    }


def _sampled(op_name: str):
    """Return the case of a sample whose arguments are tensors of one shape of rank 3 to 5, or
    None."""
    for sample in samples(op_name) if op_name in sampled_operators() else ():
        shapes = {np.shape(array) for array in sample.inputs}
        rank = len(next(iter(shapes)))
        if sample.function is None and len(shapes) == 1 and rank in (3, 4, 5):
            build = getattr(backward, op_name.removeprefix("relax.grad."))
            factors = [relax.const(i + 0.5, "float32") for i in range(len(sample.inputs))]

            def call(bb, x, build=build, factors=factors, attrs=sample.attrs):
                return build(*(bb.emit(op.multiply(x, factor)) for factor in factors), **attrs)

            return rank - 2, call
    return None


for _name in sorted(_inferred().difference(*map(_called, CASES.values()))):
    if (_case := _sampled(_name)) is not None:
        CASES[_name] = _case


@pytest.fixture(scope="module")
def outcomes():
    """The converted modules, and the results of every case with and without conversion; compiled
    together."""
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
    """Conversion transposes only the parameters and the result, and the numbers are the same."""
    after, values = outcomes
    parameters, results, inside = edges(after[name]["main"])
    rank = CASES[name][0]
    # The kernels have extent 1, so their transposes move nothing.
    # The function returns the result of the second convolution.
    assert (parameters, inside) == (["data"], 0)
    assert len(results) == 1
    (conv, *_) = calls(after[name]["main"], f"relax.nn.conv{rank}d")
    assert conv.value.attrs.data_layout == CHANNELS_LAST[f"relax.nn.conv{rank}d"][0]
    expected, result = values[name]
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6 * largest)


def test_every_layout_inference_has_a_case():
    missing = _inferred().difference(*map(_called, CASES.values()))
    assert sorted(missing) == [], (
        "add a sample of rank 3 with arguments of one shape, or a case here"
    )


def test_orders_of_axes():
    assert first(4) == "ABCD"
    assert order("NCHW", "NHWC") == "ACDB"
    assert order("NHWC", "CHWN") == "DBCA"
    assert "".join(moved("NCHW", "ACDB")) == "NHWC"
    assert moved_axes(1, "ACDB") == moved_axes(-3, "ACDB") == 3
    assert moved_axes([0, -1, 1], "ACDB") == [0, 2, 3]
    assert moved_axes(None, "ACDB") is None


def test_the_layout_of_a_tensor_that_is_broadcast():
    """Its axes must stay the trailing ones."""
    assert trailing("ACDB", 4) == "ACDB"
    assert trailing("ACDB", 3) == "BCA"
    assert trailing("ACDB", 0) == ""
    assert trailing("BCDA", 3) is None


def test_the_layout_that_tensors_share():
    assert chosen(["ABCD", "ACDB", "DCBA"]) == "ACDB"
    assert chosen(["", "CAB", "ABCD"]) == "ABCD"
    assert chosen(["", ""]) == ""


def test_operands_whose_broadcast_needs_the_order_keep_it():
    """With the batch as the last axis, the axes of the condition are not trailing."""
    condition = relax.const(RNG.normal(size=shape(2)[1:]) > 0)
    module = between_convolutions(2, lambda bb, x: op.where(condition, x, op.negative(x)))
    main = converted(module, {"relax.nn.conv2d": ["CHWN", "OIHW"]})["main"]
    (where,) = calls(main, "relax.where")
    assert [int(extent) for extent in where.var.ty.shape.values] == list(shape(2))
    assert edges(main) == (["data"], ["gv"], 3)


def test_a_scalar_stays_a_scalar():
    """TVM's inference permutes the axes of a scalar, although it has none."""
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
    """A shape read from a converted tensor would force the axes back into their original order."""
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
