"""Gradients of quantization: straight through the rounding, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import params_of
from sweep import TARGET
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import check_gradients


def differentiate(build, values, wrt):
    """Differentiate ``sum(build(bb, *params))``, and return the module and its parameters."""
    params = params_of(values)
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit(build(bb, *params))
            loss = bb.emit_output(relax.op.sum(relax.op.astype(result, "float32")))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main", [params[i] for i in wrt])(bb.get())


def gradients(build, values, wrt):
    module = differentiate(build, values, wrt)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    grads = machine["main_adjoint"](*map(tvm.runtime.tensor, values))[1]
    return [tensor.numpy() for tensor in grads]


def fake_quantize(out_dtype, axis=-1, dtype="float32"):
    def build(bb, x, scale, zero_point, weight):
        quantized = bb.emit(relax.op.quantize(x, scale, zero_point, axis, out_dtype))
        restored = bb.emit(relax.op.dequantize(quantized, scale, zero_point, axis, dtype))
        return relax.op.multiply(restored, weight)

    return build


@pytest.mark.parametrize(
    ("out_dtype", "low", "high"),
    [("int8", -128, 127), ("uint8", 0, 255), ("int16", -(2**15), 2**15 - 1), ("uint16", 0, 65535)],
)
def test_pair_is_torchs_learnable_fake_quantize(torch, out_dtype, low, high):
    rng = np.random.default_rng(0)
    x = rng.uniform(-60, 60, (4, 5)).astype("float32")
    x[0] *= 1000  # clipped
    scale, zero_point = np.float32([0.37]), np.array([7], "int32")
    weight = rng.normal(size=x.shape).astype("float32")
    slopes = gradients(fake_quantize(out_dtype), [x, scale, zero_point, weight], [0, 1])
    leaves = [torch.tensor(value, requires_grad=True) for value in (x, scale)]
    offset = torch.tensor(zero_point, dtype=torch.float32)
    result = torch._fake_quantize_learnable_per_tensor_affine(*leaves, offset, low, high, 1.0)
    (result * torch.from_numpy(weight)).sum().backward()
    for name, value, leaf in zip("xs", slopes, leaves, strict=True):
        expected = leaf.grad.numpy()
        np.testing.assert_allclose(
            value, expected, 1e-5, 1e-5 * np.abs(expected).max(), err_msg=name
        )


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_scale_for_each_channel(torch, axis):
    rng = np.random.default_rng(1)
    x = rng.uniform(-90, 90, (3, 4)).astype("float32")
    channels = x.shape[axis]
    scale = rng.uniform(0.3, 0.9, channels).astype("float32")
    zero_point = rng.integers(-5, 5, channels).astype("int8")
    weight = rng.normal(size=x.shape).astype("float32")
    slopes = gradients(fake_quantize("int8", axis), [x, scale, zero_point, weight], [0, 1])
    leaves = [torch.tensor(value, requires_grad=True) for value in (x, scale)]
    offset = torch.tensor(zero_point, dtype=torch.float32)
    result = torch._fake_quantize_learnable_per_channel_affine(
        *leaves, offset, axis % 2, -128, 127, 1.0
    )
    (result * torch.from_numpy(weight)).sum().backward()
    for value, leaf in zip(slopes, leaves, strict=True):
        np.testing.assert_allclose(value, leaf.grad.numpy(), 1e-5, 1e-3)


def test_bounds_of_the_range_pass_the_gradient_and_ties_round_as_the_forward():
    # -128.5 rounds to -128 inside the range, and 127.5 rounds to 128 outside of it.
    x = np.float32([-129, -128.5, -128, 127, 127.5, 128, np.nan, np.inf])
    values = [x, np.float32(1), np.array(0, "int8"), np.ones(8, "float32")]
    (slope,) = gradients(fake_quantize("int8"), values, [0])
    assert slope.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_without_axes(shape, axis):
    if tvm.__version__.startswith("0.26."):
        pytest.skip("TVM 0.26 refuses an axis of a 0-d tensor")
    for x, expected in ((0.33, [1, 3 - 3.3]), (100, [0, 127])):
        zero, unit = np.array(0, "int8"), np.ones((), "float32")
        values = [np.array(x, "float32"), np.full(shape, 0.1, "float32"), zero, unit]
        slopes = gradients(fake_quantize("int8", axis), values, [0, 1])
        assert [slope.shape for slope in slopes] == [(), shape]
        np.testing.assert_allclose([slope.item() for slope in slopes], expected, atol=1e-6)


@pytest.mark.parametrize(("out_dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_float8(out_dtype, largest):
    x = np.float32(
        [-2 * largest, -largest, -0.3, 1.7, largest, 1.1 * largest]
    )  # TVM reads 0 as 2**-7
    values = [x, np.float32([1]), np.array([0], "int8"), np.float32([1, 2, 3, 4, 5, 6])]
    x_grad, scale_grad = gradients(fake_quantize(out_dtype), values, [0, 1])
    assert x_grad.tolist() == [0, 2, 3, 4, 5, 0]
    # q where x is clipped; otherwise the error of the cast to float8.
    expected = 5 * largest + 3 * (-0.3125 + 0.3) + 4 * (1.75 - 1.7)
    np.testing.assert_allclose(scale_grad, [expected], rtol=1e-6)


def test_half_precision():
    rng = np.random.default_rng(2)
    x = rng.uniform(-2, 2, 4096).astype("float16")
    values = [x, np.float16(0.25), np.array(0, "int8"), np.ones(4096, "float16")]
    x_grad, scale_grad = gradients(fake_quantize("int8", dtype="float16"), values, [0, 1])
    assert (x_grad.dtype, scale_grad.dtype) == ("float16", "float16")
    assert (x_grad == 1).all()
    wide = x.astype("float64") / 0.25
    np.testing.assert_allclose(scale_grad, np.sum(np.round(wide) - wide), rtol=2e-3, atol=2e-2)


def test_floating_zero_point():
    x = np.float32([-500, -1.2, 0.4, 500])
    weight = np.float32([1, 2, 4, 8])
    values = [x, np.float32(0.5), np.float16(3), weight]
    (slope,) = gradients(fake_quantize("int8"), values, [2])
    # A shift of the levels moves only clipped values: y = scale * (bound - zero_point).
    assert slope.dtype == "float16"
    assert slope.tolist() == -0.5 * (1 + 8)


def test_second_order_of_the_pair():
    """In the range the pair is straight through the identity, whose second derivatives are 0."""

    def build(bb, x, scale, zero_point, weight):
        restored = bb.emit(fake_quantize("int8")(bb, x, scale, zero_point, weight))
        return relax.op.multiply(restored, restored)

    values = [np.float32([0.6, 70]), np.float32(0.5), np.array(0, "int8"), np.ones(2, "float32")]
    module = differentiate(build, values, [0, 1])
    adjoint = relax.utils.copy_with_new_vars(module["main_adjoint"])
    (block,) = adjoint.body.blocks
    x_grad, scale_grad = adjoint.body.body.fields[1].fields
    bb = relax.BlockBuilder()
    with bb.function("main", adjoint.params):
        with bb.dataflow():
            for binding in block.bindings:
                bb.emit_normalized(binding)
            loss = bb.emit_output(relax.op.add(relax.op.sum(x_grad), scale_grad))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", adjoint.params[:2])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    slopes = machine["main_adjoint"](*map(tvm.runtime.tensor, values))[1]
    # With y = f(x, s) per element, L = sum of y**2; y is 0.5 and 63.5, the second clipped.
    # dL/dx = 2 y f_x and dL/ds = 2 y f_s; f_x = 1, 0 and f_s = round(x/s) - x/s = -0.2, then 127,
    # whose own derivatives are 0.
    np.testing.assert_allclose(slopes[0].numpy(), [2 * 1 + 2 * 1 * -0.2, 0], rtol=1e-5)
    np.testing.assert_allclose(slopes[1].numpy(), 2 * -0.2 + 2 * 0.04 + 2 * 127**2, rtol=1e-5)


def test_two_readers_of_one_quantized_tensor():
    def build(bb, x):
        scale, zero = relax.const(1.0), relax.const(0, "int8")
        quantized = bb.emit(relax.op.quantize(x, scale, zero))
        single = bb.emit(relax.op.dequantize(quantized, scale, zero))
        half = bb.emit(relax.op.dequantize(quantized, scale, zero, out_dtype="float16"))
        cast = bb.emit(relax.op.astype(quantized, "float32"))
        return relax.op.add(relax.op.add(single, cast), relax.op.astype(half, "float32"))

    (slope,) = gradients(build, [np.float32([0.3, 200])], [0])
    assert slope.tolist() == [2, 0]


def test_integers_of_other_origin_have_no_gradient():
    def build(bb, x, scale):
        zero = relax.const(0, "int8")
        levels = bb.emit(relax.op.astype(x, "int8"))
        return relax.op.dequantize(bb.emit(relax.op.abs(levels)), scale, zero)

    x_grad, scale_grad = gradients(build, [np.float32([-3.5, 2]), np.float32(0.5)], [0, 1])
    assert (x_grad.tolist(), scale_grad.tolist()) == ([0, 0], 5)


def test_floating_data_of_dequantize():
    def function(data, scale):
        return relax.op.dequantize(data, scale, relax.const(3, "int8"), 0)

    rng = np.random.default_rng(0)
    data, scale = (rng.uniform(1, 2, shape).astype("float32") for shape in ((2, 3), (2,)))
    check_gradients(function, [data, scale], order=2)


def test_an_operator_between_the_two_is_refused():
    def build(bb, x):
        scale, zero = relax.const(1.0), relax.const(0, "int8")
        quantized = bb.emit(relax.op.quantize(x, scale, zero))
        moved = bb.emit(relax.op.permute_dims(quantized))
        return relax.op.dequantize(moved, scale, zero)

    with pytest.raises(
        GradientError, match=r"relax\.dequantize.*dequantize directly after quantize"
    ):
        differentiate(build, [np.ones((2, 3), "float32")], [0])
