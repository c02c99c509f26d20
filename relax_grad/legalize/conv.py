"""Legalization of the backward operators of convolution, and of the convolutions in every
layout."""

from __future__ import annotations

import math
from typing import Any

from tvm import relax

from ..ir.compat import dtype_of
from ..op.rank import RANKS, rank_of, spatial_axes
from ..registry import register_legalize
from ..topi import conv as topi_conv
from ..topi.conv_phases import conv_backward_data_by_phases, join_phases
from ..topi.util import axes, is_static, on_gpu, spatial_names
from ._gpu import add_parts, bind_threads, parts_of_product
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
    bb: relax.BlockBuilder, call: relax.Call, data_layout: str, kernel_layout: str, **more: Any
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
    if _has_phases(call):
        return _by_phases(bb, call)
    gradient = bb.call_te(
        topi_conv.conv_backward_data,
        output_grad,
        weight,
        shape_values(data_shape),
        **_attrs(call),
        primfunc_name_hint=f"conv{rank_of(call)}d_backward_data",
    )
    return _scheduled(bb, call, gradient)


def _has_phases(call: relax.Call) -> bool:
    """Tell whether a data gradient for a GPU multiplies with the zeros between the elements of a
    strided gradient, and whether its extents are known."""
    attrs = call.attrs
    if not on_gpu() or max(int_list(attrs.strides)) == 1 or max(int_list(attrs.dilation)) > 1:
        return False
    names, data = spatial_names(attrs.data_layout, "NC"), shape_values(call.args[1])
    spatial = (data[axis] for axis in axes(attrs.data_layout, names))
    extents = [*call.args[2].ty.shape.values, *spatial]
    return all(is_static(extent) and int(extent) > 0 for extent in extents)


def _by_phases(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data_shape, weight = call.args
    shape, attrs = shape_values(data_shape), _attrs(call)
    del attrs["dilation"]
    name = f"conv{rank_of(call)}d_backward_data"
    phases = bb.call_te(
        conv_backward_data_by_phases,
        output_grad,
        weight,
        shape,
        **attrs,
        primfunc_name_hint=f"{name}_phases",
    )
    joined = {key: attrs[key] for key in ("strides", "padding", "data_layout", "out_dtype")}
    phases = bb.emit(_scheduled(bb, call, phases))
    return bb.call_te(join_phases, phases, shape, **joined, primfunc_name_hint=f"{name}_joined")


def _backward_weight(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data, weight_shape = call.args
    name = f"conv{rank_of(call)}d_backward_weight"
    parts = _parts_of_sums(call)
    gradient = bb.call_te(
        topi_conv.conv_backward_weight,
        output_grad,
        data,
        shape_values(weight_shape),
        **_attrs(call),
        parts=parts,
        primfunc_name_hint=f"{name}_parts" if parts else name,
    )
    if not parts:
        return _scheduled(bb, call, gradient)
    return add_parts(bb, gradient, len(parts), dtype_of(call.ty))


def _parts_of_sums(call: relax.Call) -> list[int]:
    """Return the numbers of parts into which the sums of a weight gradient are divided along the
    batch and the spatial axes, so that a GPU has enough blocks; empty if they are not divided."""
    attrs, grad = call.attrs, call.args[0]
    if not on_gpu() or int(attrs.groups) > 1:
        return []
    weight, summed = shape_values(call.args[2]), list(grad.ty.shape.values)
    if not all(map(is_static, [*weight, *summed])):
        return []
    names = f"N{spatial_names(attrs.out_layout, 'NC')}"
    rows = int(weight[attrs.kernel_layout.index("O")])
    terms = [int(summed[axis]) for axis in axes(attrs.out_layout, names)]
    return parts_of_product(rows, math.prod(map(int, weight)) // max(rows, 1), terms)


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
