"""Casts around kernels, which read and write half precision themselves.

Normalisations and losses of tensors in half precision are computed in float32, and so are
gradients: between casts, which are separate operators. A kernel takes the tensor before a cast,
and widens its elements when it reads them. Where all uses of a result are casts to the same half
precision, the kernel rounds the result itself. Both results have the bits of the casts.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import relax

from ...ir.bindings import used
from ...ir.compat import dtype_of
from ...ir.dtypes import HALVES
from .exchanges import Lookup, is_cast, origin
from .registry import Kernel


def source_of_widened(value: relax.Expr | None) -> relax.Expr | None:
    """Return the tensor in half precision that a value casts to float32, or None for other
    values."""
    if value is None or not is_cast(value) or dtype_of(value.ty) != "float32":
        return None
    kind = value.args[0].ty
    is_half = isinstance(kind, relax.TensorType) and kind.dtype is not None
    return value.args[0] if is_half and dtype_of(kind) in HALVES else None


def before_widening(expr: relax.Expr, lookup: Lookup) -> relax.Expr | None:
    """Return the tensor in half precision that is cast to a tensor of float32, or None if there is
    none."""
    return source_of_widened(origin(expr, lookup))


def before_casts(call: relax.Call, lookup: Lookup) -> relax.Expr | None:
    """Return the tensor that a cast returns unchanged, because it was widened before; None for
    other calls."""
    if not is_cast(call):
        return None
    source = before_widening(call.args[0], lookup)
    return source if source is not None and dtype_of(source.ty) == dtype_of(call.ty) else None


def without_casts(kernel: Kernel, lookup: Lookup) -> Kernel:
    """Return a kernel that takes the tensors before casts to float32."""
    arguments = []
    for argument in kernel.arguments:
        source = before_widening(argument, lookup)
        arguments.append(argument if source is None else source)
    return replace(kernel, arguments=arguments)


def widened(expr: relax.Expr) -> relax.Call:
    """Return the cast of a tensor to float32."""
    return relax.op.astype(expr, "float32")


def type_of_narrowed(kind: relax.TensorType, dtype: str) -> relax.TensorType:
    """Return the type of a tensor after a cast."""
    return relax.TensorType(kind.shape, dtype, kind.vdevice)


class NarrowedResults:
    """The results in a dataflow block that are only cast to half precision.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    """

    def __init__(self, block: relax.DataflowBlock):
        self._uses: dict[relax.Var, set[str | None]] = {}
        self._elements: dict[tuple[relax.Var, int], list[relax.Var]] = {}
        for binding in block.bindings[:]:
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
                place = value.tuple_value, value.index
                self._elements.setdefault(place, []).append(binding.var)
                continue
            dtype = dtype_of(value.ty) if is_cast(value) else None
            for variable in used(value):
                self._uses.setdefault(variable, set()).add(dtype if dtype in HALVES else None)

    def dtype(self, var: relax.Var, index: int) -> str | None:
        """Return the dtype that all uses of a float32 result of the call that a variable is bound
        to are cast to; None if there is none."""
        variables = [var]
        if isinstance(var.ty, relax.TupleType):
            if var in self._uses or not isinstance(var, relax.DataflowVar):
                return None
            variables = self._elements.get((var, index), [])
        dtypes: set[str | None] = set()
        for variable in variables:
            if not isinstance(variable, relax.DataflowVar) or dtype_of(variable.ty) != "float32":
                return None
            dtypes |= self._uses.get(variable, set())
        return dtypes.pop() if len(dtypes) == 1 else None
