"""ConvertLayout before and after differentiation: equal results, and transpositions only at the
edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from layouts import CHANNELS_LAST, calls, converted, edges, tidied, transpositions
from tvm.relax import op, transform
from tvm.script import from_source

from relax_grad.testing._program import (
    Program,
    compile_together,
    differentiate,
    first_order,
    make_arguments,
    next_order,
)

TARGET = {"kind": "llvm", "opt-level": 0}


def rng():
    return np.random.default_rng(11)


def network(images, kernel, gamma, beta, residual, bias, weight, mean, var, labels):
    """Return the loss of a small residual network."""
    x = op.nn.conv2d(images, kernel, padding=1)
    x = op.nn.relu(op.nn.batch_norm(x, gamma, beta, mean, var, axis=1, training=True)[0])
    x = op.nn.max_pool2d(x, 2, strides=2)
    x = op.add(x, op.nn.relu(op.add(op.nn.conv2d(x, residual, padding=1), bias)))
    x = op.nn.avg_pool2d(x, 2, strides=1)
    x = op.nn.adaptive_avg_pool2d(x, 2)
    return op.nn.nll_loss(op.nn.log_softmax(op.matmul(op.nn.batch_flatten(x), weight)), labels)


def network_inputs() -> list[np.ndarray]:
    normal = rng().normal
    return [
        normal(size=(2, 3, 8, 7)),
        normal(size=(4, 3, 3, 3)),
        rng().uniform(0.5, 1.5, size=4),
        normal(size=4),
        normal(size=(4, 4, 3, 3)),
        normal(size=(1, 4, 1, 1)),
        normal(size=(16, 5)),
        normal(size=4),
        rng().uniform(0.5, 1.5, size=4),
        np.array([4, 1]),
    ]


WRT = [f"x{i}" for i in range(7)]
#: The arguments that a conversion to NHWC and OHWI transposes: the images and the kernels.
CONVERTED = ["x0", "x1", "x4"]


def network_program(batch: str | None = None) -> Program:
    names = {} if batch is None else {0: {0: batch}, 9: {0: batch}}
    return first_order(network, make_arguments(network_inputs(), "float32", names), {}, rng())


def before(program: Program, wrt=WRT, desired=None) -> tvm.IRModule:
    """Convert the program and then differentiate it."""
    return tidied(by_tvm(replace(program, module=converted(program.module, desired)), wrt))


def after(program: Program, wrt=WRT, desired=None, layout_cb=None) -> tvm.IRModule:
    """Differentiate the program and then convert it."""
    return converted(by_tvm(program, wrt), desired, layout_cb)


def by_tvm(program: Program, wrt) -> tvm.IRModule:
    """Differentiate with TVM's pass."""
    return differentiate(program, wrt, through="tvm")


def flat(value) -> list[np.ndarray]:
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def assert_same_results(programs: list[Program], modules: list[list[tvm.IRModule]]) -> None:
    """Assert that the adjoints of each program, different forms of one function, return equal
    results."""
    everything = [module for forms in modules for module in forms]
    run = compile_together(everything, TARGET)
    number = 0
    for program, forms in zip(programs, modules, strict=True):
        results = []
        for _ in forms:
            number += 1
            results.append(flat(run(f"main_{number}_adjoint", program.values())))
        for result in results[1:]:
            for own, expected in zip(result, results[0], strict=True):
                assert np.abs(expected).max() > 0
                np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [None, "n"])
@pytest.mark.parametrize("form", [before, after])
def test_transpositions_remain_at_the_edges(form, batch):
    """Transpositions remain at the parameters, at their gradients, and where the network
    flattens."""
    adjoint = form(network_program(batch))["main_adjoint"]
    parameters, results, inside = edges(adjoint)
    assert parameters == CONVERTED
    assert results == [f"{name}_adjoint_out" for name in CONVERTED]
    assert inside == 2
    (flatten,) = calls(adjoint, "relax.nn.batch_flatten")
    (unflatten,) = calls(adjoint, "relax.reshape")
    moved = transpositions(adjoint)
    assert flatten.value.args[0] in [binding.var for binding in moved]
    assert unflatten.var in [binding.value.args[0] for binding in moved]


