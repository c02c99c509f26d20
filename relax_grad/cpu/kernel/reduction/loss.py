"""The gradient of the cross entropy, nll_loss of log_softmax, given the result of log_softmax.

At each position, the gradient of nll_loss is 0 for all classes except the target, so that its sum
over the classes is its value at the target. So one pass over the classes is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from ....topi.position import position as find_position
from ...target import CPU
from ..language import builder as b
from ..language import functions as math
from ..language.builder import Extent, Vectors, bind, const, sum_of
from ..language.halves import Tensor
from .lines import Lines, lines_plan
from .softmax import Columns, Row, each_line

#: The number of partial sums of the weights of the targets, which is the order of additions.
_PARTS = 16


@dataclass(frozen=True)
class Loss:
    """A negative log likelihood.

    Attributes
    ----------
    reduction : str
        ``"none"``, ``"sum"`` or ``"mean"``; or ``"gather"`` for the gathered elements themselves,
        not their negatives. With ``"gather"``, negative targets count from the end, and
        out-of-bounds targets contribute nothing.
    ignore_index : int
        The target of ignored positions.
    weighted : bool
        Whether classes have weights.
    """

    reduction: str
    ignore_index: int = 0
    weighted: bool = False


def cross_entropy_backward(
    loss: Loss,
    lines: Lines,
    shapes: Sequence[Sequence[Extent]],
    index_dtype: str,
    cpu: CPU,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the cross entropy.

    Parameters
    ----------
    loss : Loss
        The loss of each position, and its reduction.
    lines : Lines
        The lines of classes: one for each position.
    shapes : Sequence
        The shapes of dy, of y, of the targets, and of the weights if there are any.
    index_dtype : str
        The dtype of the targets.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, y, targets, weights if there are any, and dx. A target that is out of bounds and
        not ignored makes its position NaN, and the mean too.
    """

    plan = lines_plan(lines, cpu)

    def body(dy: Tensor, y: Tensor, targets: tirx.Buffer, *rest: tirx.Buffer) -> None:
        *weights, dx = rest
        of_targets = _Targets(loss, lines.extent, targets, weights[0] if weights else None)
        scale = None
        if loss.reduction == "mean":
            scale = bind(dy[0] / _sum(prod(shapes[2]), of_targets))
        elif loss.reduction == "sum":
            scale = bind(dy[0])
        generator = _Generator(cpu, of_targets, dy, scale=scale, y=y, dx=dx)

        def emit(part: Row | Columns) -> None:
            if isinstance(part, Row):
                generator.row(part)
            else:
                generator.columns(part)

        each_line(plan, emit)

    params = [
        ("dy", shapes[0], "float32"),
        ("y", shapes[1], "float32"),
        ("targets", shapes[2], index_dtype),
        *([("weights", shapes[3], "float32")] if loss.weighted else []),
        ("dx", shapes[1], "float32"),
    ]
    return b.prim_func("cross_entropy_backward", params, body)


