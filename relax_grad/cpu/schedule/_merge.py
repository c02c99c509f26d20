"""Horizontal fusion: several element-wise functions as one function with several results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx

from ...ir.compat import BufferLoad, loaded_buffer, structural_map
from ...ir.expressions import substitute
from ...ir.module import is_buffer
from ._fuse import Group, fuse, weigh
from ._halves import widened_sections
from ._nest import Axis, Nest, nests_of

#: The maximum number of tensors of one loop, apart from scalars: each needs an address, and a
#: memory stream of the processor.
_MOST = 12

#: The maximum number of expression nodes in one loop.
_LARGEST = 400


@dataclass(frozen=True)
class Pointwise:
    """An element-wise function: each element of the result depends only on operand elements at the
    same position.

    Attributes
    ----------
    params : Sequence[tirx.Var]
        The operands, then the result; all are tensors.
    nests : Sequence[Nest]
        The nests of the function.
    allocated : Sequence[tirx.Buffer]
        The intermediate buffers.
    dtypes : Sequence[str]
        The dtypes of the tensors. The nests take the bits of tensors of bfloat16, as integers.
    """

    params: Sequence[tirx.Var]
    nests: Sequence[Nest]
    allocated: Sequence[tirx.Buffer]
    dtypes: Sequence[str]


@dataclass(frozen=True)
class Part:
    """A call of an element-wise function.

    Attributes
    ----------
    function : Pointwise
        The callee; it takes the operands, then the result.
    tensors : Sequence[Hashable]
        The names of the tensors that are passed; parts that share a tensor use the same name for
        it.
    shapes : Sequence[Sequence[tirx.PrimExpr]]
        The shape of each tensor, of integers or variables that all parts share.
    """

    function: Pointwise
    tensors: Sequence[Hashable]
    shapes: Sequence[Sequence[tirx.PrimExpr]]


@dataclass(frozen=True)
class Merged:
    """The nests of several parts, over common buffers for their tensors."""

    nests: list[Nest]
    allocated: list[tirx.Buffer]
    buffers: dict[Hashable, tirx.Buffer]
    dtypes: dict[Hashable, str]

    def original(self, name: Hashable) -> tirx.Buffer:
        """Return the parameter for a tensor, in its own dtype."""
        buffer, dtype = self.buffers[name], self.dtypes[name]
        return (
            buffer if str(buffer.dtype) == dtype else _parameter(buffer.shape, dtype, buffer.name)
        )

    def groups(self, dropped: Sequence[Hashable] = ()) -> list[Group]:
        """Return the fused groups of nests; ``dropped`` are the tensors that only the parts use."""
        return fuse(self.nests, [*self.allocated, *(self.buffers[name] for name in dropped)])


def pointwise(function: tirx.PrimFunc) -> Pointwise | None:
    """Return an element-wise function as a :class:`Pointwise`, or None if it is not element-wise.

    Operands may be broadcast. Functions that only copy are excluded.
    """
    parts = nests_of(function)
    if parts is None or not _is_pointwise(parts[0]) or not all(map(is_buffer, function.params)):
        return None
    dtypes = [str(param.dtype) for param in function.params]
    wide = widened_sections(parts[0], function.params, parts[1])
    if wide is None:
        return None
    nests, params, allocated = wide
    return Pointwise(list(params), nests, allocated, dtypes)


def _is_pointwise(nests: Sequence[Nest]) -> bool:
    is_copy = all(isinstance(nest.value, BufferLoad) for nest in nests)
    return not is_copy and all(
        not nest.combine
        and _is_in_order(nest.indices, nest)
        and all(_is_in_order(load.indices, nest) for load in nest.loads)
        for nest in nests
    )


def _is_in_order(indices: Sequence, nest: Nest) -> bool:
    """Tell whether each index is a constant or an axis, with the axes in their order."""
    numbers = {axis.var: i for i, axis in enumerate(nest.axes)}
    positions = [numbers.get(index, -1) for index in indices if not isinstance(index, tirx.IntImm)]
    return -1 not in positions and positions == sorted(set(positions))


def merge(parts: Sequence[Part]) -> Merged | None:
    """Return several parts merged into one loop, or None if one loop cannot compute them."""
    buffers: dict[Hashable, tirx.Buffer] = {}
    dtypes: dict[Hashable, str] = {}
    nests, allocated = [], []
    for part in parts:
        dtypes.update(zip(part.tensors, part.function.dtypes, strict=True))
        for name, param, shape in zip(part.tensors, part.function.params, part.shapes, strict=True):
            if name not in buffers:
                buffers[name] = _parameter(shape, str(param.dtype), f"b{len(buffers)}")
        renamed = _renamed(part, buffers)
        if renamed is None:
            return None
        nests += renamed[0]
        allocated += renamed[1]
    streams = [buffer for buffer in buffers.values() if len(buffer.shape)]
    is_small = len(streams) <= _MOST and sum(weigh(nest.value)[0] for nest in nests) <= _LARGEST
    merged = Merged(nests, allocated, buffers, dtypes)
    return merged if is_small and len(merged.groups()) == 1 else None


def _parameter(shape: Sequence, dtype: str, name: str) -> tirx.Buffer:
    align = max(1, tvm_ffi.dtype(dtype).itemsize)
    return tirx.decl_buffer(shape, dtype, name, data_alignment=align)


def _renamed(part: Part, buffers: dict) -> tuple[list[Nest], list[tirx.Buffer]] | None:
    """Return the nests of a part over the common buffers, and its intermediate buffers.

    None if an extent of a parameter is neither an integer nor a variable.
    """
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
    return nests, [own[buffer] for buffer in function.allocated]


def _over(nest: Nest, buffers: dict, extents: dict) -> Nest:
    """Return a nest over other buffers, with other extents and with fresh variables."""
    axes = [
        Axis(tirx.Var(axis.var.name, axis.var.ty.dtype), substitute(axis.extent, extents))
        for axis in nest.axes
    ]
    at = dict(extents)
    at.update({old.var: new.var for old, new in zip(nest.axes, axes, strict=True)})

    def load(old):
        return buffers[loaded_buffer(old)][tuple(substitute(index, at) for index in old.indices)]

    value = structural_map(nest.value, (BufferLoad, load))
    return replace(
        nest,
        axes=axes,
        buffer=buffers[nest.buffer],
        indices=[substitute(index, at) for index in nest.indices],
        value=substitute(value, at),
    )
