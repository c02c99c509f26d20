"""The replacement of sums of gradients of slices by concatenations."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import tvm
from tvm import relax
from tvm.ir import Op

from ...ir.aliases import Memory
from ...ir.bindings import bindings_of, used
from ...ir.compat import constant_value, dtype_of
from ...ir.dataflow import with_changed_blocks
from ._slices import SLICES, Slice, is_same_tensor, slice_of, static_shape

_ADD = Op.get("relax.add")

#: The fewest slices that are joined. The sum of fewer slices is one loop that is as fast.
_FEWEST = 4

#: The fewest slices that are joined if most elements are 0. The sum compares the indices of each element with each
#: slice, and from this number on takes longer than the concatenation.
_MANY = 16


@tvm.transform.module_pass(opt_level=0, name="relax_grad.JoinSlices")
class JoinSlices:
    """Replace sums of the gradients of disjoint slices of a tensor by concatenations.

    The gradient of a slice is 0 outside the slice, so that the sum writes one tensor for each slice. ``concat`` of the
    cotangents, with zeros between them, gives the same numbers, except for the sign of zeros, and writes one tensor.
    Such sums come from the differentiation of networks that read a sequence step by step. Slices are ``strided_slice``
    along one axis with stride 1, and ``take`` of consecutive constant indices. Each may be transposed.

    Other terms of the sum stay. A sum is rewritten only if each partial sum is used once, in the same dataflow block,
    and the shapes are static. Cotangents that a call may overwrite before the whole sum is computed are added as
    before.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return with_changed_blocks(mod, _has_slices, _joined)


def _has_slices(function: relax.Function) -> bool:
    """Tell whether a function has additions and gradients of slices."""
    calls = {b.value.op for b in bindings_of(function.body) if isinstance(b.value, relax.Call)}
    return _ADD in calls and not calls.isdisjoint(SLICES)


def _joined(
    function: relax.Function, memory: Memory
) -> Callable[[relax.DataflowBlock], relax.DataflowBlock]:
    """Return the function that joins the sums of a dataflow block."""
    uses = Counter(used(function.body.body))
    for binding in bindings_of(function.body):
        uses.update(used(binding.value))
    return lambda block: _Sums(block, uses, memory).joined()


class _Sums:
    """The sums of a dataflow block.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    uses : Counter
        The number of uses of each variable of the function.
    memory : Memory
        The memory that calls of the function write to.
    """

    def __init__(self, block: relax.DataflowBlock, uses: Counter, memory: Memory):
        self._block, self._uses, self._memory = block, uses, memory
        self._values = {
            b.var: b.value for b in block.bindings[:] if isinstance(b, relax.VarBinding)
        }
        #: Additions of tensors of one static type, in the order of the block.
        self._sums = {
            variable: list(value.args)
            for variable, value in self._values.items()
            if isinstance(value, relax.Call) and value.op == _ADD
            if all(is_same_tensor(variable.ty, argument.ty) for argument in value.args[:])
        }

    def joined(self) -> relax.DataflowBlock:
        """Return the block with concatenations in the place of additions; the same block if nothing changes."""
        partial = {
            operand
            for operands in self._sums.values()
            for operand in operands
            if operand in self._sums and self._is_own(operand)
        }
        changes: dict[relax.Var, list[relax.Binding]] = {}
        for variable in self._sums:
            if variable not in partial:
                self._join(variable, partial, changes)
        if not changes:
            return self._block
        bindings = [new for old in self._block.bindings[:] for new in changes.get(old.var, [old])]
        return relax.DataflowBlock(bindings, self._block.span)

    def _is_own(self, variable: relax.Expr) -> bool:
        """Tell whether a variable has exactly one use, and none outside its block."""
        return isinstance(variable, relax.DataflowVar) and self._uses[variable] == 1

    def _lookup(self, expr: relax.Expr) -> relax.Expr:
        """Return the value of a variable that is removable or a constant, else the expression itself."""
        value = self._values.get(expr, expr)
        if self._is_own(expr):
            return value
        is_constant = constant_value(value) is not None and self._memory.is_settled(expr)
        return value if is_constant else expr

    def _join(self, total: relax.Var, partial: set, changes: dict) -> None:
        """Add the replacements of the bindings of a sum to ``changes``."""
        sums, slices = self._parts(total, partial)
        layers = [layer for layer in layers_of(slices) if _is_worth_it(layer, total.ty)]
        rest: dict[relax.Expr, relax.Expr | None] = {
            each.variables[0]: None for layer in layers for each in layer
        }
        if not rest:
            return
        for variable in reversed(sums):  # the operands of a sum come before the sum
            operands = [rest.get(operand, operand) for operand in self._sums[variable]]
            left = [operand for operand in operands if operand is not None]
            if variable is total:
                changes[variable] = _emitted(total, left, layers)
                return
            if len(left) == 2:
                rest[variable] = variable
                changes[variable] = [relax.VarBinding(variable, relax.op.add(*left))]
            else:
                rest[variable] = left[0] if left else None
                changes[variable] = []

    def _parts(self, total: relax.Var, partial: set) -> tuple[list[relax.Var], list[Slice]]:
        """Return the partial sums of a sum, each before its operands, and the slices that are added."""
        sums, slices, pending = [], [], [total]
        while pending:
            variable = pending.pop()
            sums.append(variable)
            for operand in self._sums[variable]:
                if operand in partial:
                    pending.append(operand)
                    continue
                found = slice_of(operand, self._lookup)
                if found is not None and self._holds(found.variables, total):
                    slices.append(found)
        return sums, slices

    def _holds(self, variables: Sequence[relax.Var], at: relax.Var) -> bool:
        """Tell whether the computation of variables can move to a later binding."""
        return all(self._memory.holds(each, self._values[each], at) for each in variables)


