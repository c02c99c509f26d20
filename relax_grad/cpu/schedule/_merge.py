"""Functions of elements that go along with each other, as one function with several results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx

from ...ir.compat import BufferLoad, loaded_buffer
from ...ir.module import is_buffer
from ._fuse import Group, fuse, weigh
from ._nest import Axis, Nest, nests_of, substitute

#: Tensors that one loop goes through, at most: each takes an address, and a stream of the processor.
_MOST = 12

#: Nodes of the expressions of one loop, at most.
_LARGEST = 400


@dataclass(frozen=True)
class Pointwise:
    """A function of which each element of the result comes from the elements at its own place.

    Attributes
    ----------
    params : Sequence[tirx.Var]
        The arguments, then the result: tensors all of them.
    nests : Sequence[Nest]
        What it computes.
    allocated : Sequence[tirx.Buffer]
        What it keeps between them.
    """

    params: Sequence[tirx.Var]
    nests: Sequence[Nest]
    allocated: Sequence[tirx.Buffer]


@dataclass(frozen=True)
class Part:
    """A function that is called with certain tensors.

    Attributes
    ----------
    function : Pointwise
        Takes the arguments, then the result.
    tensors : Sequence[Hashable]
        What its parameters are: parts with a tensor in common name it alike.
    shapes : Sequence[Sequence[tirx.PrimExpr]]
        The extents of each, integers or variables that all parts have in common.
    """

    function: Pointwise
    tensors: Sequence[Hashable]
    shapes: Sequence[Sequence[tirx.PrimExpr]]


@dataclass(frozen=True)
class Merged:
    """What parts compute together: the nests, over buffers that stand for their tensors."""

    nests: list[Nest]
    allocated: list[tirx.Buffer]
    buffers: dict[Hashable, tirx.Buffer]

    def groups(self, dropped: Sequence[Hashable] = ()) -> list[Group]:
        """Return the groups of nests, given the tensors that nothing but the parts needs."""
        return fuse(self.nests, [*self.allocated, *(self.buffers[each] for each in dropped)])


def pointwise(function: tirx.PrimFunc) -> Pointwise | None:
    """Return a function as one of elements; None where it is not.

    What an operand is broadcast along does not count. A function that only copies is none.
    """
    found = nests_of(function)
    if found is None or not _is_pointwise(found[0]) or not all(map(is_buffer, function.params)):
        return None
    return Pointwise(list(function.params), *found)


def _is_pointwise(nests: Sequence[Nest]) -> bool:
    is_copy = all(isinstance(nest.value, BufferLoad) for nest in nests)
    return not is_copy and all(
        not nest.combine
        and _is_in_order(nest.indices, nest)
        and all(_is_in_order(load.indices, nest) for load in nest.loads)
        for nest in nests
    )


def _is_in_order(indices: Sequence, nest: Nest) -> bool:
    """Tell whether indices are axes in their order, or constants."""
    numbers = {axis.var: i for i, axis in enumerate(nest.axes)}
    found = [numbers.get(index, -1) for index in indices if not isinstance(index, tirx.IntImm)]
    return -1 not in found and found == sorted(set(found))


def merge(parts: Sequence[Part]) -> Merged | None:
    """Return what parts compute in one loop; None where they are not one."""
    buffers: dict[Hashable, tirx.Buffer] = {}
    nests, allocated = [], []
    for part in parts:
        for name, param, shape in zip(part.tensors, part.function.params, part.shapes, strict=True):
            if name not in buffers:
                dtype = str(param.dtype)
                buffers[name] = tirx.decl_buffer(
                    shape,
                    dtype,
                    f"b{len(buffers)}",
                    data_alignment=max(1, tvm_ffi.dtype(dtype).itemsize),
                )
        found = _renamed(part, buffers)
        if found is None:
            return None
        nests += found[0]
        allocated += found[1]
    is_small = len(buffers) <= _MOST and sum(weigh(nest.value)[0] for nest in nests) <= _LARGEST
    merged = Merged(nests, allocated, buffers)
    return merged if is_small and len(merged.groups()) == 1 else None


def _renamed(part: Part, buffers: dict) -> tuple[list[Nest], list[tirx.Buffer]] | None:
    """Return the nests of a part, over the buffers of all parts, and what it allocates."""
    function = part.function
    extents = {}
    own = {}
    for name, param, shape in zip(part.tensors, function.params, part.shapes, strict=True):
        own[param] = buffers[name]
        for extent, wanted in zip(param.shape, shape, strict=True):
            if isinstance(extent, tirx.Var):
                extents[extent] = wanted
            elif not isinstance(extent, tirx.IntImm):
                return None
    for buffer in function.allocated:
        shape = [substitute(extent, extents) for extent in buffer.shape]
        own[buffer] = tirx.decl_buffer(shape, str(buffer.dtype), buffer.name)
    nests = [_over(nest, own, extents) for nest in function.nests]
    return nests, [own[each] for each in function.allocated]


def _over(nest: Nest, buffers: dict, extents: dict) -> Nest:
    """Return a nest over other buffers, with other extents and variables of its own."""
    axes = [
        Axis(tirx.Var(axis.var.name, axis.var.ty.dtype), substitute(axis.extent, extents))
        for axis in nest.axes
    ]
    at = dict(extents)
    at.update({old.var: new.var for old, new in zip(nest.axes, axes, strict=True)})

    def load(old):
        return buffers[loaded_buffer(old)][tuple(substitute(index, at) for index in old.indices)]

    value = tvm_ffi.structural_map(nest.value, (BufferLoad, load))
    return replace(
        nest,
        axes=axes,
        buffer=buffers[nest.buffer],
        indices=[substitute(index, at) for index in nest.indices],
        value=substitute(value, at),
    )
