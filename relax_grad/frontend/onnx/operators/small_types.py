"""Element types of few bits, which TVM does not round as ONNX does."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from tvm import relax

from ....errors import UnsupportedOperatorError
from ....ir.compat import constant_value
from .converters import Refused

#: Element types of less than 8 bits, or of 8-bit floating-point numbers. TVM drops casts to them.
_PACKED = ("int4", "uint4", "int2", "uint2")
_SMALL_TYPES = ("float4_", "float6_", "float8_", "int4", "uint4", "int2", "uint2")


def check_stored(tensor: onnx.TensorProto) -> None:
    """Refuse a constant of a type of which several numbers share a byte."""
    dtype = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    if dtype in _PACKED:
        raise UnsupportedOperatorError(
            f"the constant {tensor.name!r} has the type {dtype}, whose numbers TVM does not store; "
            "store them in int8 or uint8"
        )


def refuse_small_results(op_name: str, operands: Iterable, result: relax.Expr) -> None:
    """Refuse computed values of small types, and casts of them; constants are folded before."""
    kinds = result.ty.fields if isinstance(result.ty, relax.TupleType) else [result.ty]
    values = [kind for kind in kinds if isinstance(kind, relax.TensorType)]
    if op_name in ("Cast", "CastLike"):
        values += [value.ty for value in operands if _is_computed(value)]
    for kind in values:
        if kind.dtype is not None and str(kind.dtype).startswith(_SMALL_TYPES):
            raise Refused(
                f"it computes values of {kind.dtype}, which are not rounded as ONNX defines it; "
                "leave the cast out, or store constants in this type"
            )


def refuse_small_operands(op_name: str, name: str, operands: Iterable, error: Exception) -> None:
    """Refuse operands of small types, which TVM does not take, by a message that names the type."""
    for value in operands:
        kind = getattr(value, "ty", None)
        if isinstance(kind, relax.TensorType) and str(kind.dtype).startswith(_SMALL_TYPES):
            raise UnsupportedOperatorError(
                f"{op_name} {name!r}: it computes with {kind.dtype}, which TVM does not round as "
                "ONNX defines it; store the numbers in int8, uint8 or a floating-point type"
            ) from error


def _is_computed(value: object) -> bool:
    is_tensor = isinstance(getattr(value, "ty", None), relax.TensorType)
    return is_tensor and constant_value(value) is None
