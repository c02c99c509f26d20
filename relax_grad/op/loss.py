"""The backward operators of the losses.

``nll_loss_backward`` is TVM's own; its calls are checked here. This module adds the gradient with
respect to the weights, which TVM lacks, and the backward operator of ``cross_entropy_with_logits``.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

from ..ir.compat import shapes_may_differ
from ._infer import check_shape, forward_type, shape_text, tensor_type, type_of_shape
from .declare import declare_op


def nll_loss_backward_weights(
    output_grad: relax.Expr,
    predictions: relax.Expr,
    targets: relax.Expr,
    weights: relax.Expr,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> relax.Call:
    """Gradient of nll_loss with respect to its weights.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``nll_loss``.
    predictions, targets, weights, reduction, ignore_index
        As given to ``relax.op.nn.nll_loss``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and dtype of ``weights``. A target outside ``[0, C)`` other than
        ``ignore_index`` makes all of it NaN; PyTorch raises an error for such a target.
    """
    attrs = relax.op.nn.nll_loss(
        predictions, targets, weights, reduction=reduction, ignore_index=ignore_index
    ).attrs
    return relax.Call(
        Op.get("relax.grad.nll_loss_backward_weights"),
        [output_grad, predictions, targets, weights],
        attrs,
    )


def cross_entropy_with_logits_backward(output_grad: relax.Expr, factor: relax.Expr) -> relax.Call:
    """Gradient of cross_entropy_with_logits with respect to either argument.

    The operator is bilinear, ``-sum(predictions * labels) / N`` (without ``N`` for vectors), so its
    gradient with respect to one argument is the same function of the other.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``cross_entropy_with_logits``, a scalar.
    factor : relax.Expr
        The other argument: the labels for the gradient of the predictions, and vice versa.

    Returns
    -------
    result : relax.Call
        ``-output_grad * factor / N``, of the shape and dtype of ``factor``.
    """
    return relax.Call(
        Op.get("relax.grad.cross_entropy_with_logits_backward"), [output_grad, factor]
    )


def nll_loss_attrs(call: relax.Call) -> dict:
    """Return the attributes that nll_loss and its backward operators share."""
    return {
        "reduction": call.attrs.reduction,
        "ignore_index": int(call.attrs.ignore_index),
    }


def check_nll_loss_backward(call: relax.Call, ctx: relax.BlockBuilder) -> None:
    """Check a call of one of nll_loss's backward operators.

    TVM infers the type of the forward operator from the type of the predictions alone.

    Raises
    ------
    TypeError, ValueError
        Names the operator, the argument, and the expected and the found type.
    """
    names = ("output_grad", "predictions", "targets", "weights")[: len(call.args)]
    output_grad, predictions, *others = (
        tensor_type(call, index, name) for index, name in enumerate(names)
    )
    forward = relax.Call(Op.get("relax.nn.nll_loss"), call.args[1:], call.attrs)
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, forward))
    if not isinstance(predictions.shape, relax.ShapeExpr):
        return
    # The forward operator treats extents as equal if they do not provably differ.
    shape = list(predictions.shape.values)
    classes = min(1, len(shape) - 1)
    of_targets = shape[:classes] + shape[classes + 1 :]
    for name, kind, extents in zip(names[2:], others, (of_targets, [shape[classes]]), strict=False):
        if shapes_may_differ(kind, relax.TensorType(extents, kind.dtype)):
            raise ValueError(
                f"{call.op.name}: {name} must have the shape {shape_text(extents)} for "
                f"predictions of type {predictions}, but the type is {kind}"
            )


def _infer_nll_loss_backward_weights(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    check_nll_loss_backward(call, ctx)
    weights = tensor_type(call, 3, "weights")
    return weights if weights.ndim == 1 else type_of_shape(weights, None, 1)


def _infer_cross_entropy_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    factor = tensor_type(call, 1, "factor")
    forward = relax.Call(Op.get("relax.nn.cross_entropy_with_logits"), [call.args[1], call.args[1]])
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, forward))
    return factor


declare_op(
    "nll_loss_backward_weights",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of nll_loss."),
        ("predictions", "Tensor", "The predictions."),
        ("targets", "Tensor", "The targets."),
        ("weights", "Tensor", "The weight of each class."),
    ],
    _infer_nll_loss_backward_weights,
    nll_loss_backward_weights,
    "relax.attrs.NLLLossAttrs",
)
declare_op(
    "cross_entropy_with_logits_backward",
    [
        (
            "output_grad",
            "Tensor",
            "The gradient with respect to the result of cross_entropy_with_logits.",
        ),
        ("factor", "Tensor", "The other argument."),
    ],
    _infer_cross_entropy_backward,
    cross_entropy_with_logits_backward,
)
