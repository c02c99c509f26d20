"""Functions that stand for kernels that are not generated yet."""

from __future__ import annotations

from collections.abc import Sequence

import tvm.tirx.script.builder as T
from tvm import relax, tirx
from tvm_ffi import structural_equal

from ...ir.compat import dtype_of
from ..kernel.builder import prim_func

#: The function that a declaration calls. Nothing defines it, so that a program with a declaration does not link.
UNDEFINED = "relax_grad_kernel_that_is_not_generated"


class Extents:
    """The extents of tensors that a kernel takes: a symbolic one is a variable of int32, one for each expression."""

    def __init__(self):
        self._symbols: list[tuple[tirx.PrimExpr, tirx.Var]] = []

    def of(self, extent: tirx.PrimExpr) -> int | tirx.Var:
        """Return an extent as a kernel takes it."""
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        for known, variable in self._symbols:
            if structural_equal(known, extent):
                return variable
        variable = tirx.Var(f"n{len(self._symbols)}", "int32")
        self._symbols.append((extent, variable))
        return variable


def declaration(
    types: Sequence[relax.Type], shapes: Sequence[Sequence[int | tirx.PrimExpr]] | None = None
) -> tirx.PrimFunc | None:
    """Return a function with the parameters and the attributes of a kernel, which does not link.

    Parameters
    ----------
    types : Sequence[relax.Type]
        The types of the tensors that the kernel is called with, its results last.
    shapes : Sequence, optional
        The shapes of the kernel's parameters, where they are not those of the types.

    Returns
    -------
    function : tirx.PrimFunc or None
        None if a shape is unknown.
    """
    extents, params = Extents(), []
    for i, kind in enumerate(types):
        if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
            return None
        known = [extents.of(extent) for extent in kind.shape.values]
        shape = known if shapes is None else shapes[i]
        params.append((f"p{i}", shape, dtype_of(kind)))

    def body(*_):
        T.evaluate(tirx.call_extern("int32", UNDEFINED))

    return prim_func("declaration", params, body).without_attr("global_symbol")
