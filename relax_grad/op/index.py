"""The backward operator of gather_elements, and the derivatives of take and gather_elements.

TVM has the backward operator of take. An out-of-bounds index contributes 0 to a gradient, while the
forward operators return NaN for it. So the transpose of a backward operator is not the forward
operator, but its derivative along a direction, which is 0 there.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op
from tvm.relax.op import grad as relax_op_grad
from tvm.relax.utils import convert_to_expr

from ..registry import register_infer_type
from ._infer import check_shape, forward_type, infer_data, tensor_type
from .declare import Shape, as_shape, declare_op, of_form
from .index_nd import int64_like


def take_backward(
    output_grad: relax.Expr,
    x: relax.Expr,
    indices: relax.Expr | int,
    axis: int | None = None,
    mode: str = "fast",
) -> relax.Call:
    """Gradient of take with respect to its data: TVM's operator, whose own builder lacks ``mode``.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``take(x, indices, axis, mode)``.
    x : relax.Expr
        The data; only its shape is read.
    indices : relax.Expr or int
        The indices: an integer tensor of any rank, or a scalar.
    axis, mode
        As given to ``relax.op.take``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``x``; an out-of-bounds index contributes nothing.
    """
    indices = convert_to_expr(indices)
    attrs = relax.op.take(x, indices, axis, mode).attrs
    return relax.Call(Op.get("relax.grad.take_backward"), [output_grad, x, indices], attrs)


def take_jvp(
    x_direction: relax.Expr,
    indices: relax.Expr | int,
    axis: int | None = None,
    mode: str = "fast",
) -> relax.Call:
    """Derivative of take along a direction of its data.

    Parameters
    ----------
    x_direction : relax.Expr
        The direction, of the shape of the data.
    indices : relax.Expr or int
        The indices: an integer tensor of any rank, or a scalar.
    axis, mode
        As given to ``relax.op.take``.

    Returns
    -------
    result : relax.Call
        ``take(x_direction, indices)``, with 0 for an out-of-bounds index.
    """
    indices = convert_to_expr(indices)
    attrs = relax.op.take(x_direction, indices, axis, mode).attrs
    return relax.Call(Op.get("relax.grad.take_jvp"), [x_direction, indices], attrs)


def gather_elements_jvp(
    data_direction: relax.Expr, indices: relax.Expr, axis: int = 0
) -> relax.Call:
    """Derivative of gather_elements along a direction of its data.

    Parameters
    ----------
    data_direction : relax.Expr
        The direction, of the shape of the data.
    indices : relax.Expr
        The indices, of the rank of the data and of any integer dtype.
    axis : int
        As given to ``relax.op.gather_elements``.

    Returns
    -------
    result : relax.Call
        ``gather_elements(data_direction, indices)``, with 0 for an out-of-bounds index.
    """
    attrs = relax.op.gather_elements(data_direction, indices, axis).attrs
    return relax.Call(Op.get("relax.grad.gather_elements_jvp"), [data_direction, indices], attrs)


def gather_elements_backward_data(
    output_grad: relax.Expr, data_shape: relax.Expr | Shape, indices: relax.Expr, axis: int = 0
) -> relax.Call:
    """Gradient of gather_elements with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``gather_elements(data, indices, axis)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    indices : relax.Expr
        The indices, of the rank of the data; an out-of-bounds index contributes nothing.
    axis : int
        As given to ``relax.op.gather_elements``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """
    attrs = relax.op.gather_elements(output_grad, indices, axis).attrs
    return relax.Call(
        Op.get("relax.grad.gather_elements_backward_data"),
        [output_grad, as_shape(data_shape), indices],
        attrs,
    )


def take_attrs(call: relax.Call) -> dict:
    """Return the attributes of take or of one of its backward operators."""
    axis = call.attrs.axis
    # TVM's own builder of take_backward leaves mode empty.
    return {"axis": None if axis is None else int(axis), "mode": call.attrs.mode or "fast"}


def check_take_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    """Check a call of take_backward, which TVM may have made, and return the type of its result.

    Raises
    ------
    TypeError, ValueError
        Names the operator, the argument, and the expected and the found type.
    """
    output_grad, x = tensor_type(call, 0, "output_grad"), tensor_type(call, 1, "x")
    forward = relax.op.take(*call.args[1:], **take_attrs(call))
    forward = forward_type(call, ctx, forward)
    check_shape(call, "output_grad", output_grad, forward)
    return x


def _infer_take_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    tensor_type(call, 0, "x_direction")
    return forward_type(call, ctx, relax.Call(Op.get("relax.take"), call.args, call.attrs))


def _infer_gather_elements_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    tensor_type(call, 0, "data_direction")
    indices = int64_like(tensor_type(call, 1, "indices"))
    forward = relax.Call(Op.get("relax.gather_elements"), [call.args[0], indices], call.attrs)
    return forward_type(call, ctx, forward)


def _infer_gather_elements_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    indices = int64_like(tensor_type(call, 2, "indices"))

    def forward(data: relax.Var) -> relax.Call:
        return relax.Call(Op.get("relax.gather_elements"), [data, indices], call.attrs)

    return infer_data(call, ctx, forward)


# TVMScript prints the mode of a take_backward; TVM's own builder cannot parse it back.
relax_op_grad.take_backward = take_backward
register_infer_type(
    "relax.grad.take_backward",
    corrects="infers the type of x for all arguments",
)(
    of_form(
        check_take_backward,
        [
            (argument.name, argument.type_info, argument.description)
            for argument in Op.get("relax.grad.take_backward").arguments
        ],
        "relax.attrs.TakeAttrs",
    )
)
declare_op(
    "take_jvp",
    [
        ("x_direction", "Tensor", "The direction, of the shape of the data."),
        ("indices", "Tensor", "The indices."),
    ],
    _infer_take_jvp,
    take_jvp,
    "relax.attrs.TakeAttrs",
)
declare_op(
    "gather_elements_jvp",
    [
        ("data_direction", "Tensor", "The direction, of the shape of the data."),
        ("indices", "Tensor", "The indices."),
    ],
    _infer_gather_elements_jvp,
    gather_elements_jvp,
    "relax.attrs.GatherElementsAttrs",
)
declare_op(
    "gather_elements_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of gather_elements."),
        ("data_shape", "Shape", "The shape of the data."),
        ("indices", "Tensor", "The indices."),
    ],
    _infer_gather_elements_backward,
    gather_elements_backward_data,
    "relax.attrs.GatherElementsAttrs",
)
