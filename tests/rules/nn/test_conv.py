"""Gradients of the convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx
from tvm.relax.op import grad as backward

from relax_grad.errors import GradientError
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch

conv2d, conv2d_transpose = relax.op.nn.conv2d, relax.op.nn.conv2d_transpose


def normal(*shapes, dtype="float64"):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def transpose(array, plain, layout):
    return np.ascontiguousarray(array.transpose([plain.index(name) for name in layout]))


def torch_pad(torch, data, padding):
    rank = len(padding) // 2
    pads = [padding[axis + end] for axis in reversed(range(rank)) for end in (0, rank)]
    return torch.nn.functional.pad(data, pads)


def torch_conv(strides, padding, dilation, groups):
    def forward(torch, data, weight):
        data = torch_pad(torch, data, padding)
        conv = getattr(torch.nn.functional, f"conv{len(strides)}d")
        return conv(data, weight, None, strides, 0, dilation, groups)

    return forward


def torch_conv_transpose(strides, padding, dilation, groups, output_padding):
    def forward(torch, data, weight):
        conv = getattr(torch.nn.functional, f"conv_transpose{len(strides)}d")
        result = conv(data, weight, None, strides, 0, 0, groups, dilation)
        widened = torch_pad(torch, result, (*(0 for _ in strides), *output_padding))
        return torch_pad(torch, widened, [-size for size in padding])

    return forward


@st.composite
def geometries(draw, transposed=False, ranks=(1, 2, 3)):
    """Draw the shapes of data and weight in the plain layouts, and the attributes."""
    rank = draw(st.sampled_from(ranks))

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    in_group, out_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    most = 3 if rank == 3 else 4
    kernel, strides, dilation = per_axis(1, most), per_axis(1, most), per_axis(1, 3)
    padding = (*per_axis(0, most - 1), *per_axis(0, most - 1))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    attrs = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        attrs["output_padding"] = tuple(draw(st.integers(0, s - 1)) for s in strides)
        needed = [
            -(-(before + after - r - extra + 1) // s) + 1
            for before, after, r, extra, s in zip(
                padding[:rank], padding[rank:], reach, attrs["output_padding"], strides, strict=True
            )
        ]
    else:
        needed = [r - a - b for r, a, b in zip(reach, padding[:rank], padding[rank:], strict=True)]
    extents = [draw(st.integers(max(1, low), max(1, low) + most)) for low in needed]
    channels = (groups * in_group, out_group) if transposed else (groups * out_group, in_group)
    return (batch, groups * in_group, *extents), (*channels, *kernel), attrs


def spatial_axes(geometry):
    return "DHW"[-len(geometry[2]["strides"]) :]


def plain_layouts(geometry, transposed=False):
    """Return PyTorch's layouts of data, weight and result."""
    spatial = spatial_axes(geometry)
    return f"NC{spatial}", f"{'IO' if transposed else 'OI'}{spatial}", f"NC{spatial}"


def with_layouts(geometry):
    """Return a strategy for a geometry with PyTorch's layouts of data, weight and result (None), or
    with any."""
    names = (st.permutations(plain).map("".join) for plain in plain_layouts(geometry))
    return st.tuples(st.just(geometry), st.none() | st.tuples(*names))


def torch_case(geometry, layouts=None, transposed=False):
    """Return a call to compare. PyTorch's call stands between transpositions to and from its
    layouts."""
    data_shape, weight_shape, attrs = geometry
    make, suffix = (torch_conv_transpose, "_transpose") if transposed else (torch_conv, "")
    plain, forward = plain_layouts(geometry, transposed), make(**attrs)
    operator = f"relax.nn.conv{len(data_shape) - 2}d{suffix}"
    arrays = normal(data_shape, weight_shape)
    if layouts is None:
        return TorchCase(operator, arrays, forward, attrs)
    stored = [transpose(*array) for array in zip(arrays, plain[:2], layouts[:2], strict=True)]

    def between(torch, *tensors):
        data, weight = (
            tensor.permute([layout.index(name) for name in names])
            for tensor, names, layout in zip(tensors, plain, layouts, strict=False)
        )
        return forward(torch, data, weight).permute([plain[2].index(name) for name in layouts[2]])

    names = ("data_layout", "kernel_layout", "out_layout")
    return TorchCase(operator, stored, between, {**attrs, **dict(zip(names, layouts, strict=True))})


