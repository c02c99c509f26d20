"""Legalization of the backward operators of reductions."""

from __future__ import annotations

from tvm import relax

from ..registry import register_legalize
from ..topi import statistical as topi_statistical
from ._util import shape_values


@register_legalize("relax.grad.mean_backward_x")
def _mean_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, x_shape = call.args
    extents = shape_values(x_shape)
    axis = range(len(extents)) if call.attrs.axis is None else call.attrs.axis
    return bb.call_te(
        topi_statistical.mean_backward_x,
        output_grad,
        extents,
        [int(a) % len(extents) for a in axis],
        bool(call.attrs.keepdims),
        primfunc_name_hint="mean_backward_x",
    )
