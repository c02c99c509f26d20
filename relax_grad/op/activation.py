"""The backward operators of the activations.

Only softmax and log_softmax have one: the gradients of the others are element-wise, and an operator
would gain nothing over fusion.
"""

from __future__ import annotations

from functools import partial

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of
from ._infer import check_shape, forward_type, tensor_type
from ._layout import follow_axis
from .declare import declare_op


def softmax_backward(output_grad: relax.Expr, output: relax.Expr, axis: int = -1) -> relax.Call:
    """Gradient of softmax.

    ``(output_grad - sum(output_grad * output)) * output``, with the sum over the axis.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``softmax``.
    output : relax.Expr
        The result of ``softmax``; it may have a wider dtype.
    axis : int
        As given to ``relax.op.nn.softmax``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``output_grad``; half precision is computed in float32.
    """
    return relax.Call(
        Op.get("relax.grad.softmax_backward"),
        [output_grad, output],
        relax.op.nn.softmax(output, axis).attrs,
    )


def log_softmax_backward(output_grad: relax.Expr, output: relax.Expr, axis: int = -1) -> relax.Call:
    """Gradient of log_softmax.

    ``output_grad - sum(output_grad) * exp(output)``, with the sum over the axis.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``log_softmax``.
    output : relax.Expr
        The result of ``log_softmax``; it may have a wider dtype.
    axis : int
        As given to ``relax.op.nn.log_softmax``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``output_grad``; half precision is computed in float32.
    """
    return relax.Call(
        Op.get("relax.grad.log_softmax_backward"),
        [output_grad, output],
        relax.op.nn.log_softmax(output, axis).attrs,
    )


def _infer(forward_name: str, call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    tensor_type(call, 1, "output")
    forward = relax.Call(Op.get(forward_name), [call.args[1]], call.attrs)
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, forward))
    if output_grad.dtype is not None and "float" not in dtype_of(output_grad):
        raise TypeError(
            f"{call.op.name}: output_grad must be floating-point, but its type is {output_grad}"
        )
    return output_grad


_BACKWARD = {"softmax": softmax_backward, "log_softmax": log_softmax_backward}
for _forward, _builder in _BACKWARD.items():
    declare_op(
        _builder.__name__,
        [
            ("output_grad", "Tensor", f"The gradient with respect to the result of {_forward}."),
            ("output", "Tensor", f"The result of {_forward}."),
        ],
        partial(_infer, f"relax.nn.{_forward}"),
        _builder,
        "relax.attrs.SoftmaxAttrs",
    )
    follow_axis(f"relax.grad.{_builder.__name__}", full=(0, 1))
