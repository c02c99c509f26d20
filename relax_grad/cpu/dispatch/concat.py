"""Kernels of concatenations of many tensors, and of splits into many."""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax
from tvm.ir import Op

from ...ir.compat import dtype_of
from ...ir.shapes import known_extents
from ..kernel.movement.concat import concat, split
from .registry import CallSite, Kernel, all_known, kernel_for

#: The fewest operands that have a kernel: concatenations of fewer are fused with element-wise
#: neighbours.
_MANY = 6

_ZEROS = Op.get("relax.zeros")

#: The fewest parts that have a kernel of a split. A loop for each part is as fast, but fusing it
#: makes long functions.
_PARTS = 16

#: The kinds of dtypes whose elements can be copied byte by byte.
_KINDS = ("float", "int", "uint", "bool")


@kernel_for("relax.concat", in_halves=False)
def concatenation(site: CallSite) -> Kernel | None:
    """Return the kernel of a concatenation of many tensors."""
    operands, kind = site.call.args[0], site.call.ty
    value = site.lookup(operands) if isinstance(operands, relax.Var) else operands
    if not isinstance(value, relax.Tuple) or not _is_copied(kind):
        return None
    dtype = dtype_of(kind)
    operands = [operand for operand in value.fields if not _is_empty(operand)]
    shapes = all_known(site.shape(operand, dtype) for operand in [*operands, site.call])
    if len(operands) < _MANY or shapes is None:
        return None
    axis = int(site.call.attrs.axis or 0)
    zeros = [i for i, operand in enumerate(operands) if _is_zero(operand, site)]
    generator = partial(concat, axis % len(shapes[-1]), shapes, zeros, dtype, site.cpu)
    return Kernel(generator, [operand for i, operand in enumerate(operands) if i not in zeros])


@kernel_for("relax.split", in_halves=False)
def division(site: CallSite) -> Kernel | None:
    """Return the kernel of a split into many tensors."""
    operand, kind = site.call.args[0], site.call.ty
    # A split into one part has the type of a tensor.
    fields = kind.fields if isinstance(kind, relax.TupleType) else []
    if len(fields) < _PARTS or not _is_copied(operand.ty):
        return None
    dtype = dtype_of(operand.ty)
    parts = [relax.Var("part", field) for field in fields]
    shapes = all_known(site.shape(tensor, dtype) for tensor in [*parts, operand])
    if shapes is None:
        return None
    generator = partial(split, int(site.call.attrs.axis) % len(shapes[-1]), shapes, dtype, site.cpu)
    return Kernel(generator, [operand])


def _is_copied(kind: relax.Type) -> bool:
    """Tell whether the elements of a tensor are whole bytes."""
    if not isinstance(kind, relax.TensorType) or kind.dtype is None:
        return False
    dtype = tvm.DataType(dtype_of(kind))
    is_known = str(dtype).rstrip("0123456789") in _KINDS
    return is_known and dtype.lanes == 1 and (dtype.bits % 8 == 0 or str(dtype) == "bool")


def _is_empty(operand: relax.Expr) -> bool:
    """Tell whether a tensor is known to have no element."""
    return any(getattr(extent, "value", None) == 0 for extent in known_extents(operand.ty) or ())


def _is_zero(operand: relax.Expr, site: CallSite) -> bool:
    value = site.lookup(operand) if isinstance(operand, relax.Var) else operand
    return isinstance(value, relax.Call) and value.op == _ZEROS
