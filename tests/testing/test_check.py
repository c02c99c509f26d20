"""The checker finds faults, says where they are, and accepts correct gradients."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax
from wrong_rules import exp_rule, rule_of

from relax_grad.errors import GradientCheckError, GradientError
from relax_grad.ir.compat import dtype_of
from relax_grad.testing import check_gradients
from relax_grad.testing._program import numpy_dtype

X = np.array([[0.5, -1.5, 2.0], [3.0, -0.25, 1.0]])


def test_a_right_gradient_is_measured():
    report = check_gradients("relax.exp", [X], order=3)
    assert report.operator == "relax.exp"
    assert report.order == 3
    assert 0 < report.max_error < 1e-8
    assert report.comparisons > 6


def test_bfloat16_reaches_the_rule_and_an_error_in_it_is_found():
    def change(grad, x):
        # Differences in float64 would detect a change of the rule too, so only bfloat16 gets one
        # here.
        if dtype_of(x.ty) != "bfloat16":
            return grad
        return relax.op.multiply(grad, relax.const(factor, "bfloat16"))

    value = X.astype(numpy_dtype("bfloat16"))
    with rule_of("relax.exp", exp_rule(change)):
        factor = 1.0
        check_gradients("relax.exp", [value], order=2)
        factor = 1.5
        with pytest.raises(GradientCheckError, match="float64 gives"):
            check_gradients("relax.exp", [value], order=2)
        check_gradients("relax.exp", [X], dtypes=("float32", "float16"))
        with pytest.raises(GradientCheckError, match=r"relax\.exp in bfloat16, order 1: .*float64"):
            check_gradients("relax.exp", [X], dtypes=("float32", "bfloat16"))


def test_a_wrong_element_is_named_with_both_numbers():
    wrong = np.ones((2, 3))
    wrong[1, 2] = 1.001
    rule = exp_rule(lambda grad, x: relax.op.multiply(grad, relax.const(wrong, "float64")))
    with rule_of("relax.exp", rule), pytest.raises(GradientCheckError) as failure:
        check_gradients("relax.exp", [X], rtol=1e-5)
    message = str(failure.value)
    assert "relax.exp, order 1: the gradient of x0 is wrong" in message
    assert "[1, 2]" in message
    numbers = re.findall(r"gradient is ([-\d.]+), but central differences give ([-\d.]+)", message)
    computed, expected = map(float, numbers[0])
    assert computed / expected == pytest.approx(1.001, rel=1e-6)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01, float("nan"), float("inf")])
def test_a_wrong_factor_fails(factor):
    rule = exp_rule(lambda grad, x: relax.op.multiply(grad, relax.const(factor, "float64")))
    with rule_of("relax.exp", rule), pytest.raises(GradientCheckError, match="x0"):
        check_gradients("relax.exp", [X])


def test_a_wrong_second_order_fails_at_order_2_only():
    def rule(orig_var, orig_call, output_grad, ctx):
        held = relax.op.grad.no_grad(orig_var)
        return [relax.op.multiply(output_grad, held)]

    with rule_of("relax.exp", rule):
        check_gradients("relax.exp", [X], order=1)
        with pytest.raises(GradientCheckError, match="order 2"):
            check_gradients("relax.exp", [X], order=2)


@pytest.mark.parametrize("through", ["relax_grad", "tvm"])
@pytest.mark.parametrize(
    "change",
    [
        lambda grad, x: relax.op.sum(grad, 0, keepdims=True),
        lambda grad, x: relax.op.astype(grad, "float32"),
    ],
    ids=["shape", "dtype"],
)
def test_a_gradient_of_another_type_fails(change, through):
    """Our pass itself refuses such a gradient."""
    error = GradientError if through == "relax_grad" else GradientCheckError
    with rule_of("relax.exp", exp_rule(change)), pytest.raises(error, match="type"):
        check_gradients("relax.exp", [X], through=through)


def test_a_gradient_that_is_wrong_in_one_dtype_only_fails():
    def rule(orig_var, orig_call, output_grad, ctx):
        grad = relax.op.multiply(output_grad, orig_var)
        if str(orig_var.ty.dtype) == "float32" or "float32" in str(orig_var.ty):
            grad = relax.op.multiply(grad, relax.const(1.01, "float32"))
        return [grad]

    with rule_of("relax.exp", rule):
        check_gradients("relax.exp", [X])
        with pytest.raises(GradientCheckError, match="float64 gives"):
            check_gradients("relax.exp", [X.astype("float32")])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(dtype):
    check_gradients("relax.multiply", [X.astype(dtype), X[0].astype(dtype)], order=2)


def test_one_dtype_without_a_list():
    report = check_gradients("relax.exp", [X], dtypes="float32")
    assert report == check_gradients("relax.exp", [X], dtypes=["float32"])


@pytest.mark.parametrize("dtype", [">f8", "<f8", ">f4"])
def test_byte_orders(dtype):
    assert check_gradients("relax.exp", [X.astype(dtype)]).max_error < 1e-4


def test_a_function_that_goes_through_float32_is_checked_with_a_step_to_match():
    check_gradients(lambda x: relax.op.astype(relax.op.exp(x), "float32"), [X])


def test_half_precision_is_compared_at_the_rounded_values():
    """The gradients of float32 results have the tolerance of float32, and cotangents are rounded to
    half precision."""

    def widened(x):
        return relax.op.square(relax.op.astype(x, "float32"))

    value = X.astype(numpy_dtype("bfloat16"))
    report = check_gradients(widened, [value], order=2, wrt=["x0"])
    assert report.order == 2


def test_functions_tuples_and_several_outputs():
    def function(pair, scale):
        product = relax.op.multiply(pair[0], scale)
        return relax.Tuple([product, relax.op.exp(pair[1])])

    report = check_gradients(function, [(X, X[0]), np.array(0.5)], order=2)
    assert report.max_error < 1e-8


def test_wrt_selects():
    index = np.array([0, 1])
    check_gradients("relax.take", [X, index], axis=0)
    check_gradients("relax.multiply", [X, X[0]], wrt=[1])
    check_gradients(lambda pair: relax.op.concat(pair, 0), [(X, X)], wrt=["x0_1"])


@pytest.mark.parametrize("wrt", [[1], [7], ["y"]])
def test_wrt_that_cannot_be_differentiated_is_an_error(wrt):
    with pytest.raises(
        ValueError, match=r"not a floating-point tensor.*x0: .*float64.*x1: .*int64"
    ):
        check_gradients("relax.take", [X, np.array([0])], wrt=wrt, axis=0)


def test_nothing_to_differentiate_is_an_error():
    with pytest.raises(ValueError, match="no floating-point input"):
        check_gradients("relax.add", [np.array([1]), np.array([2])])


@pytest.mark.parametrize("name", ["relax.nn.conv2", "no_such", "", "relax.op"])
def test_an_unknown_operator_is_an_error(name):
    with pytest.raises(ValueError, match="operator"):
        check_gradients(name, [X])


def test_an_output_of_unknown_shape_is_an_error():
    bounds = [np.array(bound) for bound in ([0, 0], [2, 2], [1, 1])]
    with pytest.raises(ValueError, match=r"whose shape is not known.*relax\.op\.sum"):
        check_gradients("relax.dynamic_strided_slice", [X, *bounds])
    check_gradients(lambda *args: relax.op.sum(relax.op.dynamic_strided_slice(*args)), [X, *bounds])


def test_symbolic_axes():
    check_gradients("relax.multiply", [X, X], symbolic={0: {0: "n"}, 1: {0: "n"}}, order=2)


@pytest.mark.parametrize(
    ("symbolic", "message"),
    [
        ({5: {0: "n"}}, "input 5, which is not an array"),
        ({0: {7: "n"}}, "axis 7 of input 0"),
        ({0: {-1: "n"}}, "axis -1 of input 0"),
        ({0: {0: "n", 1: "n"}}, "'n' to the extents 2 and 3"),
    ],
)
def test_symbolic_axes_that_do_not_exist_are_an_error(symbolic, message):
    with pytest.raises(ValueError, match=message):
        check_gradients("relax.exp", [X], symbolic=symbolic)


@pytest.mark.parametrize("order", [0, -1, 1.5, None])
def test_an_order_that_checks_nothing_is_an_error(order):
    error = ValueError if type(order) is int else TypeError
    with pytest.raises(error, match=r"order must be an? (positive )?integer"):
        check_gradients("relax.exp", [X], order=order)


def split(x):
    return relax.op.split(x, 2, axis=1)[0]


def test_through_the_pass_that_is_named():
    squares = [X[:, :2] ** 2]
    symbolic = {0: {0: "n"}}
    check_gradients(split, squares, order=2, symbolic=symbolic)
    check_gradients(split, squares, order=1, symbolic=symbolic, through="tvm")
    with pytest.raises(KeyError):  # zeros of a symbolic shape for the other part
        check_gradients(split, squares, order=2, symbolic=symbolic, through="tvm")


@pytest.mark.parametrize("dtypes", [(), ("bfloat16",)])
def test_bfloat16_through_tvm_is_an_error(dtypes):
    value = X if dtypes else X.astype(numpy_dtype("bfloat16"))
    with pytest.raises(ValueError, match=r'x0 is in bfloat16.*through="relax_grad"'):
        check_gradients("relax.exp", [value], dtypes=dtypes, through="tvm")


def test_an_unknown_pass_is_an_error():
    with pytest.raises(
        ValueError, match="through must be one of relax_grad, tvm, but it is 'torch'"
    ):
        check_gradients("relax.exp", [X], through="torch")


def test_a_number_as_operator_is_an_error():
    with pytest.raises(TypeError, match="name of an operator or a function"):
        check_gradients(3, [X])


@pytest.mark.parametrize("inputs", [[tvm.runtime.tensor(X)], [X, (tvm.runtime.tensor(X), X)]])
def test_a_tensor_of_another_library_is_an_error(inputs):
    with pytest.raises(
        TypeError, match=r"input x\w+ must be a NumPy array, but it is a tvm\.runtime"
    ):
        check_gradients("relax.exp", inputs)


def test_wrt_takes_one_input_without_a_list():
    for wrt in (0, "x0", [0, 0]):
        check_gradients("relax.multiply", [X, X], wrt=wrt)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1e5])
def test_a_gradient_that_is_silently_zero_fails_at_any_scale(scale):
    def function(x):
        return relax.op.grad.no_grad(relax.op.multiply(x, relax.const(scale, "float64")))

    with pytest.raises(GradientCheckError, match=r"where the gradient is (-)?0, but central"):
        check_gradients(function, [X])


def test_the_element_that_is_not_a_number_is_the_worst():
    with pytest.raises(
        GradientCheckError, match=r"worst element is \[1\], where the gradient is .*inf"
    ):
        check_gradients("relax.sqrt", [np.array([1.0, 0.0, 4.0])])


def test_a_constant_of_the_inputs_own_dtype():
    def function(x):
        return relax.op.multiply(x, relax.const(2.0, "float32"))

    check_gradients(function, [X.astype("float32")], order=2)


def test_empty_tensors():
    report = check_gradients("relax.exp", [np.zeros((0, 3))])
    assert report.comparisons == 0
