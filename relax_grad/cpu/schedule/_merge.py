"""Horizontal fusion: several element-wise functions as one function with several results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm_ffi
from tvm import tirx

from ...ir.compat import BufferLoad, loaded_buffer, structural_map
from ...ir.expressions import substitute
from ...ir.module import is_buffer
from ._fuse import Group, fuse, inlined, weigh
from ._halves import widened_sections
from ._nest import Axis, Nest, nests_of
from ._outline import Outline, are_one_loop, outlines_of

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

    @cached_property
    def weight(self) -> int:
        """The number of expression nodes."""
        return sum(weigh(nest.value)[0] for nest in self.nests)

    @cached_property
    def is_static(self) -> bool:
        """Whether all extents of parameters are integers."""
        return all(type(extent) is tirx.IntImm for extent in self._extents)

    @cached_property
    def has_plain_extents(self) -> bool:
        """Whether each extent of a parameter is an integer or a variable."""
        return all(isinstance(extent, (tirx.Var, tirx.IntImm)) for extent in self._extents)

    @property
    def _extents(self) -> list[tirx.PrimExpr]:
        return [extent for param in self.params for extent in param.shape[:]]

    @cached_property
    def outlines(self) -> list[Outline] | None:
        """The outlines of the nests after inlining; None if a nest has none."""
        return outlines_of(inlined(self.nests, self.allocated))


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
    """Several parts over common buffers for their tensors."""

    parts: Sequence[Part]

    @cached_property
    def dtypes(self) -> dict[Hashable, str]:
        """The dtype of each tensor."""
        dtypes: dict[Hashable, str] = {}
        for part in self.parts:
            dtypes.update(zip(part.tensors, part.function.dtypes, strict=True))
        return dtypes

    @cached_property
    def buffers(self) -> dict[Hashable, tirx.Buffer]:
        """The buffer of each tensor."""
        buffers: dict[Hashable, tirx.Buffer] = {}
        for part in self.parts:
            params = part.function.params
            for name, param, shape in zip(part.tensors, params, part.shapes, strict=True):
                if name not in buffers:
                    buffers[name] = _parameter(shape, str(param.dtype), f"b{len(buffers)}")
        return buffers

    @cached_property
    def _over_buffers(self) -> list[tuple[list[Nest], list[tirx.Buffer]]]:
        return [_renamed(part, self.buffers) for part in self.parts]

    @property
    def nests(self) -> list[Nest]:
        """The nests of all parts over the buffers."""
        return [nest for nests, _ in self._over_buffers for nest in nests]

    @property
    def allocated(self) -> list[tirx.Buffer]:
        """The intermediate buffers of all parts."""
        return [buffer for _, allocated in self._over_buffers for buffer in allocated]

    def original(self, name: Hashable) -> tirx.Buffer:
        """Return the parameter for a tensor, in its own dtype."""
        buffer, dtype = self.buffers[name], self.dtypes[name]
        return (
            buffer if str(buffer.dtype) == dtype else _parameter(buffer.shape, dtype, buffer.name)
        )

    def groups(self, dropped: Sequence[Hashable] = ()) -> list[Group]:
        """Return the fused groups of nests; ``dropped`` are the tensors that only the parts use."""
        return fuse(self.nests, [*self.allocated, *(self.buffers[name] for name in dropped)])


def pointwise(function: tirx.PrimFunc, widens: bool = True) -> Pointwise | None:
    """Return an element-wise function as a :class:`Pointwise`, or None if it is not element-wise.

    Operands may be broadcast. Functions that only copy are excluded. Half precision is computed in
    float32, unless ``widens`` is False: the function does so itself.
    """
    parts = nests_of(function)
    if parts is None or not _is_pointwise(parts[0]) or not all(map(is_buffer, function.params)):
        return None
    dtypes = [str(param.dtype) for param in function.params]
    if not widens:
        return Pointwise(list(function.params), *parts, dtypes)
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
    streams = {
        name
        for part in parts
        for name, shape in zip(part.tensors, part.shapes, strict=True)
        if len(shape)
    }
    is_small = len(streams) <= _MOST and sum(part.function.weight for part in parts) <= _LARGEST
    if not is_small or not all(part.function.has_plain_extents for part in parts):
        return None
    merged = Merged(parts)
    outlines = _outlines(parts)
    is_one = len(merged.groups()) == 1 if outlines is None else are_one_loop(outlines)
    return merged if is_one else None


def _outlines(parts: Sequence[Part]) -> list[Outline] | None:
    """Return the outlines of the nests of all parts over common tensors.

    None if a nest has no outline, or if inlining may depend on the tensors or the extents that are
    passed: one is passed twice, or a number for a variable extent.
    """
    outlines: list[Outline] = []
    for i, part in enumerate(parts):
        function, extents = part.function, _extents(part)
        variables = {extent for extent in extents.values() if isinstance(extent, tirx.Var)}
        is_own = len(set(part.tensors)) == len(part.tensors) and len(variables) == len(extents)
        if not is_own or function.outlines is None:
            return None
        names: dict[tirx.Buffer, Hashable] = {
            **dict(zip(function.params, part.tensors, strict=True)),
            **{buffer: ("allocated", i, k) for k, buffer in enumerate(function.allocated)},
        }
        outlines += [outline.over(names, extents) for outline in function.outlines]
    return outlines


def _extents(part: Part) -> dict[tirx.Var, tirx.PrimExpr]:
    """Return the extents that are passed for the variables of a function."""
    if part.function.is_static:
        return {}
    return {
        extent: wanted
        for param, shape in zip(part.function.params, part.shapes, strict=True)
        for extent, wanted in zip(param.shape, shape, strict=True)
        if isinstance(extent, tirx.Var)
    }


def _parameter(shape: Sequence, dtype: str, name: str) -> tirx.Buffer:
    align = max(1, tvm_ffi.dtype(dtype).itemsize)
    return tirx.decl_buffer(shape, dtype, name, data_alignment=align, layout=None)


def _renamed(part: Part, buffers: dict) -> tuple[list[Nest], list[tirx.Buffer]]:
    """Return the nests of a part over the common buffers, and its intermediate buffers."""
    function, extents = part.function, _extents(part)
    params = zip(function.params, part.tensors, strict=True)
    own = {param: buffers[name] for param, name in params}
    for buffer in function.allocated:
        shape = [substitute(extent, extents) for extent in buffer.shape]
        own[buffer] = tirx.decl_buffer(shape, str(buffer.dtype), buffer.name, layout=None)
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

    def load(old: tirx.PrimExpr) -> tirx.PrimExpr:
        return buffers[loaded_buffer(old)][tuple(substitute(index, at) for index in old.indices)]

    value = structural_map(nest.value, (BufferLoad, load))
    return replace(
        nest,
        axes=axes,
        buffer=buffers[nest.buffer],
        indices=[substitute(index, at) for index in nest.indices],
        value=substitute(value, at),
    )