def backward_case(torch, case, argument):
    """Return the case of the backward operator for one argument of a case, and of its gradient."""
    name = f"{case.fn_or_op.rpartition('.')[2]}_backward_{argument}"
    number = ("data", "weight").index(argument)
    shape, other = case.inputs[number].shape, case.inputs[1 - number]
    output = case.torch_function(torch, *map(torch.from_numpy, case.inputs))

    def in_order(produced, other):
        return (produced, other) if argument == "data" else (other, produced)

    def torch_backward(torch, grad, other):
        produced = torch.zeros(shape, dtype=grad.dtype, requires_grad=True)
        result = case.torch_function(torch, *in_order(produced, other))
        return torch.autograd.grad(result, produced, grad, create_graph=True)[0]

    return TorchCase(
        lambda grad, other: getattr(backward, name)(grad, *in_order(shape, other), **case.attrs),
        [*normal(tuple(output.shape)), other],
        torch_backward,
    )


# conv1d, conv2d, conv3d


def convolutions():
    """Return a strategy for a convolution, or one of its backward operators, in any layouts."""
    case = geometries().flatmap(with_layouts)
    return st.tuples(case, st.sampled_from([None, "data", "weight"]))


def check_convolutions(torch, batch):
    cases = [(torch_case(*case), argument) for case, argument in batch]
    cases = [case if of is None else backward_case(torch, case, of) for case, of in cases]
    check_many_against_torch(cases, target=TARGET)


@at_length(50, derandomize=True)
@given(batches(convolutions()))
def test_conv_same_as_torch(torch, batch):
    check_convolutions(torch, batch)


@pytest.mark.slow
@at_length(1000)
@given(batches(convolutions()))
def test_conv_same_as_torch_at_length(torch, batch):
    check_convolutions(torch, batch)


