"""Kernels of pooling and of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm import relax

from ...op.pool import check_pool_attrs, check_pool_backward
from ...op.rank import RANKS
from ..kernel.reduction import pool
from ..kernel.reduction.pool_geometry import Pool, Windows, pool_of
from .registry import CallSite, Kernel, Shape, kernel_for
from .residuals import BlockCalls, Description, Replacement, ResidualKernel, residuals_for

#: The gradient of each operator of max pooling.
_MAX_POOL_BACKWARD = {
    f"relax.nn.max_pool{rank}d": f"relax.grad.max_pool{rank}d_backward" for rank in RANKS
}


@kernel_for(*_MAX_POOL_BACKWARD)
def max_pool(site: CallSite) -> Kernel | None:
    """Return the kernel of max pooling."""
    (data,), attrs = site.call.args, check_pool_attrs(site.call)
    shapes = site.shapes(data, site.call)
    if shapes is None or (of := _pool(attrs, *shapes)) is None:
        return None
    return Kernel(partial(pool.max_pool, of, shapes, site.cpu), [data])


@residuals_for(*_MAX_POOL_BACKWARD)
def max_pool_with_winners(
    site: CallSite, var: relax.Var, calls: BlockCalls
) -> ResidualKernel | None:
    """Return max pooling that also saves the position of the maximum of each window, for its
    gradient."""
    (data,), attrs = site.call.args, check_pool_attrs(site.call)
    shapes = site.shapes(data, site.call)
    forward = calls.original(var)
    if shapes is None or forward is None or (of := _pool(attrs, *shapes)) is None:
        return None

    def gradient(call: relax.Call, saved: Sequence[relax.Expr]) -> Kernel:
        check_pool_backward(call, relax.BlockBuilder())
        taken = [shapes[1], shapes[0], shapes[0]]
        generator = partial(pool.max_pool_backward, of, taken, site.cpu, winners=True)
        return Kernel(generator, [call.args[0], *saved])

    name = _MAX_POOL_BACKWARD[site.call.op.name]
    wanted = forward.args[0], _pool_key(forward)
    uses: dict[relax.Var, Replacement] = {}
    while (replaced := calls.take(var, name, _recomputed_winners, wanted)) is not None:
        uses[replaced[0]] = gradient
    if not uses:
        return None
    kernel = Kernel(partial(pool.max_pool, of, shapes, site.cpu, winners=True), [data])
    return ResidualKernel(kernel, [relax.TensorType(site.call.ty.shape, "int8")], uses)


def _recomputed_winners(_calls: BlockCalls, var: relax.Var, call: relax.Call) -> Description:
    """Describe a gradient that searches the maxima again, by its data and its windows."""
    return (call.args[1], _pool_key(call)), (var,)


def _pool_key(call: relax.Call) -> tuple:
    """Return the attributes of a pooling or of its gradient as a hashable key."""
    attrs = check_pool_attrs(call)
    sizes = attrs.pool_size, attrs.strides, attrs.padding, attrs.dilation
    others = attrs.ceil_mode, attrs.count_include_pad, attrs.layout, attrs.out_layout
    return tuple(tuple(map(int, numbers)) for numbers in sizes), tuple(map(str, others))


@kernel_for(*(f"relax.nn.avg_pool{rank}d" for rank in RANKS))
def avg_pool(site: CallSite) -> Kernel | None:
    """Return the kernel of average pooling; None for dilated windows."""
    (data,), attrs = site.call.args, check_pool_attrs(site.call)
    shapes = site.shapes(data, site.call)
    if shapes is None or (of := _pool(attrs, *shapes)) is None or of.is_dilated:
        return None
    include_pad = bool(attrs.count_include_pad)
    return Kernel(partial(pool.avg_pool, of, shapes, site.cpu, include_pad), [data])


@kernel_for(*_MAX_POOL_BACKWARD.values())
def max_pool_backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of max pooling."""
    attrs = check_pool_backward(site.call, relax.BlockBuilder())
    output_grad, data = site.call.args
    shapes = site.shapes(output_grad, data, data)
    if shapes is None or (of := _pool(attrs, shapes[1], shapes[0])) is None:
        return None
    return Kernel(partial(pool.max_pool_backward, of, shapes, site.cpu), [output_grad, data])


@kernel_for(*(f"relax.grad.avg_pool{rank}d_backward" for rank in RANKS))
def avg_pool_backward(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of average pooling; None for dilated windows."""
    attrs = check_pool_backward(site.call, relax.BlockBuilder())
    output_grad, data = site.call.args
    shapes = site.shapes(output_grad, data)
    if shapes is None or (of := _pool(attrs, shapes[1], shapes[0])) is None or of.is_dilated:
        return None
    include_pad = bool(attrs.count_include_pad)
    generator = partial(pool.avg_pool_backward, of, shapes, site.cpu, include_pad)
    return Kernel(generator, [output_grad])


def _pool(attrs: relax.op.op_attrs.Attrs, data: Shape, result: Shape) -> Pool | None:
    """Return the pooling of a call, given its attributes and the shapes of data and result; None if
    no kernel supports it."""
    rank = len(data) - 2
    plain = "NC" + "DHW"[3 - rank :]
    if attrs.layout != plain or attrs.out_layout != plain:
        return None
    if not all(isinstance(extent, int) for extent in (*data[1:], *result[2:])):
        return None
    sizes, strides, padding, dilation = (
        [int(value) for value in getattr(attrs, name)]
        for name in ("pool_size", "strides", "padding", "dilation")
    )
    axes = [
        Windows(
            data[2 + i],
            sizes[i],
            strides[i],
            before=padding[i],
            number=result[2 + i],
            after=padding[rank + i],
            dilation=dilation[i],
        )
        for i in range(rank)
    ]
    return pool_of(data[0], data[1], axes)
