"""Legalization of the backward operators of scans."""

from __future__ import annotations

from tvm import relax

from ..ir.module import short_name
from ..registry import register_legalize
from ..topi import scan as topi_scan
from ._util import shape_values


@register_legalize("relax.grad.cumsum_backward_data")
def _cumsum_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape = call.args
    axis = call.attrs.axis
    return bb.call_te(
        topi_scan.cumsum_backward_data,
        output_grad,
        shape_values(data_shape),
        None if axis is None else int(axis),
        bool(call.attrs.exclusive),
        primfunc_name_hint="cumsum_backward_data",
    )


@register_legalize("relax.grad.linear_scan")
def _linear_scan(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_linear_scan(bb, call, reverse=False)


@register_legalize("relax.grad.linear_scan_reverse")
def _linear_scan_reverse(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return _call_linear_scan(bb, call, reverse=True)


def _call_linear_scan(bb: relax.BlockBuilder, call: relax.Call, reverse: bool) -> relax.Expr:
    multiplier, *increment = call.args
    return bb.call_te(
        topi_scan.linear_scan,
        multiplier,
        increment[0] if increment else None,
        int(call.attrs.axis),
        reverse,
        primfunc_name_hint=short_name(call),
    )