@dataclass(frozen=True)
class _Targets:
    """The targets of all positions.

    Attributes
    ----------
    loss : Loss
        The loss of each position, and its reduction.
    classes : int or tirx.PrimExpr
        The number of classes.
    targets : tirx.Buffer
        The target of each position.
    weights : tirx.Buffer or None
        The weight of each class.
    """

    loss: Loss
    classes: Extent
    targets: tirx.Buffer
    weights: tirx.Buffer | None

    def factor(
        self, position: tirx.PrimExpr, gradient: tirx.PrimExpr
    ) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the gradient of a position times its weight, and its target (-1 if it has
        none)."""
        zero = tirx.const(0.0, "float32")
        if self.loss.reduction == "gather":
            where, inside = find_position(bind(self.targets[position]), self.classes, "fast")
            where = tirx.Cast("int32", tirx.Select(inside, where, tirx.const(-1, "int64")))
            return bind(tirx.Select(inside, zero - gradient, zero)), bind(where)
        target = bind(tirx.Cast("int64", self.targets[position]))
        inside = tirx.all(target >= 0, target < self.classes)
        safe = tirx.max(tirx.min(target, tirx.Cast("int64", self.classes - 1)), 0)
        safe = bind(tirx.Cast("int32", safe))
        value = gradient if self.weights is None else gradient * self.weights[safe]
        ignored = tirx.EQ(target, tirx.const(self.loss.ignore_index, "int64"))
        nan = tirx.const(float("nan"), "float32")
        value = bind(tirx.Select(ignored, zero, tirx.Select(inside, value, nan)))
        # -1 marks positions without a target.
        counts = tirx.all(inside, tirx.Not(ignored))
        return value, bind(tirx.Select(counts, safe, const(-1)))


class _Generator:
    """A generator of the gradients of lines.

    Parameters
    ----------
    cpu : CPU
        The target CPU.
    targets : _Targets
        The targets.
    dy : tirx.Buffer
        The gradient of each position, or of the reduced loss.
    scale : tirx.PrimExpr or None
        The gradient of every position, if it is the same for all.
    y, dx : tirx.Buffer
        The result of log_softmax, and the gradient of its data.
    """

    def __init__(
        self,
        cpu: CPU,
        targets: _Targets,
        dy: Tensor,
        scale: tirx.PrimExpr | None,
        y: Tensor,
        dx: Tensor,
    ):
        self.vectors, self._integers = Vectors(cpu.lanes), Vectors(cpu.lanes, "int32")
        self._targets, self._dy, self._scale, self._y, self._dx = targets, dy, scale, y, dx

    def row(self, of: Row) -> None:
        """Emit the gradient of a position whose classes are a row."""
        dx, vectors = self._dx, self.vectors
        value, target = self._factor(of.number)
        wide = bind(vectors.splat(value))

        def element(at: tirx.PrimExpr, number: Extent | None, _k: int) -> None:
            vectors.store(dx, at, wide * self._probability(at, number), number)

        of.each(element)
        with b.when(target >= 0):
            b.store(dx, of.base + target, dx[of.base + target] - value)

    def columns(self, of: Columns) -> None:
        """Emit the gradients of neighbouring positions."""
        vectors = self.vectors
        values = b.scratch(of.size * vectors.lanes)
        own = b.scratch(of.size * vectors.lanes, "int32")
        number = of.size * vectors.lanes if of.number is None else of.number
        with b.serial(0, number) as i:
            value, target = self._factor(bind(of.first + i))
            b.store(values, i, value)
            b.store(own, i, target)

        def element(
            at: tirx.PrimExpr, number: Extent | None, k: int, class_index: tirx.PrimExpr
        ) -> None:
            wide = bind(vectors.load(values, k * vectors.lanes, number))
            targets = self._integers.load(own, k * vectors.lanes, number)
            is_own = tirx.EQ(targets, tirx.Broadcast(class_index, vectors.lanes))
            share = wide * self._probability(at, number)
            share = share - tirx.Select(is_own, wide, vectors.splat(0))
            vectors.store(self._dx, at, share, number)

        of.each_row(element)

    def _factor(self, position: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        gradient = self._dy[position] if self._scale is None else self._scale
        return self._targets.factor(position, gradient)

    def _probability(self, at: tirx.PrimExpr, number: Extent | None) -> tirx.PrimExpr:
        """Return the probabilities of classes."""
        return math.exp(bind(self.vectors.load(self._y, at, number)))


def _sum(number: Extent, targets: _Targets) -> tirx.PrimExpr:
    """Return the sum of the weights of all targets; its order does not depend on the number of
    threads."""
    parts = b.scratch(_PARTS)
    with b.parallel(0, _PARTS) as part:
        first = bind(part * number // _PARTS)
        last = bind((part + 1) * number // _PARTS)
        b.store(parts, part, tirx.const(0.0, "float32"))
        with b.serial(0, last - first) as i:
            value, _ = targets.factor(first + i, tirx.const(1.0, "float32"))
            b.store(parts, part, parts[part] + value)
    return sum_of(parts[i] for i in range(_PARTS))
