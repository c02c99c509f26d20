"""Declarations: placeholder functions for kernels that are generated later."""

from __future__ import annotations

from collections.abc import Sequence

import tvm.tirx.script.builder as T
from tvm import relax, tirx
from tvm_ffi import structural_equal

from ...ir.compat import dtype_of
from ...ir.shapes import known_extents
from ..kernel.language.builder import prim_func

#: The external function that a declaration calls. It is undefined, so that a program with a
#: declaration does not link.
UNDEFINED = "relax_grad_kernel_that_is_not_generated"


class Extents:
    """The extents of a kernel's tensors: each symbolic expression becomes one variable of int32."""

    def __init__(self) -> None:
        self._symbols: list[tuple[tirx.PrimExpr, tirx.Var]] = []

    def of(self, extent: tirx.PrimExpr) -> int | tirx.Var:
        """Return an extent as an integer, or the variable for a symbolic one."""
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
    """Return a function with the parameters and the attributes of a kernel. It does not link.

    Parameters
    ----------
    types : Sequence[relax.Type]
        The types of the arguments of the kernel, then of its results.
    shapes : Sequence, optional
        The shapes of the kernel's parameters, if they differ from the types.

    Returns
    -------
    function : tirx.PrimFunc or None
        None if a shape is unknown.
    """
    extents, params = Extents(), []
    for i, kind in enumerate(types):
        values = known_extents(kind)
        if values is None:
            return None
        known = [extents.of(extent) for extent in values]
        shape = known if shapes is None else shapes[i]
        params.append((f"p{i}", shape, dtype_of(kind)))

    def body(*_: tirx.Buffer) -> None:
        T.evaluate(tirx.call_extern("int32", UNDEFINED))

    return prim_func("declaration", params, body).without_attr("global_symbol")
