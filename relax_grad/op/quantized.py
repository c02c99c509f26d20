"""Products with weights of 8 and 4 bits, quantised by groups along the axis that is summed over.

A weight of shape (outputs, inputs) is stored as ``(outputs, groups, width)``. Its rows are padded
to whole groups.

=========  ==============================  ===========================  =======================
dtype      elements                        numbers of a group           default zero point
=========  ==============================  ===========================  =======================
``int8``   a number each                   ``width``                    0
``uint8``  two numbers of 4 bits each,     ``2 * width``                8
           the lower bits first
=========  ==============================  ===========================  =======================

The element of a number q is ``(q - zero_point) * scale``, with one scale for each group. This is
the layout of the operator ``MatMulNBits`` of ONNX Runtime, whose numbers of 8 bits begin at 0
instead of -128.
"""

from __future__ import annotations

from typing import NamedTuple

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import Analyzer, dtype_of
from ._infer import check_shape, shape_text, shape_values, tensor_type, type_of_shape
from .declare import Shape, as_shape, declare_op

#: The numbers in an element of a weight, by its dtype.
NUMBERS = {"int8": 1, "uint8": 2}

#: The zero point of weights without one, by their dtype.
ZERO_POINTS = {"int8": 0, "uint8": 8}


class Groups(NamedTuple):
    """The groups of a quantised weight.

    Attributes
    ----------
    outputs : tirx.PrimExpr
        The rows.
    number : int
        The groups of a row.
    size : int
        The numbers of a group.
    """

    outputs: tirx.PrimExpr
    number: int
    size: int

    @staticmethod
    def of(weight: relax.Expr) -> Groups:
        """Return the groups of a weight of known shape."""
        outputs, count, width = weight.ty.shape.values
        return Groups(outputs, int(count), int(width) * NUMBERS[dtype_of(weight.ty)])


def quantized_matmul(
    data: relax.Expr,
    weight: relax.Expr,
    scale: relax.Expr,
    zero_point: relax.Expr | None = None,
) -> relax.Call:
    """Product of data and a transposed weight of 8 or 4 bits:
    ``data @ ((weight - zero_point) * scale)^T``.

    Parameters
    ----------
    data : relax.Expr
        The data, ``(..., inputs)``.
    weight : relax.Expr
        The numbers, ``(outputs, groups, width)``: of int8, one in each element; of uint8, two of 4
        bits in each element, the lower bits first. The last group may be longer than the rest of
        ``inputs``.
    scale : relax.Expr
        The scales, ``(outputs, groups)``, of any floating-point dtype.
    zero_point : relax.Expr, optional
        The numbers that stand for 0, ``(outputs, groups)``, of the dtype of ``scale``, or of that
        of ``weight`` with one in each element. By default 0 for int8 and 8 for uint8.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``(..., outputs)`` and the dtype of ``data``, accumulated in float32 at
        least.

    Notes
    -----
    The operator ``MatMulNBits`` of ONNX Runtime has this layout; its numbers of 8 bits are larger
    by 128.
    """
    return relax.Call(
        Op.get("relax.grad.quantized_matmul"), [data, weight, scale, *_given(zero_point)]
    )


def quantized_matmul_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    weight: relax.Expr,
    scale: relax.Expr,
    zero_point: relax.Expr | None = None,
) -> relax.Call:
    """Gradient of quantized_matmul with respect to its data:
    ``output_grad @ ((weight - zero_point) * scale)``.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the product, ``(..., outputs)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data, ``(..., inputs)``.
    weight, scale, zero_point
        As for :func:`quantized_matmul`.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``, accumulated in float32 at
        least.
    """
    return relax.Call(
        Op.get("relax.grad.quantized_matmul_backward_data"),
        [output_grad, as_shape(data_shape), weight, scale, *_given(zero_point)],
    )


def _given(zero_point: relax.Expr | None) -> list[relax.Expr]:
    return [] if zero_point is None else [zero_point]


