"""Element-wise functions of a matrix product, such as an optimizer's update of a weight, which
consume its tiles."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.ir import Call

from ...ir.compat import structural_walk
from ...ir.dtypes import HALVES
from ...ir.module import IN_PLACE
from ..kernel.matmul.consumed import Consumer, consumed, is_consumable
from ..kernel.matmul.matmul import Matmul
from ..target import CPU
from ._access import Accesses
from ._emitter import Emitter
from ._fuse import Group, flat
from ._in_place import for_in_place, in_place_pairs
from ._merge import Merged
from ._nest import is_zero
from ._nest import product as product_of


def schedule_consumer(
    merged: Merged,
    inputs: Sequence[Hashable],
    results: Sequence[Hashable],
    source: Hashable,
    product: Matmul,
    cpu: CPU,
) -> tirx.PrimFunc | None:
    """Return a function that computes a product, and merged functions of its elements.

    Parameters
    ----------
    merged : Merged
        The merged functions.
    inputs, results : Sequence[Hashable]
        The names of the tensors that the function takes after the factors of the product. Other
        tensors are not stored.
    source : Hashable
        The name of the product among the other tensors.
    product : Matmul
        The product.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc or None
        None if the product cannot be consumed tile by tile, if the functions compute an element
        from other elements than that at its place, or if they take more time to compute than their
        tensors to read.
    """
    taken = [merged.buffers[name] for name in (*inputs, *results)]
    if not is_consumable(product, cpu) or not _are_plain(merged):
        return None
    dropped = [buffer for name, buffer in merged.buffers.items() if buffer not in taken]
    names = {buffer: name for name, buffer in merged.buffers.items()}
    groups = merged.groups([names[buffer] for buffer in dropped])
    own = {buffer: _flat(buffer) for buffer in (*merged.buffers.values(), *merged.allocated)}
    value = own[merged.buffers[source]]
    if len(groups) != 1:
        return None
    whole = for_in_place(groups[0])
    over_flat = flat(whole, own)
    if not _is_along(over_flat, value, product) or not _is_light(over_flat, cpu):
        return None

    def consumer(*tensors: tirx.Buffer) -> Consumer:
        group = flat(whole, {**own, **dict(zip(taken, tensors, strict=True))})
        emitter = Emitter(group, cpu)
        (axis,) = emitter.axes
        scalars = {
            load: T.Bind(load)
            for load, access in emitter.accesses.loads.items()
            if access.stride(axis) == 0
        }

        def consume(index: tirx.PrimExpr, element: tirx.PrimExpr) -> None:
            emitter.element({axis.var: index}, loaded={**scalars, value: element})

        read = zip(tensors[: len(inputs)], taken, strict=False)
        return Consumer(consume, [buffer for buffer, old in read if len(old.shape)])

    params = [
        (f"p{i}", [int(extent) for extent in buffer.shape], str(buffer.dtype))
        for i, buffer in enumerate(taken)
    ]
    function = consumed(product, cpu, params, consumer)
    number = len(inputs)
    pairs = in_place_pairs(whole, taken[:number], taken[number:])
    # The factors of the product are the first parameters.
    shifted = [(read + 2, written + 2) for read, written in pairs]
    return function.with_attr(IN_PLACE, shifted) if shifted else function


def _are_plain(merged: Merged) -> bool:
    """Tell whether all tensors have static shapes, and none is in half precision."""
    extents = [extent for buffer in merged.buffers.values() for extent in buffer.shape]
    is_static = all(isinstance(extent, tirx.IntImm) for extent in extents)
    return is_static and not any(dtype in HALVES for dtype in merged.dtypes.values())


def _flat(buffer: tirx.Buffer) -> tirx.Buffer:
    return tirx.decl_buffer([product_of(buffer.shape)], str(buffer.dtype), buffer.name, layout=None)


def _is_light(group: Group, cpu: CPU) -> bool:
    """Tell whether a group computes vectors of float32 without divisions and functions.

    Divisions and roots, as in Adam's update, take as long as the memory that is saved: with them,
    one loop after the product is as fast, or faster.
    """
    emitter = Emitter(group, cpu)
    (axis,) = emitter.axes
    whole = [access for access in emitter.accesses.all if access.stride(axis)]
    heavy: list = []
    for nest in group.nests:
        structural_walk(nest.value, ((tirx.Div, Call), heavy.append))
    return (
        not heavy
        and all(str(access.buffer.dtype) == "float32" for access in whole)
        and all(map(emitter.is_vector, range(len(group.nests))))
    )


def _is_along(group: Group, source: tirx.Buffer, product: Matmul) -> bool:
    """Tell whether a group over flat buffers reads and writes only elements at the place of an
    element of the product, and scalars, and reads the product."""
    accesses = Accesses(group.nests)
    if len(accesses.axes) != 1 or accesses.tested or any(nest.combine for nest in group.nests):
        return False
    (axis,) = accesses.axes
    if axis.size != product.rows * product.columns:
        return False
    whole = [*accesses.stores, *(a for a in accesses.loads.values() if a.buffer.same_as(source))]
    is_read = len(whole) > len(accesses.stores)
    return (
        is_read
        and all(access.stride(axis) in (0, 1) for access in accesses.all)
        and all(access.stride(axis) == 1 and is_zero(access.base) for access in whole)
    )
