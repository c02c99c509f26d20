"""Conversion of tensors to another layout."""

from __future__ import annotations

from tvm import te, tirx, topi

from ..ir.layout import Layout
from .util import Shape


def relayout(tensor: te.Tensor, shape: Shape, layout: str, to: str) -> te.Tensor:
    """Store a tensor in another layout.

    Parameters
    ----------
    tensor : te.Tensor
        A tensor, in ``layout``.
    shape : Sequence[int or PrimExpr]
        The shape of the result.
    layout, to : str
        Layouts of the same axes.

    Returns
    -------
    result : te.Tensor
        A tensor of this shape, in the layout ``to``, with 0 in the elements that ``layout`` does
        not have. For example, ``"NCHW4c"`` has more elements if 4 does not divide the number of
        channels.
    """
    source, target = Layout.together(layout, to)
    extents = source.extents(tensor.shape)
    filled_up = target.filled_up(extents)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = target.logical(index)
        value = tensor(*source.stored(at))
        if not filled_up:
            return value
        inside = tirx.all(*(at[name] < extents[name] for name in filled_up))
        return tirx.if_then_else(inside, value, tirx.const(0, tensor.dtype))

    name = f"{tensor.op.name}_relayout"
    return te.compute(shape, element, name=name, tag=topi.tag.INJECTIVE)
