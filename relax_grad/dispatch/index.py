"""Kernels of the gradients of indexing."""

from __future__ import annotations

from math import prod

from tvm import relax

from .._compat import dtype_of
from ..kernel import index
from ..op.index import take_attrs
from ._registry import Kernel, Site, kernel_for

#: Rows that are shorter are mostly the unused part of a vector.
_SHORTEST = 4


@kernel_for("relax.grad.take_backward")
def take_backward(site: Site) -> Kernel | None:
    """Return the kernel of the gradient of taking rows."""
    output_grad, x, indices = site.call.args
    if not isinstance(indices.ty, relax.TensorType) or indices.ty.dtype is None:
        return None
    dtype = dtype_of(indices.ty)
    if dtype.startswith("uint"):
        return None
    of_indices = site.shape(indices, dtype)
    shapes = site.shape(output_grad), of_indices, site.shape(x)
    if None in shapes or not of_indices:
        return None
    attrs = take_attrs(site.call)
    axis = (attrs["axis"] or 0) % len(shapes[2])
    columns = prod(shapes[2][axis + 1 :])
    if not isinstance(columns, int) or columns < _SHORTEST:
        return None
    function = index.take_backward(
        prod(shapes[2][:axis]), shapes[2][axis], columns, shapes, dtype, attrs["mode"], site.cpu
    )
    return Kernel(function, [output_grad, indices])