@pytest.mark.parametrize(
    ("data", "weight", "strides", "padding", "dilation", "groups"),
    [
        pytest.param((1, 2, 3, 3), (2, 2, 5, 5), (1, 1), (1, 1, 1, 1), (1, 1), 1, id="wide kernel"),
        pytest.param((1, 2, 9, 9), (2, 2, 1, 1), (4, 3), (0, 0, 0, 0), (1, 1), 1, id="1x1, stride"),
        pytest.param((2, 4, 5, 5), (12, 1, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 4, id="depthwise"),
        pytest.param((1, 1, 1, 1), (1, 1, 2, 4), (1, 1), (1, 3, 0, 0), (1, 1), 1, id="one element"),
        pytest.param((1, 1, 3, 3), (1, 1, 2, 2), (5, 5), (0, 0, 0, 0), (2, 2), 1, id="one window"),
        pytest.param(
            (1, 1, 2, 2), (1, 1, 1, 1), (1, 1), (3, 2, 4, 1), (1, 1), 1, id="more padding"
        ),
    ],
)
def test_conv2d_edges(torch, data, weight, strides, padding, dilation, groups):
    attrs = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    check_many_against_torch([torch_case((data, weight, attrs))])


@pytest.mark.parametrize(
    ("data_layout", "kernel_layout", "out_layout"),
    [("NHWC", "HWIO", "NHWC"), ("WNCH", "OHWI", "WNCH"), ("NHWC", "WHOI", "CNWH")],
)
def test_conv2d_layouts_at_order_2(data_layout, kernel_layout, out_layout):
    data, weight = normal((2, 4, 5, 4), (2, 2, 3, 2))
    check_gradients(
        "relax.nn.conv2d",
        [transpose(data, "NCHW", data_layout), transpose(weight, "OIHW", kernel_layout)],
        order=2,
        strides=(2, 1),
        padding=(1, 0, 0, 1),
        groups=2,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_layout=out_layout,
    )


def test_conv2d_symbolic_extents_order_3():
    check_gradients(
        "relax.nn.conv2d",
        normal((2, 2, 6, 5), (2, 2, 3, 2)),
        order=3,
        symbolic={0: {0: "n", 2: "h", 3: "w"}},
        strides=(2, 3),
        padding=(1, 1, 0, 1),
        dilation=(1, 2),
    )


def test_conv2d_symbolic_weight():
    check_gradients(
        "relax.nn.conv2d",
        normal((2, 3, 5, 5), (4, 3, 3, 2)),
        symbolic={0: {1: "c"}, 1: {0: "o", 1: "c", 2: "k"}},
        padding=1,
    )


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float16", "float32"), ("float32", "float64")])
def test_conv2d_out_dtype(dtype, out_dtype):
    check_gradients(
        "relax.nn.conv2d",
        normal((2, 3, 5, 4), (2, 3, 3, 2), dtype=dtype),
        # The cotangents have out_dtype, but at order 2 only the precision of the data that they
        # meet.
        order=2,
        rtol=2e-2 if dtype == "float16" else 2e-4,
        out_dtype=out_dtype,
    )


def test_conv2d_accumulates_half_precision_in_float32(run_rule):
    """A sum of 4096 ones stops at 2048 in float16."""

    def ones(*shapes):
        return [np.ones(shape, "float16") for shape in shapes]

    data_grad, _ = run_rule(conv2d, ones((1, 1, 1, 1), (4096, 1, 1, 1)), ones((1, 4096, 1, 1)))
    assert data_grad.item() == 4096
    _, weight_grad = run_rule(conv2d, ones((4, 1, 32, 32), (1, 1, 1, 1)), ones((4, 1, 32, 32)))
    assert weight_grad.item() == 4096


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_conv2d_symbolic_batch_at_several_extents(batch):
    """The extents include the empty batch, whose weight gradient is 0."""
    n = tirx.Var("n", "int64")
    params = [
        relax.Var("x", relax.TensorType((n, 2, 4, 4), "float32")),
        relax.Var("w", relax.TensorType((3, 2, 3, 3), "float32")),
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(conv2d(*params, padding=1))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    inputs = [np.ones((batch, 2, 4, 4), "float32"), np.ones((3, 2, 3, 3), "float32")]
    data_grad, weight_grad = machine["main_adjoint"](*map(tvm.runtime.tensor, inputs))[1]
    assert data_grad.shape == inputs[0].shape
    windows = np.array([[9, 12, 9], [12, 16, 12], [9, 12, 9]])
    np.testing.assert_array_equal(
        weight_grad.numpy(), np.broadcast_to(batch * windows, weight_grad.shape)
    )


def test_conv2d_empty_batch(run_rule):
    inputs = normal((0, 2, 4, 4), (3, 2, 3, 3))
    data_grad, weight_grad = run_rule(conv2d, inputs, normal((0, 3, 2, 2)))
    assert data_grad.shape == (0, 2, 4, 4)
    assert not weight_grad.any()


def operators(function):
    names = []
    relax.analysis.post_order_visit(
        function, lambda e: names.append(e.op.name) if isinstance(e, relax.Call) else None
    )
    return sorted(names)


def rule_operators(operator, *types, **attrs):
    """Return the operators that a rule emits."""
    params = [relax.Var(f"x{i}", tensor_type) for i, tensor_type in enumerate(types)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit(operator(*params, **attrs))
            loss = bb.emit_output(relax.op.sum(result))
        bb.emit_func_output(loss)
    before = operators(bb.get()["main"])
    after = operators(relax.transform.Gradient("main")(bb.get())["main_adjoint"])
    for name in (*before, "relax.ones", "relax.broadcast_to"):  # and the operators of sum's rule
        after.remove(name)
    return after


@pytest.mark.parametrize("rank", [1, 3])
def test_order_3_of_other_ranks(rank):
    shapes = {1: ((1, 2, 5), (2, 2, 2)), 3: ((1, 2, 2, 3, 2), (2, 1, 1, 2, 2))}[rank]
    attrs = {"strides": 2, "padding": 1, "groups": rank // 2 + 1}
    check_gradients(f"relax.nn.conv{rank}d", normal(*shapes), order=3, **attrs)
    shapes = (shapes[0], (2, *shapes[1][1:]))
    check_gradients(f"relax.nn.conv{rank}d_transpose", normal(*shapes), order=3, **attrs)


@pytest.mark.parametrize("rank", [1, 3])
def test_symbolic_extents_of_other_ranks_at_order_2(rank):
    inputs = normal((2, 2, *(3, 2, 4)[:rank]), (2, 2, *(2, 2, 1)[:rank]))
    symbolic = {0: {0: "n", 1 + rank: "w"}}
    attrs = {"strides": 2, "padding": (1, 0, 0, 1, 0, 1)[: 2 * rank], "dilation": 1}
    check_gradients(f"relax.nn.conv{rank}d", inputs, order=2, symbolic=symbolic, **attrs)
    operator = f"relax.nn.conv{rank}d_transpose"
    check_gradients(operator, inputs, order=2, symbolic=symbolic, output_padding=1, **attrs)


@pytest.mark.parametrize("rank", [1, 3])
def test_out_dtype_of_other_ranks(rank):
    inputs = normal((1, 2, *(3, 2, 2)[:rank]), (2, 2, *(2, 2, 1)[:rank]), dtype="float16")
    for suffix in ("", "_transpose"):
        operator = f"relax.nn.conv{rank}d{suffix}"
        check_gradients(operator, inputs, order=2, rtol=2e-2, out_dtype="float32")


def test_conv2d_emits_its_two_operators_and_nothing_else():
    assert rule_operators(
        conv2d,
        relax.TensorType((2, 4, 8, 8), "float16"),
        relax.TensorType((6, 2, 3, 3), "float16"),
        groups=2,
        dilation=2,
        strides=3,
        padding=(1, 2, 3, 4),
    ) == ["relax.grad.conv2d_backward_data", "relax.grad.conv2d_backward_weight"]


@pytest.mark.parametrize("suffix", ["", "_transpose"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_packed_layout_is_refused(rank, suffix):
    layout = f"NC{'DHW'[-rank:]}4c"
    params = [
        relax.Var("x", relax.TensorType((1, 1, *(8,) * rank, 4), "float32")),
        relax.Var("w", relax.TensorType((4, 4, *(3,) * rank), "float32")),
    ]
    operator = getattr(relax.op.nn, f"conv{rank}d{suffix}")
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            y = bb.emit(operator(*params, data_layout=layout))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match=f"_layout must be a permutation .*'{layout}'"):
        relax.transform.Gradient("main")(bb.get())


# conv1d_transpose, conv2d_transpose, conv3d_transpose


@at_length(50, derandomize=True)
@given(batches(geometries(transposed=True).flatmap(with_layouts)))
def test_transpose_same_as_torch(torch, batch):
    check_many_against_torch([torch_case(*case, transposed=True) for case in batch], target=TARGET)


@pytest.mark.slow
@at_length(1000)
@given(batches(geometries(transposed=True).flatmap(with_layouts)))
def test_transpose_same_as_torch_at_length(torch, batch):
    check_many_against_torch([torch_case(*case, transposed=True) for case in batch], target=TARGET)


@pytest.mark.parametrize("output_padding", [(0, 0), (1, 0), (2, 1), (0, 1), (-1, 0), (-2, -1)])
def test_transpose_every_output_padding(output_padding):
    """A positive one adds elements beyond every window, and a negative one crops the result."""
    check_gradients(
        "relax.nn.conv2d_transpose",
        normal((1, 2, 3, 3), (2, 2, 2, 3)),
        strides=(3, 2),
        padding=(0, 1, 1, 0),
        output_padding=output_padding,
    )


def test_transpose_order_3():
    check_gradients(
        "relax.nn.conv2d_transpose",
        normal((1, 4, 3, 2), (4, 1, 2, 3)),
        order=3,
        strides=(2, 1),
        padding=(1, 0, 0, 2),
        dilation=(1, 2),
        groups=2,
    )


def test_transpose_symbolic_extents_at_order_2():
    check_gradients(
        "relax.nn.conv2d_transpose",
        normal((2, 2, 3, 4), (2, 2, 3, 2)),
        order=2,
        symbolic={0: {0: "n", 2: "h", 3: "w"}},
        strides=(2, 3),
        output_padding=(1, 2),
        padding=(1, 0, 1, 0),
    )


@pytest.mark.parametrize(("dtype", "out_dtype"), [("float16", "float32"), ("float32", "float64")])
def test_transpose_out_dtype(dtype, out_dtype):
    check_gradients(
        "relax.nn.conv2d_transpose",
        normal((2, 3, 3, 4), (3, 2, 3, 2), dtype=dtype),
        order=2,
        rtol=2e-2 if dtype == "float16" else 2e-4,
        strides=2,
        out_dtype=out_dtype,
    )


def test_transpose_accumulates_half_precision_in_float32(run_rule):
    def ones(*shapes):
        return [np.ones(shape, "float16") for shape in shapes]

    data_grad, _ = run_rule(
        conv2d_transpose, ones((1, 1, 1, 1), (1, 4096, 1, 1)), ones((1, 4096, 1, 1))
    )
    assert data_grad.item() == 4096
    _, weight_grad = run_rule(
        conv2d_transpose, ones((4, 1, 32, 32), (1, 1, 1, 1)), ones((4, 1, 32, 32))
    )
    assert weight_grad.item() == 4096


def test_transpose_emits_two_operators_and_nothing_else():
    assert rule_operators(
        conv2d_transpose,
        relax.TensorType((2, 4, 8, 8), "float32"),
        relax.TensorType((4, 3, 3, 3), "float32"),
        groups=2,
        strides=3,
        output_padding=(2, 1),
    ) == ["relax.grad.conv2d_backward_weight", "relax.nn.conv2d"]