def layers_of(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Return slices in layers. The slices of a layer lie along one axis, in order and without overlaps."""
    axes: dict[int, list[Slice]] = {}
    for each in slices:
        axes.setdefault(each.axis, []).append(each)
    layers: list[list[Slice]] = []
    for found in axes.values():
        # The layers along the axis, by their ends: the next slice goes to the layer that ends first.
        ends: list[tuple[int, int]] = []
        for each in sorted(found, key=lambda each: each.start):
            if ends and ends[0][0] <= each.start:
                _, number = heapq.heappop(ends)
            else:
                number = len(layers)
                layers.append([])
            layers[number].append(each)
            heapq.heappush(ends, (each.stop, number))
    return layers


def _is_worth_it(layer: Sequence[Slice], kind: relax.TensorType) -> bool:
    """Tell whether a concatenation takes less time than a sum. Zeros take time too if they are not fused."""
    covered = sum(each.stop - each.start for each in layer)
    is_dense = 2 * covered >= static_shape(kind)[layer[0].axis]
    return len(layer) >= (_FEWEST if is_dense else _MANY)


def _emitted(
    total: relax.Var, rest: Sequence[relax.Expr], layers: Sequence[Sequence[Slice]]
) -> list[relax.Binding]:
    """Return the bindings that compute a sum of tensors and layers of slices."""
    builder = relax.BlockBuilder()
    bindings: list[relax.Binding] = []

    def emit(value: relax.Expr) -> relax.Var:
        value = builder.normalize(value)
        variable = relax.DataflowVar("joined", value.ty)
        bindings.append(relax.VarBinding(variable, value))
        return variable

    terms = [*rest, *(_concat(layer, total.ty, emit) for layer in layers)]
    for i, term in enumerate(terms[1:], start=1):
        terms[i] = relax.op.add(terms[i - 1], emit(term) if isinstance(term, relax.Call) else term)
        if i < len(terms) - 1:
            terms[i] = emit(terms[i])
    return [*bindings, relax.VarBinding(total, terms[-1])]


def _concat(
    layer: Sequence[Slice], kind: relax.TensorType, emit: Callable[[relax.Expr], relax.Var]
) -> relax.Call:
    """Return the concatenation of the slices of a layer, with zeros between them."""
    shape, axis = list(static_shape(kind)), layer[0].axis
    parts: list[relax.Expr] = []

    def fill(start: int, stop: int) -> None:
        if stop > start:
            gap = [*shape[:axis], stop - start, *shape[axis + 1 :]]
            parts.append(emit(relax.op.zeros(gap, dtype_of(kind))))

    end = 0
    for each in layer:
        fill(end, each.start)
        part, end = each.source, each.stop
        for change in each.changes():
            part = emit(change(part))
        parts.append(part)
    fill(end, shape[axis])
    return relax.op.concat(relax.Tuple(parts), axis)
