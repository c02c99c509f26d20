"""The types and values of the tensors of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from ..ir.arrays import as_array
from ..ir.compat import dtype_of

Tensors = dict[str, tvm.runtime.Tensor]

#: Binds an expression to a variable.
Emit = Callable[[relax.Expr], relax.Var]


def computed_in(ty: relax.TensorType) -> str:
    """Return the dtype in which a parameter is updated."""
    return "float64" if dtype_of(ty) == "float64" else "float32"


def in_dtype(emit: Emit, x: relax.Expr, dtype: str) -> relax.Var:
    """Return a tensor in a dtype.

    A cast to the dtype that a tensor has would be a second name of it, through which a pass would
    have to look for its value.
    """
    value = emit(x)
    return value if dtype_of(value.ty) == dtype else emit(op.astype(value, dtype))


def shape_of(ty: relax.TensorType) -> tuple[int, ...]:
    """Return the constant shape of a tensor."""
    return tuple(int(extent) for extent in ty.shape.values)


def listed(types: Mapping[str, relax.TensorType]) -> list[dict]:
    """Return names, shapes and dtypes for JSON; symbolic extents are their names."""
    return [
        {
            "name": name,
            "shape": [int(e) if hasattr(e, "value") else str(e) for e in ty.shape.values],
            "dtype": dtype_of(ty),
        }
        for name, ty in types.items()
    ]


def finite(x: relax.Expr) -> relax.Expr:
    """Return whether each element is finite. TVM's function does not take bfloat16."""
    is_half = dtype_of(x.ty) == "bfloat16"
    return op.isfinite(op.astype(x, "float32") if is_half else x)


def as_tensor(name: str, value: object, ty: relax.TensorType) -> tvm.runtime.Tensor:
    """Return a copy of a value, or raise ValueError if it has another type."""
    array = as_array(value)
    shape = shape_of(ty)
    if array.shape != shape or str(array.dtype) != dtype_of(ty):
        remedy = f': pass {name}.astype("{dtype_of(ty)}")' if array.shape == shape else ""
        raise ValueError(
            f"{name} must have shape {shape} and dtype {dtype_of(ty)}, but it has {array.shape} "
            f"and {array.dtype}{remedy}"
        )
    return tvm.runtime.tensor(np.asarray(array, order="C"))


def copies_of(tensors: Tensors) -> Tensors:
    return {name: tvm.runtime.tensor(tensor.numpy()) for name, tensor in tensors.items()}


def leaves_of(result: tvm.runtime.Tensor | Iterable) -> list[tvm.runtime.Tensor]:
    """Return the tensors of nested tuples."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [leaf for field in result for leaf in leaves_of(field)]
