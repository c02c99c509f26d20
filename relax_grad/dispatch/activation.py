"""Elementwise functions that call no library."""

from __future__ import annotations

from tvm import relax, tirx

from .._compat import dtype_of
from ..kernel.activation import elementwise
from ._registry import Kernel, Site, kernel_for


@kernel_for(
    "relax.exp",
    "relax.erf",
    "relax.tanh",
    "relax.sigmoid",
    "relax.nn.gelu",
    "relax.nn.gelu_tanh",
    "relax.nn.silu",
)
def activation(site: Site) -> Kernel | None:
    """Return a tensor expression of the function, which fuses as that of the operator does."""
    kind = site.call.args[0].ty
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    extents = kind.shape.values
    if kind.dtype is None or dtype_of(kind) != "float32":
        return None
    if not all(isinstance(extent, (tirx.IntImm, tirx.Var)) for extent in extents):
        return None
    variables: dict = {}
    shape = [
        extent
        if isinstance(extent, tirx.IntImm)
        else variables.setdefault(extent, tirx.Var(f"n{len(variables)}", extent.ty.dtype))
        for extent in extents
    ]
    name = site.call.op.name.rpartition(".")[2]
    return Kernel(elementwise(name, shape), site.call.args)
