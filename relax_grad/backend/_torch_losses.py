"""Softmax and losses of the library "torch", forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ._torch_function import Function

__all__ = ["FUNCTIONS"]

_NONE, _, _MEAN = range(3)  # the reductions


def _softmax(name: str, torch: Any, given: Sequence, results: Sequence) -> None:
    data, axis = given
    getattr(torch.ops.aten, name).out(data, axis, False, out=results[0])


def _softmax_backward(name: str, torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, output, axis = given
    function = getattr(torch.ops.aten, name)
    if output.dtype != output_grad.dtype:
        results[0].copy_(function(output_grad.to(output.dtype), output, axis, output.dtype))
        return
    keyword = "grad_input" if name == "_softmax_backward_data" else "out"
    function.out(output_grad, output, axis, output.dtype, **{keyword: results[0]})


class _Targets:
    """The targets of a loss: whether each counts, and its class and weight.

    PyTorch's operator ends the process's use of a GPU if a target is no class. Here every result
    that depends on such a target is NaN, as in compiled functions.
    """

    def __init__(self, predictions: Any, targets: Any, weights: Any, ignored: int):
        self.axis = min(1, predictions.ndim - 1)
        classes = predictions.shape[self.axis]
        self.is_class = (targets >= 0) & (targets < classes)
        self.counts = targets != ignored
        self.index = targets.clamp(0, classes - 1).long()
        wide = predictions.float() if predictions.dtype.itemsize < 4 else predictions
        self.predictions = wide
        weight = wide.new_ones(()) if weights is None else weights.to(wide.dtype)[self.index]
        # The weight of a target that is no class is NaN.
        weight = weight.expand(self.index.shape).masked_fill(~self.is_class, float("nan"))
        self.weights = weight.masked_fill(~self.counts, 0)

    def losses(self) -> Any:
        """Return the loss of each target."""
        picked = self.predictions.gather(self.axis, self.index.unsqueeze(self.axis))
        losses = -self.weights * picked.squeeze(self.axis)
        return losses.masked_fill(~self.counts, 0)


def _nll_arguments(given: Sequence) -> tuple:
    """Return the predictions, the targets with their weights, and the reduction."""
    *tensors, reduction, ignored, has_weights = given
    predictions, targets, *weights = tensors[-2 - has_weights :]
    return _Targets(predictions, targets, weights[0] if weights else None, ignored), reduction


def _nll_loss(torch: Any, given: Sequence, results: Sequence) -> None:
    targets, reduction = _nll_arguments(given)
    losses = targets.losses()
    if reduction != _NONE:
        losses = losses.sum()
    if reduction == _MEAN:
        losses = losses / targets.weights.sum()
    results[0].copy_(losses)


def _nll_loss_backward(torch: Any, given: Sequence, results: Sequence) -> None:
    targets, reduction = _nll_arguments(given[1:])
    scale = given[0].to(targets.predictions.dtype)
    if reduction == _MEAN:
        scale = scale / targets.weights.sum()
    partial_ = (-targets.weights * scale).masked_fill(~targets.counts, 0)
    partial_, axis = partial_.unsqueeze(targets.axis), targets.axis
    gradient = torch.zeros_like(targets.predictions)
    gradient.scatter_(axis, targets.index.unsqueeze(axis), partial_)
    # The gradient of a target that is no class is NaN for all classes.
    wrong = (targets.counts & ~targets.is_class).unsqueeze(axis)
    results[0].copy_(gradient.masked_fill(wrong, float("nan")))


FUNCTIONS: dict[str, Function] = {
    "nn.softmax": Function(partial(_softmax, "_softmax")),
    "nn.log_softmax": Function(partial(_softmax, "_log_softmax")),
    "grad.softmax_backward": Function(partial(_softmax_backward, "_softmax_backward_data")),
    "grad.log_softmax_backward": Function(partial(_softmax_backward, "_log_softmax_backward_data")),
    "nn.nll_loss": Function(_nll_loss),
    "grad.nll_loss_backward": Function(_nll_loss_backward),
}
