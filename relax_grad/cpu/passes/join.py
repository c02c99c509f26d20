"""The replacement of sums of gradients of slices by concatenations."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial

import tvm
from tvm import relax

from ...ir.compat import dtype_of
from ._slices import SLICES, Slice, slice_of, static_shape
from ._tensor_sums import Emit, Group, JoinTerms

#: The fewest slices that are joined. The sum of fewer slices is one loop that is as fast.
_FEWEST = 4

#: The fewest slices that are joined if most elements are 0. The sum compares the indices of each
#: element with each slice, and from this number on takes longer than the concatenation.
_MANY = 16


@tvm.transform.module_pass(opt_level=0, name="relax_grad.JoinSlices")
class JoinSlices:
    """Replace sums of the gradients of disjoint slices of a tensor by concatenations.

    The gradient of a slice is 0 outside the slice, so that the sum writes one tensor for each
    slice. ``concat`` of the cotangents, with zeros between them, gives the same numbers, except for
    the sign of zeros, and writes one tensor. Such sums come from the differentiation of networks
    that read a sequence step by step. Slices are ``strided_slice`` along one axis with stride 1,
    and ``take`` of consecutive constant indices. Each may be transposed.

    Other terms of the sum stay. A sum is rewritten only if each partial sum is used once, in the
    same dataflow block, and the shapes are static. Cotangents that a call may overwrite before the
    whole sum is computed are added as before.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((16, 64), "float32"))
    >>> w = relax.Var("w", relax.TensorType((64, 64), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x, w]):
    ...     with bb.dataflow():
    ...         total = relax.const(0.0, "float32")
    ...         for i in range(16):
    ...             row = bb.emit(relax.op.strided_slice(x, [0], [i], [i + 1]))
    ...             part = bb.emit(relax.op.sin(bb.emit(relax.op.matmul(row, w))))
    ...             total = bb.emit(relax.op.add(total, bb.emit(relax.op.sum(part))))
    ...         total = bb.emit_output(total)
    ...     _ = bb.emit_func_output(total)
    >>> module = relax_grad.value_and_grad(bb.get())
    >>> text = transform.JoinSlices()(module).script()
    >>> module.script().count("R.concat"), text.count("R.concat")
    (0, 1)
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return JoinTerms(SLICES, slice_of, _layers)(mod)


def _layers(slices: Sequence[Slice], kind: relax.TensorType) -> list[Group]:
    """Return the layers of slices whose concatenation takes less time than their sum."""
    shape = static_shape(kind)
    if shape is None:
        return []
    dtype = dtype_of(kind)
    layers = [layer for layer in layers_of(slices) if _is_worth_it(layer, shape)]
    return [Group(layer, partial(_concat, layer, shape, dtype)) for layer in layers]


def layers_of(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Return slices in layers. The slices of a layer lie along one axis, in order and without
    overlaps."""
    axes: dict[int, list[Slice]] = {}
    for slice_ in slices:
        axes.setdefault(slice_.axis, []).append(slice_)
    layers: list[list[Slice]] = []
    for along_axis in axes.values():
        # The layers along the axis, by their ends: the next slice goes to the layer that ends
        # first.
        ends: list[tuple[int, int]] = []
        for slice_ in sorted(along_axis, key=lambda slice_: slice_.start):
            if ends and ends[0][0] <= slice_.start:
                _, number = heapq.heappop(ends)
            else:
                number = len(layers)
                layers.append([])
            layers[number].append(slice_)
            heapq.heappush(ends, (slice_.stop, number))
    return layers


def _is_worth_it(layer: Sequence[Slice], shape: Sequence[int]) -> bool:
    """Tell whether a concatenation takes less time than a sum. Zeros take time too if they are not
    fused."""
    covered = sum(slice_.stop - slice_.start for slice_ in layer)
    is_dense = 2 * covered >= shape[layer[0].axis]
    return len(layer) >= (_FEWEST if is_dense else _MANY)


def _concat(layer: Sequence[Slice], shape: Sequence[int], dtype: str, emit: Emit) -> relax.Call:
    """Return the concatenation of the slices of a layer, with zeros between them."""
    axis = layer[0].axis
    parts: list[relax.Expr] = []

    def fill(start: int, stop: int) -> None:
        if stop > start:
            gap = [*shape[:axis], stop - start, *shape[axis + 1 :]]
            parts.append(emit(relax.op.zeros(gap, dtype)))

    end = 0
    for slice_ in layer:
        fill(end, slice_.start)
        part, end = slice_.source, slice_.stop
        for change in slice_.changes():
            part = emit(change(part))
        parts.append(part)
    fill(end, shape[axis])
    return relax.op.concat(relax.Tuple(parts), axis)