def _infer_product(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data = _floats(call, 0, "data")
    if not isinstance(data.shape, relax.ShapeExpr) or data.ndim < 1:
        raise ValueError(
            f"{call.op.name}: data must have known extents and at least one axis, but its type "
            f"is {data}"
        )
    *outer, inputs = data.shape.values
    outputs = _check_weight(call, 1, "data", inputs)
    return type_of_shape(data, [*outer, outputs], data.ndim)


def _infer_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = _floats(call, 0, "output_grad")
    shape = shape_values(call, 1, "data_shape")
    if not shape:
        raise ValueError(
            f"{call.op.name}: data_shape must have known extents and at least one axis, but it "
            f"is {call.args[1]}"
        )
    outputs = _check_weight(call, 2, "data_shape", shape[-1])
    forward = type_of_shape(output_grad, [*shape[:-1], outputs], len(shape))
    check_shape(call, "output_grad", output_grad, forward)
    return type_of_shape(output_grad, shape, len(shape))


def _floats(call: relax.Call, index: int, name: str) -> relax.TensorType:
    kind = tensor_type(call, index, name)
    if kind.dtype is None or not dtype_of(kind).startswith(("float", "bfloat")):
        raise ValueError(
            f"{call.op.name}: {name} must be of floating-point numbers, but its type is {kind}"
        )
    return kind


def _check_weight(call: relax.Call, index: int, owner: str, inputs: tirx.PrimExpr) -> tirx.PrimExpr:
    """Check a weight, its scales and its zero points, which begin at an argument, and return the
    outputs."""
    weight = tensor_type(call, index, "weight")
    if weight.dtype is None or dtype_of(weight) not in NUMBERS:
        raise ValueError(
            f"{call.op.name}: weight must be of int8, for numbers of 8 bits, or of uint8, for "
            f"two numbers of 4 bits in each element, but its type is {weight}"
        )
    extents = list(weight.shape.values) if isinstance(weight.shape, relax.ShapeExpr) else []
    if len(extents) != 3 or not all(
        isinstance(extent, tirx.IntImm) and int(extent) > 0 for extent in extents[1:]
    ):
        raise ValueError(
            f"{call.op.name}: weight must have the shape (outputs, groups, width), the last two "
            f"of them positive constants, but its type is {weight}"
        )
    outputs, count, size = Groups.of(call.args[index])
    least, most = (count - 1) * size + 1, count * size
    if not isinstance(inputs, tirx.IntImm) or not least <= int(inputs) <= most:
        raise ValueError(
            f"{call.op.name}: {owner} must have a last extent from {least} to {most}, for the "
            f"{count} groups of {size} in a row of weight, but it is "
            f"{getattr(inputs, 'value', inputs)}"
        )
    scale = _floats(call, index + 1, "scale")
    _check_groups(call, "scale", scale, [outputs, extents[1]])
    if len(call.args) > index + 2:
        zero_point = tensor_type(call, index + 2, "zero_point")
        allowed = [dtype_of(scale), dtype_of(weight)]
        if zero_point.dtype is None or dtype_of(zero_point) not in allowed:
            raise ValueError(
                f"{call.op.name}: zero_point must be of {allowed[0]}, as scale, or of "
                f"{allowed[1]}, as weight, but its type is {zero_point}"
            )
        _check_groups(call, "zero_point", zero_point, [outputs, extents[1]])
    return outputs


def _check_groups(call: relax.Call, name: str, kind: relax.TensorType, wanted: list) -> None:
    known, prove = isinstance(kind.shape, relax.ShapeExpr), Analyzer().can_prove_equal
    if not known or len(kind.shape.values) != 2 or not all(map(prove, kind.shape.values, wanted)):
        raise ValueError(
            f"{call.op.name}: {name} must have the shape {shape_text(wanted)}, one element for "
            f"each group of weight, but its type is {kind}"
        )


_WEIGHT = [
    ("weight", "Tensor", "The numbers of 8 bits, or two of 4 bits in each element."),
    ("scale", "Tensor", "The scales of the groups."),
    ("zero_point", "Optional[Tensor]", "The numbers that stand for 0."),
]

declare_op(
    "quantized_matmul",
    [("data", "Tensor", "The data."), *_WEIGHT],
    _infer_product,
    quantized_matmul,
)
declare_op(
    "quantized_matmul_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the product."),
        ("data_shape", "Shape", "The shape of the data."),
        *_WEIGHT,
    ],
    _infer_backward,
    quantized_matmul_backward_data,
)
