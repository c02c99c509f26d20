"""Kernels of pooling and of its gradients."""

from __future__ import annotations

from ..kernel import pool
from ..op.pool import check_pool_attrs
from ._registry import Kernel, Site, kernel_for

#: Taps of a window that are written out.
_MOST_TAPS = 49


@kernel_for("relax.nn.max_pool2d")
def max_pool(site: Site) -> Kernel | None:
    """Return the kernel of maximum pooling of planes."""
    (data,) = site.call.args
    shapes = [site.shape(data), site.shape(site.call)]
    of = _pool(site, *shapes)
    return of and Kernel(pool.max_pool(of, shapes, site.cpu), [data])


@kernel_for("relax.grad.max_pool2d_backward", "relax.grad.avg_pool2d_backward")
def pool_backward(site: Site) -> Kernel | None:
    """Return the kernel of the gradient of maximum or average pooling of planes."""
    output_grad, data = site.call.args
    shapes = [site.shape(output_grad), site.shape(data), site.shape(data)]
    of = _pool(site, shapes[1], shapes[0])
    if of is None:
        return None
    if site.call.op.name == "relax.grad.max_pool2d_backward":
        return Kernel(pool.max_pool_backward(of, shapes, site.cpu), [output_grad, data])
    include_pad = bool(site.call.attrs.count_include_pad)
    function = pool.avg_pool_backward(of, [shapes[0], shapes[1]], site.cpu, include_pad)
    return Kernel(function, [output_grad])


def _pool(site: Site, data: list | None, result: list | None) -> pool.Pool | None:
    """Return the pooling of a call, where there is a kernel for it, given the shapes of data and result."""
    attrs = check_pool_attrs(site.call)
    if data is None or result is None or (attrs.layout, attrs.out_layout) != ("NCHW", "NCHW"):
        return None
    if not all(isinstance(extent, int) for extent in (*data[2:], *result[2:])):
        return None
    sizes, strides, padding, dilation = (
        [int(value) for value in getattr(attrs, name)]
        for name in ("pool_size", "strides", "padding", "dilation")
    )
    if dilation != [1, 1] or strides[1] > 2 or sizes[0] * sizes[1] > _MOST_TAPS:
        return None
    rows, columns = (
        pool.Windows(data[2 + i], sizes[i], strides[i], padding[i], result[2 + i], padding[2 + i])
        for i in range(2)
    )
    if not (rows.has_elements() and columns.has_elements()):
        return None
    return pool.Pool(data[0] * data[1], rows, columns)
