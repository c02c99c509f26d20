"""Legalization of the backward operators of convolution, and of the convolutions in every
layout."""

from __future__ import annotations

from tvm import relax

from ..ir.compat import dtype_of
from ..op.rank import RANKS, rank_of, spatial_axes
from ..registry import register_legalize
from ..topi import conv as topi_conv
from ..topi.util import axes, spatial_names
from ._gpu import bind_threads
from ._util import int_list, shape_values, stock

_BUILDERS = {
    f"relax.nn.{name}": getattr(relax.op.nn, name)
    for rank in RANKS
    for name in (f"conv{rank}d", f"conv{rank}d_transpose")
}

_STOCK = {name: stock(name) for name in _BUILDERS}


def _conv(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    data_layout = _in_order(attrs.data_layout)
    return _in_layouts(bb, call, data_layout, _in_order(attrs.kernel_layout))


def _conv_transpose(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    spatial = spatial_axes(rank_of(call))
    return _in_layouts(
        bb, call, f"NC{spatial}", f"IO{spatial}", output_padding=call.attrs.output_padding
    )


def _in_layouts(
    bb: relax.BlockBuilder, call: relax.Call, data_layout: str, kernel_layout: str, **more
) -> relax.Expr:
    """Compute a convolution of any layouts in these layouts, which TVM compiles."""
    attrs = call.attrs
    layouts = [attrs.data_layout, attrs.kernel_layout, attrs.out_layout]
    plain = [data_layout, kernel_layout, data_layout]
    packed = any(len(layout) != rank_of(call) + 2 for layout in layouts)
    if packed:
        return _STOCK[call.op.name](bb, call)
    if plain == layouts:
        return _scheduled(bb, call, _STOCK[call.op.name](bb, call))
    data, weight = map(_permute, call.args, layouts, plain)
    result = _BUILDERS[call.op.name](
        data,
        weight,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        groups=attrs.groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=attrs.out_dtype,
        **more,
    )
    return _permute(result, data_layout, attrs.out_layout)


def _in_order(layout: str) -> str:
    """Put D before H before W: TVM's convolution takes the spatial axes in the order of the
    layout."""
    names = iter(spatial_names(layout, "NCOI"))
    return "".join(name if name in "NCOI" else next(names) for name in layout)


def _permute(tensor: relax.Expr, layout: str, to: str) -> relax.Expr:
    return tensor if layout == to else relax.op.permute_dims(tensor, axes(layout, to))


def _backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, weight = call.args
    gradient = bb.call_te(
        topi_conv.conv_backward_data,
        output_grad,
        weight,
        shape_values(data_shape),
        **_attrs(call),
        primfunc_name_hint=f"conv{rank_of(call)}d_backward_data",
    )
    return _scheduled(bb, call, gradient)


def _backward_weight(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, weight_shape = call.args
    gradient = bb.call_te(
        topi_conv.conv_backward_weight,
        output_grad,
        data,
        shape_values(weight_shape),
        **_attrs(call),
        primfunc_name_hint=f"conv{rank_of(call)}d_backward_weight",
    )
    return _scheduled(bb, call, gradient)


def _scheduled(bb: relax.BlockBuilder, call: relax.Call, legalized: relax.Expr) -> relax.Expr:
    """Bind the threads where channels are grouped: TVM's rule for reductions fails on their
    indices."""
    return bind_threads(bb, legalized, always=int(call.attrs.groups) > 1)


def _attrs(call: relax.Call) -> dict:
    attrs = call.attrs
    return {
        "strides": int_list(attrs.strides),
        "padding": int_list(attrs.padding),
        "dilation": int_list(attrs.dilation),
        "groups": int(attrs.groups),
        "data_layout": attrs.data_layout,
        "kernel_layout": attrs.kernel_layout,
        "out_layout": attrs.out_layout,
        "out_dtype": dtype_of(call.ty),
    }


for _rank in RANKS:
    register_legalize(
        f"relax.nn.conv{_rank}d",
        corrects=(
            "assigns strides, padding, dilation and the kernel to axes by position, unlike its "
            "type inference, so that a layout with W before H or H before D is wrong; does not "
            "legalize calls whose out_layout differs from data_layout"
        ),
    )(_conv)
    register_legalize(
        f"relax.nn.conv{_rank}d_transpose",
        corrects="does not legalize layouts other than the default",
    )(_conv_transpose)
    register_legalize(f"relax.grad.conv{_rank}d_backward_data")(_backward_data)
    register_legalize(f"relax.grad.conv{_rank}d_backward_weight")(_backward_weight)