def test_the_pass_of_relax_grad_leaves_nothing_to_tidy_before():
    """The conversion alone gives the same edges, except that a parameter may be transposed
    twice."""
    module = transform.ConvertLayout(CHANNELS_LAST)(differentiate(network_program(), WRT))
    parameters, results, inside = edges(module["main_adjoint"])
    assert sorted(set(parameters)) == CONVERTED
    assert results == [f"{name}_adjoint_out" for name in CONVERTED]
    assert inside == 2


@pytest.mark.parametrize("form", [before, after])
def test_convolutions_and_poolings_are_converted(form):
    adjoint = form(network_program())["main_adjoint"]
    convolutions = list(
        calls(
            adjoint,
            "relax.nn.conv2d",
            "relax.grad.conv2d_backward_data",
            "relax.grad.conv2d_backward_weight",
        )
    )
    assert len(convolutions) == 6
    for binding in convolutions:
        attrs = binding.value.attrs
        layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
        assert layouts == ("NHWC", "OHWI", "NHWC")
    poolings = list(
        calls(
            adjoint,
            "relax.grad.max_pool2d_backward",
            "relax.grad.avg_pool2d_backward",
            "relax.grad.adaptive_avg_pool2d_backward",
        )
    )
    assert len(poolings) == 3
    for binding in poolings:
        assert (binding.value.attrs.layout, binding.value.attrs.out_layout) == ("NHWC", "NHWC")


@pytest.mark.parametrize("batch", [None, "n"])
def test_the_gradients_of_the_network_stay(batch):
    program = network_program(batch)
    forms = [by_tvm(program, WRT), before(program), after(program)]
    assert_same_results([program], [forms])


@pytest.mark.parametrize("form", [before, after])
def test_a_converted_network_prints_and_parses(form):
    module = form(network_program())
    tvm.ir.assert_structural_equal(from_source(module.script()), module)


#: The shapes of data and weight, and the attributes.
CONVOLUTIONS = {
    "conv1d": (
        (2, 4, 9),
        (6, 2, 3),
        {"strides": 2, "dilation": 2, "padding": (1, 2), "groups": 2},
    ),
    "conv2d": ((2, 4, 9, 8), (6, 4, 3, 2), {"strides": (2, 3), "padding": (1, 0, 2, 1)}),
    "depthwise conv2d": ((2, 4, 7, 8), (8, 1, 3, 3), {"dilation": (1, 2), "groups": 4}),
    "conv3d": (
        (1, 4, 5, 4, 6),
        (2, 2, 2, 3, 2),
        {"strides": (1, 2, 1), "padding": 1, "groups": 2},
    ),
    "conv2d_transpose": (
        (2, 4, 4, 3),
        (4, 3, 3, 2),
        {"strides": 2, "padding": (1, 0), "output_padding": (1, 0), "groups": 2},
    ),
}
KERNEL_LAST = {
    "relax.nn.conv1d": ["NWC", "WIO"],
    "relax.nn.conv2d": ["NHWC", "HWIO"],
    "relax.nn.conv3d": ["NDHWC", "DHWIO"],
}


PAIR = ["x0", "x1"]


def convolution_program(case: str, names=None) -> Program:
    data, weight, attrs = CONVOLUTIONS[case]
    inputs = [rng().normal(size=size) for size in (data, weight)]
    arguments = make_arguments(inputs, "float32", names or {})
    return first_order(getattr(op.nn, case.split()[-1]), arguments, attrs, rng())


@pytest.mark.parametrize(
    ("desired", "names"),
    [(CHANNELS_LAST, {}), (KERNEL_LAST, {0: {0: "n"}})],
    ids=["OHWI", "HWIO, symbolic"],
)
def test_the_gradients_of_convolutions_stay(desired, names):
    programs, modules = [], []
    for case in CONVOLUTIONS:
        program = convolution_program(case, names)
        programs.append(program)
        first, last = before(program, PAIR, desired), after(program, PAIR, desired)
        modules.append([by_tvm(program, PAIR), first, last])
        assert edges(first["main_adjoint"])[2] == 0
        # The gradient of the result is broadcast from the gradient of the loss in the function's
        # original layout.
        assert edges(last["main_adjoint"])[2] <= 1
    assert_same_results(programs, modules)


