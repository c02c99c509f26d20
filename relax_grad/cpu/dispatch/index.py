"""Kernels of indexing and of its gradients."""

from __future__ import annotations

from functools import partial
from math import prod

from tvm import relax

from ...ir.compat import dtype_of
from ...op.index import check_take_backward, take_attrs
from ..kernel.movement import index
from .registry import CallSite, Kernel, Shape, all_known, kernel_for

#: The fewest rows of a tensor for which the indices are resolved once for all rows.
_ROWS = 4


@kernel_for("relax.grad.take_backward")
def take_backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of taking rows."""
    check_take_backward(site.call, relax.BlockBuilder())
    output_grad, x, indices = site.call.args
    dtype = _index_dtype(indices)
    of_indices = _index_shape(site, indices)
    shapes = all_known([site.shape(output_grad), of_indices, site.shape(x)])
    if shapes is None or dtype is None or not of_indices:
        return None
    attrs = take_attrs(site.call)
    axis = (attrs["axis"] or 0) % len(shapes[2])
    columns = prod(shapes[2][axis + 1 :])
    if not isinstance(columns, int):
        return None
    generator = partial(
        index.take_backward,
        prod(shapes[2][:axis]),
        shapes[2][axis],
        columns,
        shapes,
        dtype,
        attrs["mode"],
        site.cpu,
    )
    return Kernel(generator, [output_grad, indices])


@kernel_for("relax.take")
def take_columns(site: CallSite) -> Kernel | None:
    """Return the kernel of taking elements along the last axis; None for whole rows, which are
    fused instead."""
    x, indices = site.call.args
    dtype = _index_dtype(indices)
    shapes = all_known([site.shape(x), _index_shape(site, indices), site.shape(site.call)])
    if shapes is None or dtype is None or not shapes[1] or len(shapes[0]) < 2:
        return None
    attrs = take_attrs(site.call)
    rows, extent = prod(shapes[0][:-1]), shapes[0][-1]
    is_last = (attrs["axis"] or 0) % len(shapes[0]) == len(shapes[0]) - 1
    if not is_last or not isinstance(extent, int) or (isinstance(rows, int) and rows < _ROWS):
        return None
    generator = partial(index.take_columns, rows, extent, shapes, dtype, attrs["mode"])
    return Kernel(generator, [x, indices])


@kernel_for("relax.grad.gather_elements_backward_data")
def gather_elements_backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of gathering along the last axis."""
    output_grad, _, indices = site.call.args
    dtype = _index_dtype(indices)
    of_indices = _index_shape(site, indices)
    shapes = all_known([site.shape(output_grad), of_indices, site.shape(site.call)])
    if shapes is None or dtype is None or not of_indices:
        return None
    axis, shape = int(site.call.attrs.axis) % len(of_indices), shapes[2]
    if axis != len(shape) - 1 or of_indices[:-1] != shape[:-1]:
        return None
    generator = partial(
        index.gather_elements_backward,
        prod(shape[:-1]),
        (shape[-1], of_indices[-1]),
        shapes,
        dtype,
        site.cpu,
    )
    return Kernel(generator, [output_grad, indices])


@kernel_for("relax.grad.gather_nd_backward_data")
def gather_nd_backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of gather_nd; None with batch dimensions."""
    output_grad, _, indices = site.call.args
    shape = _index_shape(site, indices)
    if not shape or int(site.call.attrs.batch_dims) or not isinstance(shape[-1], int):
        return None
    return _points_backward(site, output_grad, [indices], shape[-1], shape[:-1])


@kernel_for("relax.grad.index_tensor_backward_data")
def index_tensor_backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of indexing by tensors of equal shapes."""
    output_grad, _, indices = site.call.args
    value = site.lookup(indices) if isinstance(indices, relax.Var) else indices
    if not isinstance(value, relax.Tuple):
        return None
    tensors = list(value.fields)
    shapes = all_known(_index_shape(site, tensor) for tensor in tensors)
    if not shapes or any(shape != shapes[0] for shape in shapes):
        return None
    return _points_backward(site, output_grad, tensors, len(tensors), shapes[0])


def _points_backward(
    site: CallSite, output_grad: relax.Expr, indices: list, count: int, points: Shape
) -> Kernel | None:
    """Return the kernel of the data gradient of an operator that reads points of its data."""
    shapes = all_known(
        [
            site.shape(output_grad),
            *(_index_shape(site, tensor) for tensor in indices),
            site.shape(site.call),
        ]
    )
    if shapes is None:
        return None
    dtypes = [dtype_of(tensor.ty) for tensor in indices]
    columns = prod(shapes[-1][count:])
    if not count or not isinstance(columns, int):
        return None
    generator = partial(
        index.points_backward, shapes[-1][:count], columns, prod(points), shapes, dtypes, site.cpu
    )
    return Kernel(generator, [output_grad, *indices])


def _index_shape(site: CallSite, indices: relax.Expr) -> Shape | None:
    """Return the shape of a tensor of indices if their dtype is a signed integer, else None."""
    dtype = _index_dtype(indices)
    return None if dtype is None else site.shape(indices, dtype)


def _index_dtype(indices: relax.Expr) -> str | None:
    """Return the dtype of a tensor of indices if it is a signed integer, else None."""
    if not isinstance(indices.ty, relax.TensorType) or indices.ty.dtype is None:
        return None
    dtype = dtype_of(indices.ty)
    return dtype if dtype.startswith("int") else None
