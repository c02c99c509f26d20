"""Kernels of softmax, of log_softmax, and of the gradients of both and of the cross entropy."""

from __future__ import annotations

from functools import partial
from math import prod

from tvm import relax
from tvm.ir import Op

from ...ir.compat import dtype_of
from ...op.loss import check_nll_loss_backward
from ..kernel import softmax as kernels
from ..kernel.loss import Loss, cross_entropy_backward
from .registry import CallSite, Kernel, kernel_for
from .residuals import BlockCalls, ResidualKernel, residuals_for

_MAKE = {
    "relax.nn.softmax": kernels.softmax,
    "relax.nn.log_softmax": kernels.log_softmax,
    "relax.grad.softmax_backward": kernels.softmax_backward,
}

#: The fewest columns, except a single one, that have a kernel: most lanes of a vector are unused with fewer ones.
_FEWEST = 4

_CALL_TIR, _NLL_LOSS_BACKWARD = map(Op.get, ("relax.call_tir", "relax.grad.nll_loss_backward"))

_GATHER_BACKWARD = "relax.grad.gather_elements_backward_data"


@kernel_for(*_MAKE)
def softmax(site: CallSite) -> Kernel | None:
    """Return the kernel of softmax, of log_softmax, or of the gradient of softmax."""
    shapes = [site.shape(argument) for argument in site.call.args]
    lines = None if None in shapes else _lines(shapes[0], int(site.call.attrs.axis))
    if lines is None:
        return None
    generator = partial(_MAKE[site.call.op.name], lines, shapes[0], site.cpu)
    return Kernel(generator, site.call.args)


@residuals_for("relax.subtract")
def log_softmax_backward(
    site: CallSite, var: relax.Var, calls: BlockCalls
) -> ResidualKernel | None:
    """Return the kernel of ``dy - sum(dy, axis) * exp(y)``, the gradient of log_softmax, in one pass."""
    axis = _gradient_axis(var, calls)
    if axis is None:
        return None
    output_grad, share = site.call.args
    y = _exponent(site, share)
    shape = None if y is None else site.shape(y)
    lines = None if shape is None else _lines(shape, axis)
    if lines is None or site.shape(output_grad) != shape:
        return None
    kernel = _cross_entropy_backward(site, y, shape, lines, axis)
    if kernel is None:
        kernel = _gathered_backward(site, var, calls, y, lines)
    if kernel is None:
        generator = partial(kernels.log_softmax_backward, lines, shape, site.cpu)
        kernel = Kernel(generator, [output_grad, y], "grad.log_softmax_backward")
    return ResidualKernel(kernel, [], {})


def _gradient_axis(var: relax.Var, calls: BlockCalls) -> int | None:
    """Return the axis of a gradient of log_softmax; None if the variable is bound to another value."""
    difference = calls.of(var, "relax.subtract")
    share = None if difference is None else calls.of(difference.args[1], "relax.multiply")
    total = None if share is None else calls.of(share.args[0], "relax.sum")
    exponential = None if total is None else calls.of(share.args[1], "relax.exp")
    if exponential is None or not total.args[0].same_as(difference.args[0]):
        return None
    axes = total.attrs.axis
    if axes is None or len(axes) != 1 or not total.attrs.keepdims:
        return None
    return int(axes[0]) % difference.args[0].ty.ndim


def _exponent(site: CallSite, share: relax.Expr) -> relax.Expr | None:
    """Return ``y`` of ``t * exp(y)``; None if it may have been overwritten."""
    # A call without a kernel differs from the original only in its arguments.
    product = site.lookup(share)
    exponential = None if product is None else site.lookup(product.args[1])
    return None if exponential is None else exponential.args[0]


def _cross_entropy_backward(
    site: CallSite, y: relax.Expr, shape: list, lines: kernels.Lines, axis: int
) -> Kernel | None:
    """Return the kernel of a gradient of log_softmax whose cotangent is the gradient of nll_loss, else None."""
    output_grad = site.call.args[0]
    gradient = site.lookup(output_grad) if isinstance(output_grad, relax.Var) else None
    if not isinstance(gradient, relax.Call) or gradient.op != _NLL_LOSS_BACKWARD:
        return None
    check_nll_loss_backward(gradient, relax.BlockBuilder())
    output_grad, _, targets, *weights = gradient.args
    dtype = dtype_of(targets.ty)
    attrs = gradient.attrs
    loss = Loss(str(attrs.reduction), int(attrs.ignore_index), bool(weights))
    shapes = [site.shape(output_grad), shape, site.shape(targets, dtype), *map(site.shape, weights)]
    is_plain = axis == (0 if len(shape) == 1 else 1) and isinstance(lines.extent, int)
    if None in shapes or not is_plain or dtype.startswith("uint"):
        return None
    generator = partial(cross_entropy_backward, loss, lines, shapes, dtype, site.cpu)
    return Kernel(generator, [output_grad, y, targets, *weights], "grad.cross_entropy_backward")


def _gathered_backward(
    site: CallSite, var: relax.Var, calls: BlockCalls, y: relax.Expr, lines: kernels.Lines
) -> Kernel | None:
    """Return the kernel of a gradient of log_softmax if one element of each row of it is gathered, else None."""
    before = calls.of(calls.of(var, "relax.subtract").args[0], _GATHER_BACKWARD)
    if before is None or not lines.are_rows or not isinstance(lines.extent, int):
        return None
    shape, axis = site.shape(y), int(before.attrs.axis)
    # The call may already be replaced by the call of a kernel.
    gradient = site.lookup(site.call.args[0])
    if gradient is None:
        return None
    if gradient.op == _CALL_TIR:
        output_grad, indices = gradient.args[1].fields
    else:
        output_grad, _, indices = gradient.args
    dtype = dtype_of(indices.ty)
    shapes = [site.shape(output_grad), shape, site.shape(indices, dtype)]
    is_one = shapes[2] is not None and shapes[2] == [*shape[:-1], 1] == shapes[0]
    if axis % len(shape) != len(shape) - 1 or not is_one or dtype.startswith("uint"):
        return None
    generator = partial(cross_entropy_backward, Loss("gather"), lines, shapes, dtype, site.cpu)
    return Kernel(generator, [output_grad, y, indices], "grad.cross_entropy_backward")


def _lines(shape: list, axis: int) -> kernels.Lines | None:
    """Return the lines of a tensor along an axis; None if no kernel supports them."""
    if not shape:
        return None
    axis %= len(shape)
    inner = prod(shape[axis + 1 :])
    if isinstance(inner, int) and 1 < inner < _FEWEST:
        return None
    return kernels.Lines(prod(shape[:axis]), shape[axis], inner)