@pytest.mark.parametrize(
    ("form", "names", "cases"),
    [
        (before, {}, CONVOLUTIONS),
        (after, {}, CONVOLUTIONS),
        (before, {0: {0: "n"}}, ["conv2d", "conv2d_transpose"]),
    ],
    ids=["before", "after", "before, symbolic"],
)
def test_a_converted_convolution_is_differentiated_again(form, names, cases):
    """The conversion applies to the function before its first differentiation, or to its
    adjoint."""
    programs, modules = [], []
    for case in cases:
        program = convolution_program(case, names)
        plain, other = by_tvm(program, PAIR), form(program, PAIR)
        second = next_order(program, plain, PAIR, rng())
        again = next_order(program, other, PAIR, rng())
        programs.append(second)
        modules.append([by_tvm(second, PAIR), by_tvm(again, PAIR)])
    assert_same_results(programs, modules)


def test_a_symbolic_function_is_converted_between_two_differentiations():
    """The test uses relax_grad's pass: TVM's pass does not accept symbolic shapes that are written
    out."""
    programs, modules = [], []
    for case in ("conv2d", "conv2d_transpose"):
        program = convolution_program(case, {0: {0: "n"}})
        plain, other = differentiate(program, PAIR), converted(differentiate(program, PAIR))
        second = next_order(program, plain, PAIR, rng())
        again = next_order(program, other, PAIR, rng())
        programs.append(second)
        modules.append([differentiate(second, PAIR), differentiate(again, PAIR)])
    assert_same_results(programs, modules)


def test_the_gradient_of_the_gradient_is_converted():
    program = convolution_program("conv2d")
    second = next_order(program, by_tvm(program, PAIR), PAIR, rng())
    adjoint = after(second, PAIR)
    assert_same_results([second], [[by_tvm(second, PAIR), adjoint]])
    names = [f"relax.grad.conv2d_backward_{name}" for name in ("data", "weight")]
    convolutions = list(calls(adjoint["main_adjoint"], "relax.nn.conv2d", *names))
    assert len(convolutions) > 3
    for binding in convolutions:
        assert binding.value.attrs.data_layout == "NHWC"


def test_a_layout_is_asked_for_by_the_name_of_the_backward_operator():
    """An operator without an entry follows the layouts of its tensors."""
    names = ["relax.grad.conv2d_backward_weight", "relax.grad.conv2d_backward_data"]
    program = convolution_program("conv2d")
    module = after(program, PAIR, {names[0]: ["NHWC", "HWIO", "CHWN"]})
    (weight,) = calls(module["main_adjoint"], names[0])
    attrs = weight.value.attrs
    assert (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) == ("NHWC", "HWIO", "CHWN")
    (data,) = calls(module["main_adjoint"], names[1])
    attrs = data.value.attrs
    assert (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) == ("NCHW", "OIHW", "NCHW")
    assert_same_results([program], [[by_tvm(program, PAIR), module]])


def test_a_layout_is_asked_for_by_a_callback():
    def channels_last(call):
        return CHANNELS_LAST if call.op.name.startswith("relax.grad.") else {}

    program = convolution_program("depthwise conv2d")
    module = after(program, PAIR, layout_cb=channels_last)
    (forward,) = calls(module["main_adjoint"], "relax.nn.conv2d")
    assert forward.value.attrs.data_layout == "NCHW"
    names = [f"relax.grad.conv2d_backward_{name}" for name in ("data", "weight")]
    for binding in calls(module["main_adjoint"], *names):
        assert binding.value.attrs.data_layout == "NHWC"
    assert_same_results([program], [[by_tvm(program, PAIR), module]])


def test_packed_channels_are_unpacked_before_a_backward_operator():
    """Backward operators take only layouts that permute the axes.

    TVM does not compile the packed convolution itself.
    """

    def network(images, kernel):
        return op.nn.max_pool2d(op.nn.relu(op.nn.conv2d(images, kernel)), 2)

    inputs = [rng().normal(size=size) for size in ((1, 4, 6, 6), (8, 4, 3, 3))]
    program = first_order(network, make_arguments(inputs, "float32", {}), {}, rng())
    plain = by_tvm(program, PAIR)["main_adjoint"]
    module = after(program, PAIR, {"relax.nn.conv2d": ["NCHW4c", "OIHW4o"]})
    adjoint = module["main_adjoint"]
    (forward,) = calls(adjoint, "relax.nn.conv2d")
    assert forward.value.attrs.data_layout == "NCHW4c"
    (backward,) = calls(adjoint, "relax.grad.conv2d_backward_weight")
    assert backward.value.attrs.data_layout == "NCHW"
    tvm.ir.assert_structural_equal(adjoint.body.ty, plain.body.ty)
