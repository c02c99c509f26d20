"""Tensor expressions of the losses that select a class by its index, and of the gradients of all
losses.

``cross_entropy_with_logits`` is a product of two tensors, and so is its gradient. The rest of this
text is about ``nll_loss``. A position is one element of ``targets``; ``x[p, c]`` is the prediction
of class ``c`` there, and ``w[c]`` the weight of the class (1 without weights). ``nll_loss`` gives
each position the loss ``-w[t] * x[p, t]`` of its target ``t``, and ``mean`` divides the sum of the
losses by the sum ``W`` of the weights ``w[t]``. So

- the gradient of the predictions is ``-w[c] * dy[p] / W`` where ``c`` is the target, and 0
  elsewhere,
- the gradient of the weights is, for class ``c``, the sum over the positions with that target of
  ``-x[p, c] * dy[p]``; for ``mean``, where ``W`` varies too, of ``-(x[p, c] + L) * dy / W`` with
  the loss ``L``.

A target that is ``ignore_index`` contributes nothing, whether or not it is a valid class. Any other
target outside ``[0, C)`` is an error of the caller, which PyTorch raises. Here every result that
depends on it is NaN. Nothing is read or written at a target that is not a valid class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..ir.dtypes import accumulation_dtype
from ._loops import Chunks, add, extern, loops
from .util import Shape, cast, fill_where_empty, on_gpu


def nll_loss(
    predictions: te.Tensor,
    targets: te.Tensor,
    weights: te.Tensor | None,
    reduction: str,
    ignore_index: int,
) -> te.Tensor:
    """Negative log likelihood loss.

    Parameters
    ----------
    predictions : te.Tensor
        A tensor of shape ``(N, C, d1, ..., dk)``, or ``(C,)`` without a batch.
    targets : te.Tensor
        Integers of shape ``(N, d1, ..., dk)``, or ``()`` without a batch.
    weights : te.Tensor, optional
        The weight of each class, of shape ``(C,)``; None for all 1.
    reduction : str
        ``"none"``, ``"sum"`` or ``"mean"``.
    ignore_index : int
        The target that contributes nothing.

    Returns
    -------
    result : te.Tensor
        The loss in the dtype of ``predictions``: of the shape of ``targets`` for ``"none"``, else a
        scalar. The mean over no targets is NaN.
    """
    loss = _Loss(predictions, targets, weights, reduction, ignore_index)
    return cast(loss.forward(), predictions.dtype)


def nll_loss_backward(
    output_grad: te.Tensor,
    predictions: te.Tensor,
    targets: te.Tensor,
    weights: te.Tensor | None,
    reduction: str,
    ignore_index: int,
) -> te.Tensor:
    """Gradient of :func:`nll_loss` with respect to its predictions.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the loss.
    predictions, targets, weights, reduction, ignore_index
        As for :func:`nll_loss`.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of ``predictions``. It is 0 at an ignored target, even if
        all targets are ignored and the mean itself is NaN. It is NaN for every class at an invalid
        target.
    """
    loss = _Loss(predictions, targets, weights, reduction, ignore_index)
    scale = loss.scale(output_grad)

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        class_index = index[loss.class_axis]
        position = [*index[: loss.class_axis], *index[loss.class_axis + 1 :]]
        target = loss.target(position)
        # Both branches read in bounds, so Select keeps the loop free of branches.
        return tirx.Select(
            target == loss.ignore_index,
            loss.const(0),
            tirx.Select(
                target == class_index.astype("int64"),
                -loss.weight(class_index) * scale(position),
                tirx.Select(loss.names_class(target), loss.const(0), loss.const(float("nan"))),
            ),
        ).astype(predictions.dtype)

    return te.compute(predictions.shape, partial, name="nll_loss_backward")


def nll_loss_backward_weights(
    output_grad: te.Tensor,
    predictions: te.Tensor,
    targets: te.Tensor,
    weights: te.Tensor,
    reduction: str,
    ignore_index: int,
) -> te.Tensor:
    """Gradient of :func:`nll_loss` with respect to its weights.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the loss.
    predictions, targets, weights, reduction, ignore_index
        As for :func:`nll_loss`; the values of ``weights`` matter for ``"mean"`` only.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of ``weights``. It is 0 for a class that is not a target. It
        is NaN throughout if a target is invalid, because that target could have been any class.
    """
    loss = _Loss(predictions, targets, weights, reduction, ignore_index)
    scale = loss.scale(output_grad)
    mean = loss.forward() if reduction == "mean" else None

    def partial(position: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        def of_class(class_index: tirx.PrimExpr) -> tirx.PrimExpr:
            prediction = loss.prediction(position, class_index)
            return -(prediction if mean is None else prediction + mean()) * scale(position)

        return loss.select(position, of_class)

    # Targets that are not a class have a separate bin: 0 if ignored, NaN if invalid.
    bins = loss.num_classes + 1

    def bin_of(position: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        target = loss.target(position)
        return tirx.if_then_else(
            loss.names_class(target), target, tirx.Cast("int64", loss.num_classes)
        )

    # Without a batch there is one position, without axes.
    shape, ndim = targets.shape or [1], len(targets.shape)
    partials = te.compute(shape, lambda *i: partial(i[:ndim]), name="partials")
    bin_indices = te.compute(shape, lambda *i: bin_of(i[:ndim]), name="bins")
    sums = _sum_by_bin(partials, bin_indices, bins)
    return te.compute(
        weights.shape,
        lambda c: (sums(c) + sums(loss.num_classes)).astype(weights.dtype),
        name="nll_loss_backward_weights",
    )


def cross_entropy_with_logits_backward(
    output_grad: te.Tensor, factor: te.Tensor, batch_size: tirx.PrimExpr | None
) -> te.Tensor:
    """Gradient of ``-sum(x * y) / N`` with respect to one factor, given the other.

    Parameters
    ----------
    output_grad : te.Tensor
        A scalar.
    factor : te.Tensor
        The other factor.
    batch_size : PrimExpr, optional
        ``N``; None for no division.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of ``factor``.
    """
    dtype = accumulation_dtype(output_grad.dtype, factor.dtype)
    scale = output_grad().astype(dtype)
    if batch_size is not None:
        scale = scale / tirx.Cast(dtype, batch_size)
    return te.compute(
        factor.shape,
        lambda *i: (-factor(*i).astype(dtype) * scale).astype(factor.dtype),
        name="cross_entropy_with_logits_backward",
    )


class _Loss:
    """Expressions that the loss and its gradients share: reads at a position, and the two
    reductions."""

    def __init__(
        self,
        predictions: te.Tensor,
        targets: te.Tensor,
        weights: te.Tensor | None,
        reduction: str,
        ignore_index: int,
    ):
        self.predictions, self.targets, self.weights = predictions, targets, weights
        self.reduction = reduction
        self.ignore_index = tirx.const(int(ignore_index), "int64")
        self.class_axis = 0 if len(predictions.shape) == 1 else 1
        self.num_classes = predictions.shape[self.class_axis]
        dtypes = [tensor.dtype for tensor in (predictions, weights) if tensor is not None]
        self.dtype = accumulation_dtype(*dtypes)

    def const(self, value: float) -> tirx.PrimExpr:
        return tirx.const(value, self.dtype)

    def target(self, position: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        return self.targets(*position).astype("int64")

    def names_class(self, target: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.all(target >= 0, target < self.num_classes)

    def prediction(
        self, position: Sequence[tirx.PrimExpr], class_index: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        index = [*position[: self.class_axis], class_index, *position[self.class_axis :]]
        return self.predictions(*index).astype(self.dtype)

    def weight(self, class_index: tirx.PrimExpr) -> tirx.PrimExpr:
        if self.weights is None:
            return self.const(1)
        return self.weights(class_index).astype(self.dtype)

    def select(
        self, position: Sequence[tirx.PrimExpr], of_class: Callable[[tirx.PrimExpr], tirx.PrimExpr]
    ) -> tirx.PrimExpr:
        """Return ``of_class(target)`` for a valid target, evaluated only then; 0 for an ignored
        one, else NaN."""
        target = self.target(position)
        return tirx.if_then_else(
            target == self.ignore_index,
            self.const(0),
            tirx.if_then_else(self.names_class(target), of_class(target), self.const(float("nan"))),
        )

    def forward(self) -> te.Tensor:
        """Return the loss in the accumulation dtype."""

        def term(*position: tirx.PrimExpr) -> tirx.PrimExpr:
            return self.select(position, lambda c: -self.prediction(position, c) * self.weight(c))

        if self.reduction == "none":
            return te.compute(self.targets.shape, term, name="nll_loss")
        total = _total(self.targets.shape, term, "loss_sum")
        if self.reduction == "sum":
            return total
        return te.compute((), lambda *_: total() / self.weight_sum(), name="nll_loss")

    @cached_property
    def weight_sum(self) -> te.Tensor:
        """Return the sum of the weights of all targets."""
        return _total(
            self.targets.shape, lambda *position: self.select(position, self.weight), "weight_sum"
        )

    def scale(self, output_grad: te.Tensor) -> Callable[[Sequence[tirx.PrimExpr]], tirx.PrimExpr]:
        """Return a function from a position to the gradient with respect to its
        ``-w[t] * x[p, t]``."""
        if self.reduction == "none":
            return lambda position: output_grad(*position).astype(self.dtype)
        if self.reduction == "sum":
            return lambda position: output_grad().astype(self.dtype)
        scale = te.compute(
            (), lambda *_: output_grad().astype(self.dtype) / self.weight_sum(), name="scale"
        )
        return lambda position: scale()


def _total(shape: Shape, value: Callable[..., tirx.PrimExpr], name: str) -> te.Tensor:
    """Return the sum of a function of the position over all positions, as a scalar."""
    if not shape:
        return te.compute((), lambda *_: value(), name=name)
    axes = [te.reduce_axis((0, extent)) for extent in shape]
    total = te.compute((), lambda *_: te.sum(value(*axes), axis=axes), name=name)
    return fill_where_empty(total, shape)


def _sum_by_bin(values: te.Tensor, bin_indices: te.Tensor, bins: tirx.PrimExpr) -> te.Tensor:
    """Return for each bin the sum of the values whose index, in ``[0, bins)``, is that bin.

    This takes one pass over the values; a gather would take one for each bin.
    """

    if on_gpu():
        return _sum_by_bin_in_threads(values, bin_indices, bins)

    def generate(values: tirx.Buffer, bin_indices: tirx.Buffer, sums: tirx.Buffer) -> tirx.Stmt:
        with IRBuilder() as clear, T.serial(bins) as i:
            T.buffer_store(sums, tirx.const(0, sums.dtype), [i])
        with IRBuilder() as sum_up, T.grid(*values.shape) as axes:
            position = tuple(axes) if len(values.shape) > 1 else axes
            i = bin_indices[position]
            T.buffer_store(sums, sums[i] + values[position], [i])
        return tirx.SeqStmt([clear.get(), sum_up.get()])

    return te.extern(
        [(bins,)],
        [values, bin_indices],
        lambda ins, outs: generate(*ins, *outs),
        dtype=str(values.dtype),
        name="sum_by_class",
    )


def _sum_by_bin_in_threads(
    values: te.Tensor, bin_indices: te.Tensor, bins: tirx.PrimExpr
) -> te.Tensor:
    """:func:`_sum_by_bin` on a GPU: a thread loops over all values and sums the values of its
    bins."""
    chunks = Chunks((), [bins])

    def body(values: tirx.Buffer, bin_indices: tirx.Buffer, sums: tirx.Buffer) -> None:
        with chunks.tasks() as (_, own):
            with chunks.own(own) as at:
                T.buffer_store(sums, tirx.const(0, sums.dtype), at)
            with loops(values.shape) as at:
                where = [bin_indices[tuple(at)]]
                with chunks.if_owned(own, where):
                    add(sums, where, values[tuple(at)])

    return extern(body, [values, bin_indices], [bins], str(values.dtype), "sum_by_class")
