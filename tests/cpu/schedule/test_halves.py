"""Functions over tensors in half precision are scheduled, and compute in float32: against NumPy in
float64."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import tvm
from programs import build, tensor
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

import relax_grad
from relax_grad.cpu.schedule import schedule
from relax_grad.cpu.schedule._reduce import Reduction
from relax_grad.cpu.target import CPU, host
from relax_grad.errors import ScheduleWarning
from relax_grad.ir.dtypes import HALVES

_DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHAPE = (37, 270)


def rounded(x, dtype: str):
    return x.astype(_DTYPES[dtype]).astype("float64")


def through_half(bb, x, dtype: str):
    wide = op.astype(bb.emit(op.multiply(x, x)), "float32")
    return op.astype(bb.emit(op.astype(bb.emit(wide), dtype)), "float32")


#: Results of two tensors, and the same in NumPy.
CASES = {
    "product": (lambda bb, x, y, _: op.multiply(x, y), lambda x, y, _: x * y),
    "fused functions": (
        lambda bb, x, y, _: op.tanh(bb.emit(op.exp(bb.emit(op.add(x, y))))),
        lambda x, y, _: np.tanh(np.exp(x + y)),
    ),
    "sum of products": (
        lambda bb, x, y, _: op.sum(bb.emit(op.multiply(x, y)), axis=1),
        lambda x, y, _: (x * y).sum(1),
    ),
    "sum of all": (
        lambda bb, x, y, _: op.sum(bb.emit(op.multiply(x, x))),
        lambda x, y, _: (x * x).sum(),
    ),
    "largest": (
        lambda bb, x, y, _: op.max(bb.emit(op.add(x, y)), axis=0),
        lambda x, y, _: (x + y).max(0),
    ),
    "transposed": (
        lambda bb, x, y, _: op.add(bb.emit(op.permute_dims(x)), bb.emit(op.permute_dims(y))),
        lambda x, y, _: (x + y).T,
    ),
    "padded": (
        lambda bb, x, y, _: op.nn.pad(bb.emit(op.exp(x)), [1, 1, 2, 3]),
        lambda x, y, _: np.pad(np.exp(x), ((1, 1), (2, 3))),
    ),
    "chosen": (
        lambda bb, x, y, _: op.where(bb.emit(op.greater(x, y)), x, y),
        lambda x, y, _: np.maximum(x, y),
    ),
    "rounded by a cast": (
        lambda bb, x, y, dtype: through_half(bb, x, dtype),
        lambda x, y, dtype: rounded(x * x, dtype),
    ),
    "functions of rounded functions": (
        lambda bb, x, y, dtype: op.exp(
            bb.emit(through_half(bb, bb.emit(op.tanh(bb.emit(op.astype(y, "float32")))), dtype))
        ),
        lambda x, y, dtype: np.exp(rounded(np.tanh(y) ** 2, dtype)),
    ),
    "sum of rows of rounded numbers": (
        lambda bb, x, y, dtype: op.sum(bb.emit(through_half(bb, x, dtype)), -1),
        lambda x, y, dtype: rounded(x * x, dtype).sum(-1),
    ),
    "sum of columns of rounded numbers": (
        lambda bb, x, y, dtype: op.sum(bb.emit(through_half(bb, x, dtype)), 0),
        lambda x, y, dtype: rounded(x * x, dtype).sum(0),
    ),
    "largest of rounded numbers": (
        lambda bb, x, y, dtype: op.max(bb.emit(through_half(bb, x, dtype))),
        lambda x, y, dtype: rounded(x * x, dtype).max(),
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
def test_results_have_one_rounding(dtype):
    half = _DTYPES[dtype]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=SHAPE).astype(half) for _ in "xy"]
    params = [tensor(name, SHAPE, dtype) for name in "xy"]

    def body(bb, x, y):
        return relax.Tuple([bb.emit(make(bb, x, y, dtype)) for make, _ in CASES.values()])

    with warnings.catch_warnings():
        warnings.simplefilter("error", ScheduleWarning)
        program = tvm.compile(
            build(params, body), relax_grad.target.host(), relax_pipeline="relax_grad"
        )
    tensors = [tvm.runtime.empty(x.shape, x.dtype.name).copyfrom(x) for x in values]
    results = relax.VirtualMachine(program, tvm.cpu())["main"](*tensors)
    epsilon = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for (name, (_, reference)), result in zip(CASES.items(), results, strict=True):
        wanted = reference(*(x.astype("float64") for x in values), dtype)
        # Half an epsilon of one rounding, and the error of float32's sums.
        allowed = 1.01 * epsilon * np.abs(wanted) + 2e-5
        error = np.abs(result.numpy().astype("float64") - wanted)
        assert (error <= allowed).all(), f"{name}: {(error - allowed).max()}"


def test_rounding_to_bfloat16():
    """Ties go to even, NaN stays NaN, and large numbers become infinite."""
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -3.4e38, np.inf, 1e-40], "float32")
    nan = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001], "uint32").view("float32")
    values = np.concatenate([ties, nan, np.linspace(-3, 3, 99, dtype="float32")])
    module = build(
        [tensor("x", values.shape, "float32")],
        lambda bb, x: op.astype(bb.emit(op.add(x, x)), "bfloat16"),
    )
    program = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    result = relax.VirtualMachine(program, tvm.cpu())["main"](tvm.runtime.tensor(values)).numpy()
    with np.errstate(all="ignore"):
        wanted = (values + values).astype(ml_dtypes.bfloat16)
    is_number = ~np.isnan(values)
    assert np.isnan(result[~is_number].astype("float32")).all()
    np.testing.assert_array_equal(
        result[is_number].view("uint16"), wanted[is_number].view("uint16")
    )


def test_a_product_from_a_rounded_start():
    """Also the start and the terms of a reduction over tensors in half precision are rounded."""
    x = (np.random.default_rng(0).normal(size=(6, 40)) / 100).astype(ml_dtypes.bfloat16)
    operand = tvm.runtime.empty(x.shape, "bfloat16").copyfrom(x)
    result = tvm.runtime.empty((6,), "bfloat16")
    tvm.compile(schedule(products_of_rounded(), CPU.of(host())), host())(operand, result)
    terms = (x.astype("float32") + np.float32(1.003)).astype(ml_dtypes.bfloat16).astype("float64")
    wanted = terms.prod(1) * float(ml_dtypes.bfloat16(1.003))
    np.testing.assert_allclose(result.numpy().astype("float64"), wanted, rtol=2.0**-8)


def test_names_without_arithmetic_are_errors(monkeypatch):
    """A compiled function never calls a name that exists in the scheduler only."""
    monkeypatch.setattr(Reduction, "arithmetic", lambda self, value: value)
    with pytest.raises(NotImplementedError, match=r"emitted for relax_grad\.bfloat16_bits"):
        schedule(products_of_rounded(), CPU.of(host()))


def products_of_rounded() -> tirx.PrimFunc:
    """Return a function of tensor expressions that rounds in a reduction."""

    @T.prim_func(s_tir=True)
    def products(x: T.Buffer((6, 40), "bfloat16"), y: T.Buffer((6,), "bfloat16")):
        for i, k in T.grid(6, 40):
            with T.sblock("products"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    y[vi] = T.Cast("bfloat16", T.float32(1.003))
                y[vi] = y[vi] * T.Cast("bfloat16", T.Cast("float32", x[vi, vk]) + T.float32(1.003))

    return products.with_attr("global_symbol", "products")
