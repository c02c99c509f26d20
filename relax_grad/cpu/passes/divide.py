"""The replacement of many slices of a tensor by one split."""

from __future__ import annotations

from itertools import pairwise

import tvm
from tvm import relax

from ...ir.aliases import Memory
from ...ir.bindings import bindings_of, with_value
from ...ir.compat import constant_value
from ...ir.dataflow import with_changed_blocks
from ._slices import READS, Slice, slice_read, static_shape

#: The fewest slices for which a tensor is split. Fewer slices are better fused with their
#: consumers.
_FEWEST = 16


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DivideSlices")
class DivideSlices:
    """Replace many slices of a tensor by one ``split``, where they cover most of the tensor.

    Fused functions with slices at different offsets are different functions, and each is compiled.
    After this pass, all steps of a network that reads a sequence step by step call the same
    functions. Slices are ``strided_slice`` along one axis with stride 1, and ``take`` of
    consecutive constant indices. They are in one dataflow block, do not overlap, and have static
    shapes. A tensor that a call may write to in between stays as it is.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((16, 8), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         rows = [bb.emit(relax.op.strided_slice(x, [0], [i], [i + 1])) for i in range(16)]
    ...         y = bb.emit_output(relax.op.concat([bb.emit(relax.op.sin(row)) for row in rows]))
    ...     _ = bb.emit_func_output(y)
    >>> text = transform.DivideSlices()(bb.get()).script()
    >>> text.count("R.strided_slice"), text.count("R.split")
    (0, 1)
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return with_changed_blocks(
            mod, _has_slices, lambda _, memory: lambda block: _with_splits(block, memory)
        )


def _has_slices(function: relax.Function) -> bool:
    """Tell whether a function reads enough slices to split a tensor."""
    values = [binding.value for binding in bindings_of(function.body)]
    return sum(isinstance(value, relax.Call) and value.op in READS for value in values) >= _FEWEST


def _with_splits(block: relax.DataflowBlock, memory: Memory) -> relax.DataflowBlock:
    """Return a block in which splits replace slices, or the block itself if no tensor has enough
    slices."""
    constants: dict[relax.Var, relax.Expr] = {}
    groups: dict[tuple[relax.Var, int], list[tuple[relax.VarBinding, Slice]]] = {}
    for binding in block.bindings[:]:
        value = binding.value
        if constant_value(value) is not None and memory.is_settled(binding.var):
            constants[binding.var] = value
        if not isinstance(binding, relax.VarBinding) or not isinstance(value, relax.Call):
            continue
        slice_ = slice_read(value, lambda variable: constants.get(variable, variable))
        if slice_ is None or not isinstance(slice_.source, relax.Var):
            continue
        if not memory.changed(slice_.source, binding.var):
            groups.setdefault((slice_.source, slice_.axis), []).append((binding, slice_))
    changes: dict[relax.Var, list[relax.Binding]] = {}
    for (source, axis), slices in groups.items():
        shape = static_shape(source.ty)
        if shape is not None and _is_worth_it(slices, shape[axis]):
            changes.update(_split(source, axis, shape[axis], slices))
    if not changes:
        return block
    bindings = [new for old in block.bindings[:] for new in changes.get(old.var, [old])]
    return relax.DataflowBlock(bindings, block.span)


def _is_worth_it(slices: list, extent: int) -> bool:
    """Tell whether slices are many, do not overlap, and cover at least three quarters of an
    axis."""
    ranges = sorted((slice_.start, slice_.stop) for _, slice_ in slices)
    if len(ranges) < _FEWEST:
        return False
    if any(start < end for (_, end), (start, _) in pairwise(ranges)):
        return False
    return 4 * sum(stop - start for start, stop in ranges) >= 3 * extent


def _split(
    source: relax.Var, axis: int, extent: int, slices: list[tuple[relax.VarBinding, Slice]]
) -> dict[relax.Var, list[relax.Binding]]:
    """Return the bindings that replace each binding of a slice. The first one splits the tensor."""
    starts = {bound for _, slice_ in slices for bound in (slice_.start, slice_.stop)}
    bounds = sorted(starts - {0, extent})
    numbers = {start: i for i, start in enumerate([0, *bounds])}
    builder = relax.BlockBuilder()
    parts = builder.normalize(relax.op.split(source, bounds, axis))
    whole = relax.DataflowVar("parts", parts.ty)
    changes: dict[relax.Var, list[relax.Binding]] = {}
    for binding, slice_ in slices:
        bindings = [] if changes else [relax.VarBinding(whole, parts)]
        part = builder.normalize(relax.TupleGetItem(whole, numbers[slice_.start]))
        if slice_.is_row:
            row = relax.DataflowVar("part", part.ty)
            bindings.append(relax.VarBinding(row, part))
            part = relax.op.squeeze(row, [axis])
        changes[binding.var] = [*bindings, with_value(binding, part)]
    return changes
