"""Tensor expressions of padding and its gradient.

Padding fills position ``p`` of an axis with the element ``source(p - before)`` of the data. So the
gradient of an element is the sum over all positions of its copies. These positions are independent
for each axis, so the axes are unpadded one after the other. No index needs a division, and no
element is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, at_least_1, cast, is_empty, is_static, zeros


def pad(data: te.Tensor, pad_width: Sequence[int], mode: str) -> te.Tensor:
    """Pad with elements of the data, for any width and any extent.

    Unlike ``topi.nn.reflect_pad``, it reflects as often as the width requires, as NumPy does. If a
    symbolic extent is 0 at run time, it reads nothing.

    Parameters
    ----------
    data : te.Tensor
        The data.
    pad_width : Sequence[int]
        The number of positions before and after each axis; a negative one crops.
    mode : str
        ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of ``data``.

    Raises
    ------
    ValueError
        If an axis to be padded is known to be empty.
    """
    widths = list(zip(pad_width[::2], pad_width[1::2], strict=True))
    padded = [axis for axis, (before, after) in enumerate(widths) if before > 0 or after > 0]
    if is_empty([data.shape[axis] for axis in padded]):
        raise ValueError(
            f"pad: an axis that is padded by mode {mode!r} must not be empty, but the data has "
            f"the shape {list(data.shape)} and the widths are {list(pad_width)}"
        )
    filled = [data.shape[axis] > 0 for axis in padded if not is_static(data.shape[axis])]
    source = {"reflect": _reflect, "replicate": _replicate, "circular": _circle}[mode]

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = [
            source(place - before, extent) if axis in padded else place - before
            for axis, (place, extent, (before, _)) in enumerate(
                zip(index, data.shape, widths, strict=True)
            )
        ]
        if not filled:
            return data(*at)
        return tirx.if_then_else(tirx.all(*filled), data(*at), tirx.const(0, data.dtype))

    shape = [extent + sum(width) for extent, width in zip(data.shape, widths, strict=True)]
    return te.compute(shape, element, name="pad", tag=topi.tag.INJECTIVE)


def pad_backward_data(
    output_grad: te.Tensor, data_shape: Shape, pad_width: Sequence[int], mode: str
) -> te.Tensor:
    """Gradient of padding with respect to its data: each element sums the gradients of its copies.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the padded tensor.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    pad_width : Sequence[int]
        The number of positions before and after each axis; a negative one crops.
    mode : str
        ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    if is_empty(output_grad.shape):
        return zeros(data_shape, output_grad.dtype)
    unpad = {
        "constant": _crop,
        "reflect": _unreflect,
        "replicate": _unreplicate,
        "circular": _uncircle,
    }[mode]
    widths = zip(pad_width[::2], pad_width[1::2], strict=True)
    grad = output_grad
    for axis, (extent, (before, after)) in enumerate(zip(data_shape, widths, strict=True)):
        if before or after:
            extent = int(extent) if is_static(extent) else extent
            grad = (_crop if max(before, after) <= 0 else unpad)(grad, axis, extent, before, after)
    if grad is output_grad:
        # A tensor expression must compute something.
        return te.compute(data_shape, lambda *i: grad(*i), name="pad_backward")
    return cast(grad, output_grad.dtype)


def _reflect(place: tirx.PrimExpr, extent: int | tirx.PrimExpr) -> tirx.PrimExpr:
    """Reflect a position at the first and the last element, as often as necessary."""
    last = extent - 1
    return last - tirx.abs(last - tirx.floormod(place, at_least_1(2 * last)))


