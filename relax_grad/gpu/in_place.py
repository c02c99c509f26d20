"""The pairs of parameters of scheduled kernels that may share memory."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx

from ..ir.compat import BufferLoad, SBlock, loaded_buffer, structural_walk
from ..ir.module import IN_PLACE, IS_SCHEDULED, with_changed_functions


@tvm.transform.module_pass(opt_level=0, name="relax_grad.gpu.NamePairs")
def name_pairs(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Name the pairs of an operand and a result that may share memory, in the functions that TVM's
    rules have scheduled element by element.

    After schedules, the statements of a function are no loops that ``WriteToDonated`` analyses. And
    TVM's rules take no function whose operand is its result.
    """
    return with_changed_functions(mod, tirx.PrimFunc, _named)


def _named(function: tirx.PrimFunc) -> tirx.PrimFunc:
    attributes = function.attrs or {}
    if not attributes.get(IS_SCHEDULED, False) or IN_PLACE in attributes:
        return function
    pairs = _pairs(function)
    return function.with_attr(IN_PLACE, pairs) if pairs else function


def _pairs(function: tirx.PrimFunc) -> list[list[int]]:
    """Return the positions of operands and results that may share memory.

    The function has one block with one store. An instance of the block reads an element before it
    writes the element at the same indices, which are the axes of the block: no other instance
    touches it.
    """
    blocks: list[SBlock] = []
    structural_walk(function.body, (SBlock, blocks.append))
    blocks = [block for block in blocks if block.iter_vars]
    stores: list[tirx.BufferStore] = []
    structural_walk(function.body, (tirx.BufferStore, stores.append))
    if len(blocks) != 1 or len(stores) != 1 or not blocks[0].body.same_as(stores[0]):
        return []
    (store,) = stores
    places = {i for i, param in enumerate(function.params) if param.same_as(store.buffer)}
    if not places or not _are_axes(store.indices, blocks[0]):
        return []
    loads: list = []
    structural_walk(store.value, (BufferLoad, loads.append))
    pairs = []
    for i, param in enumerate(function.params):
        own = [load for load in loads if loaded_buffer(load).same_as(param)]
        is_at_place = all(tvm_ffi.structural_equal(load.indices, store.indices) for load in own)
        if own and is_at_place and tvm_ffi.structural_equal(param.ty, store.buffer.ty):
            pairs.append([i, *places])
    return pairs


def _are_axes(indices: Sequence[tirx.PrimExpr], block: SBlock) -> bool:
    """Tell whether indices are all axes of a block with more than one element, each once, and none
    is an axis of a sum."""
    found: set[tirx.Var] = set()
    for index in indices:
        if isinstance(index, tirx.Var):
            if index in found:
                return False
            found.add(index)
        elif not isinstance(index, tirx.IntImm):
            return False
    return all(
        axis.iter_type == tirx.IterVar.DataPar and (axis.var in found or _is_one(axis.dom.extent))
        for axis in block.iter_vars
    )


def _is_one(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1
