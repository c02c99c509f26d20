"""The operators of products with weights of 8 and 4 bits: their types, and the calls that they
refuse."""

from __future__ import annotations

import pytest
from calls import type_of
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm_ffi import structural_equal

N, M = (tirx.Var(name, "int64") for name in "nm")


def var(shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def test_types_of_symbolic_rows_and_outputs():
    weight, scale = var([M, 3, 8], "uint8"), var([M, 3], "float32")
    for inputs in (33, 48):
        result_type = type_of(
            backward.quantized_matmul(var([N, 2, inputs], "float16"), weight, scale)
        )
        assert structural_equal(result_type, relax.TensorType([N, 2, M], "float16"))
        for rows in ([], [N], [N, 2]):
            call = backward.quantized_matmul_backward_data(
                var([*rows, M], "float16"), [*rows, inputs], weight, scale, var([M, 3], "uint8")
            )
            assert structural_equal(type_of(call), relax.TensorType([*rows, inputs], "float16"))


def product(data, weight=((4, 2, 8), "int8"), scale=((4, 2), "float32"), *zero_point):
    return backward.quantized_matmul(
        var(*data), var(*weight), var(*scale), *(var(*form) for form in zero_point)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: product(((3, 8),)), "data must have a last extent from 9 to 16, .* but it is 8"),
        (lambda: product(((3, 17),)), "for the 2 groups of 8 in a row of weight, but it is 17"),
        (lambda: product(((3, N),)), "must have a last extent from 9 to 16, .* but it is n"),
        (
            lambda: product(((3, 33),), ((4, 2, 8), "uint8")),
            "a last extent from 17 to 32, for the 2 groups of 16",
        ),
        (lambda: product(((3, 16), "int32")), "data must be of floating-point numbers"),
        (
            lambda: product(((3, 16),), ((4, 2, 8), "int32")),
            "weight must be of int8, .* or of uint8",
        ),
        (
            lambda: product(((3, 16),), ((4, 16), "int8")),
            r"weight must have the shape \(outputs, gr",
        ),
        (
            lambda: product(((3, 16),), ((4, N, 8), "int8")),
            "the last two of them positive constants",
        ),
        (
            lambda: product(((3, 16),), scale=((4, 1), "float32")),
            r"scale must have the shape \(4, 2\), one element for each group of weight",
        ),
        (lambda: product(((3, 16),), scale=((4, 2), "int8")), "scale must be of floating-point"),
        (
            lambda: product(
                ((3, 16),), ((4, 2, 8), "int8"), ((4, 2), "float32"), ((4, 2), "uint8")
            ),
            "zero_point must be of float32, as scale, or of int8, as weight",
        ),
        (
            lambda: product(((3, 16),), ((4, 2, 8), "int8"), ((4, 2), "float32"), ((4,), "int8")),
            r"zero_point must have the shape \(4, 2\)",
        ),
        (
            lambda: backward.quantized_matmul_backward_data(
                var((3, 5)), (3, 16), var((4, 2, 8), "int8"), var((4, 2))
            ),
            r"output_grad must have the shape \(3, 4\)",
        ),
        (
            lambda: backward.quantized_matmul_backward_data(
                var((3, 4)), (3, 99), var((4, 2, 8), "int8"), var((4, 2))
            ),
            "data_shape must have a last extent from 9 to 16",
        ),
    ],
)
def test_refused_calls(call, message):
    with pytest.raises(ValueError, match=f"relax.grad.quantized_matmul.*: .*{message}"):
        type_of(call())