def _replicate(place: tirx.PrimExpr, extent: int | tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.max(tirx.min(place, extent - 1), 0)


def _circle(place: tirx.PrimExpr, extent: int | tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.floormod(place, at_least_1(extent))


def _crop(
    grad: te.Tensor, axis: int, extent: int | tirx.PrimExpr, before: int, after: int
) -> te.Tensor:
    """Undo cropping or constant padding: each element has one copy, or none if it was cropped."""
    crops = min(before, after) < 0
    return _along(grad, axis, extent, lambda i, read: read(i + before, crops))


def _unreplicate(
    grad: te.Tensor, axis: int, extent: int | tirx.PrimExpr, before: int, after: int
) -> te.Tensor:
    """Undo replication: the first element also sums all positions before it, and the last all after
    it."""
    crops = min(before, after) < 0
    size = grad.shape[axis]
    none = tirx.const(0, accumulation_dtype(grad.dtype))

    def edge(count: int, start: int | tirx.PrimExpr, name: str) -> te.Tensor:
        place = te.reduce_axis((0, count), name)
        return _along(grad, axis, 1, lambda _, read: te.sum(read(start + place, crops), axis=place))

    edges = []
    if before > 0:
        edges.append((0, edge(before, 0, "before")))
    if after > 0:
        edges.append((extent - 1, edge(after, size - after, "behind")))

    def element(i: tirx.PrimExpr, read: Callable[..., tirx.PrimExpr]) -> tirx.PrimExpr:
        value = read(i + before, crops)
        for at, total in edges:
            value += tirx.if_then_else(i == at, read(0, False, total), none)
        return value

    return _along(grad, axis, extent, element)


def _uncircle(
    grad: te.Tensor, axis: int, extent: int | tirx.PrimExpr, before: int, after: int
) -> te.Tensor:
    """Undo circular padding: the copies of an element are at multiples of ``extent`` from its own
    position."""
    period = at_least_1(extent)
    back = (max(before, 0) + period - 1) // period
    ahead = (max(after, 0) + period - 1) // period
    turn = te.reduce_axis((0, back + ahead + 1), "turn")

    def element(i: tirx.PrimExpr, read: Callable[..., tirx.PrimExpr]) -> tirx.PrimExpr:
        return te.sum(read(i + before + (turn - back) * period), axis=turn)

    return _along(grad, axis, extent, element)


def _unreflect(
    grad: te.Tensor, axis: int, extent: int | tirx.PrimExpr, before: int, after: int
) -> te.Tensor:
    """Undo reflection: the copies of an element are whole periods from its own position and from
    its mirror image.

    A period is twice the distance from edge to edge. The first and the last element are their own
    images.
    """
    last = extent - 1
    period = at_least_1(2 * last)
    back = (max(before, 0) + last) // period
    ahead = (max(after, 0) + 2 * last) // period
    turn = te.reduce_axis((0, back + ahead + 1), "turn")

    def element(i: tirx.PrimExpr, read: Callable[..., tirx.PrimExpr]) -> tirx.PrimExpr:
        origin = before + (turn - back) * period
        inside = tirx.all(i > 0, i < last)
        return te.sum(read(origin + i) + read(origin - i, when=inside), axis=turn)

    return _along(grad, axis, extent, element)


def _along(grad: te.Tensor, axis: int, extent: int | tirx.PrimExpr, element: Callable) -> te.Tensor:
    """Compute one axis anew, of the given extent.

    ``element(i, read)`` returns the value at ``i``. ``read(place, guarded, tensor, when)`` returns
    the value of a tensor, by default of the gradient, at a position of the axis. It returns 0 if
    ``when`` does not hold, or if ``guarded`` and the position is out of bounds.
    """
    shape = list(grad.shape)
    shape[axis] = extent
    dtype = accumulation_dtype(grad.dtype)

    def compute(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        def read(
            place: tirx.PrimExpr,
            guarded: bool = True,
            tensor: te.Tensor = grad,
            when: tirx.PrimExpr | None = None,
        ) -> tirx.PrimExpr:
            at = [*index[:axis], place, *index[axis + 1 :]]
            value = tensor(*at).astype(dtype)
            conditions = [] if when is None else [when]
            if guarded:
                conditions += [place >= 0, place < grad.shape[axis]]
            if not conditions:
                return value
            return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, dtype))

        return element(index[axis], read)

    return te.compute(shape, compute, name="pad_backward", tag=topi.tag.INJECTIVE)
