"""Kernels of softmax, of log_softmax, and of the gradients of both and of the cross entropy."""

from __future__ import annotations

from functools import partial

from tvm import relax
from tvm.ir import Op

from ...ir.compat import dtype_of
from ...op.loss import check_nll_loss_backward
from ..kernel.reduction import softmax as kernels
from ..kernel.reduction.lines import Lines
from ..kernel.reduction.loss import Loss, cross_entropy_backward
from .registry import CallSite, Kernel, Shape, all_known, kernel_for
from .residuals import BlockCalls, ResidualKernel, residuals_for

_MAKE = {
    "relax.nn.softmax": kernels.softmax,
    "relax.nn.log_softmax": kernels.log_softmax,
    "relax.grad.softmax_backward": kernels.softmax_backward,
    "relax.grad.log_softmax_backward": kernels.log_softmax_backward,
}

_CALL_TIR, _NLL_LOSS_BACKWARD = map(Op.get, ("relax.call_tir", "relax.grad.nll_loss_backward"))

_GATHER_BACKWARD = "relax.grad.gather_elements_backward_data"


@kernel_for(*_MAKE)
def softmax(site: CallSite) -> Kernel | None:
    """Return the kernel of softmax, of log_softmax, or of the gradient of either."""
    shapes = site.shapes(*site.call.args)
    if shapes is None or (lines := _lines(shapes, int(site.call.attrs.axis))) is None:
        return None
    generator = partial(_MAKE[site.call.op.name], lines, shapes[0], site.cpu)
    count = len(site.call.args)
    return Kernel(generator, site.call.args, in_place=[(i, count) for i in range(count)])


@residuals_for("relax.grad.log_softmax_backward")
def cross_entropy(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return the kernel of a gradient of log_softmax that also computes its cotangent, the gradient
    of a loss."""
    backward = calls.original(var)
    shapes = site.shapes(*site.call.args)
    if backward is None or shapes is None:
        return None
    lines = _lines(shapes, int(site.call.attrs.axis))
    if lines is None:
        return None
    kernel = _cross_entropy_backward(site, shapes[1], lines)
    if kernel is None:
        kernel = _gathered_backward(site, backward, calls, shapes[1], lines)
    return kernel and ResidualKernel(kernel, [], {})


def _cross_entropy_backward(site: CallSite, shape: Shape, lines: Lines) -> Kernel | None:
    """Return the kernel of a gradient of log_softmax whose cotangent is the gradient of nll_loss,
    else None."""
    output_grad, y = site.call.args
    gradient = site.lookup(output_grad) if isinstance(output_grad, relax.Var) else None
    if not isinstance(gradient, relax.Call) or gradient.op != _NLL_LOSS_BACKWARD:
        return None
    check_nll_loss_backward(gradient, relax.BlockBuilder())
    output_grad, _, targets, *weights = gradient.args
    dtype = dtype_of(targets.ty)
    attrs = gradient.attrs
    loss = Loss(str(attrs.reduction), int(attrs.ignore_index), bool(weights))
    shapes = all_known(
        [site.shape(output_grad), shape, site.shape(targets, dtype), *map(site.shape, weights)]
    )
    axis = int(site.call.attrs.axis) % len(shape)
    is_plain = axis == (0 if len(shape) == 1 else 1) and isinstance(lines.extent, int)
    if shapes is None or not is_plain or dtype.startswith("uint"):
        return None
    generator = partial(cross_entropy_backward, loss, lines, shapes, dtype, site.cpu)
    arguments = [output_grad, y, targets, *weights]
    name = "grad.cross_entropy_backward"
    return Kernel(generator, arguments, name, in_place=[(1, len(arguments))])


def _gathered_backward(
    site: CallSite, backward: relax.Call, calls: BlockCalls, shape: Shape, lines: Lines
) -> Kernel | None:
    """Return the kernel of a gradient of log_softmax if one element of each row of it is gathered,
    else None."""
    before = calls.of(backward.args[0], _GATHER_BACKWARD)
    if before is None or not lines.are_rows or not isinstance(lines.extent, int):
        return None
    output_grad, y = site.call.args
    axis = int(before.attrs.axis)
    # The call may already be replaced by the call of a kernel.
    gradient = site.lookup(output_grad)
    if gradient is None:
        return None
    if gradient.op == _CALL_TIR:
        output_grad, indices = gradient.args[1].fields
    else:
        output_grad, _, indices = gradient.args
    dtype = dtype_of(indices.ty)
    shapes = all_known([site.shape(output_grad), shape, site.shape(indices, dtype)])
    if shapes is None or not shapes[2] == [*shape[:-1], 1] == shapes[0]:
        return None
    if axis % len(shape) != len(shape) - 1 or dtype.startswith("uint"):
        return None
    generator = partial(cross_entropy_backward, Loss("gather"), lines, shapes, dtype, site.cpu)
    arguments, name = [output_grad, y, indices], "grad.cross_entropy_backward"
    return Kernel(generator, arguments, name, in_place=[(1, 3)])


def _lines(shapes: list[Shape], axis: int) -> Lines | None:
    """Return the lines of tensors along an axis; None if their shapes differ or no kernel supports
    them."""
    shape = shapes[0]
    if not shape or any(other != shape for other in shapes):
        return None
    return Lines.along(shape, axis)
