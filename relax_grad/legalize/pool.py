"""Legalization of the backward operators of pooling, and of pooling with another output layout."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ..ir.compat import dtype_of
from ..ir.layout import Layout
from ..ir.module import short_name
from ..op.pool import check_pool_attrs, check_pool_backward
from ..op.rank import RANKS, rank_of
from ..registry import register_legalize
from ..topi.layout import relayout
from ..topi.pool import (
    adaptive_avg_pool_backward,
    avg_pool_backward,
    max_pool,
    max_pool_backward,
    max_pool_jvp,
)
from ._gpu import bind_threads
from ._util import int_list, stock

_BUILDERS = {
    f"relax.nn.{name}": getattr(relax.op.nn, name)
    for rank in RANKS
    for name in (f"{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg"))
}

_STOCK = {name: stock(name) for name in _BUILDERS}


def _pool(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    return _to_out_layout(
        bb,
        call,
        False,
        pool_size=attrs.pool_size,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        ceil_mode=attrs.ceil_mode,
        count_include_pad=attrs.count_include_pad,
    )


def _max_pool(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (data,), layout = call.args, call.attrs.layout
    is_plain = layout == call.attrs.out_layout and not any(c.isdigit() for c in layout)
    if not is_plain or "float" not in dtype_of(data.ty):
        return _pool(bb, call)
    attrs = _windows(call.attrs)
    attrs["ceil_mode"] = bool(call.attrs.ceil_mode)
    del attrs["out_layout"]
    pooled = bb.call_te(
        max_pool, data, list(call.ty.shape.values), **attrs, primfunc_name_hint=short_name(call)
    )
    return bind_threads(bb, pooled)


def _adaptive_avg_pool(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if rank_of(call) == 1 and call.attrs.output_size is None:
        return _relayout(bb, call.args[0], call.ty.shape, call.attrs.layout, call.attrs.out_layout)
    return _to_out_layout(bb, call, True, output_size=call.attrs.output_size)


def _to_out_layout(
    bb: relax.BlockBuilder, call: relax.Call, is_adaptive: bool, **attrs: Any
) -> relax.Expr:
    """Pool in a layout that TVM compiles, and convert the result to ``out_layout``."""
    (data,) = call.args
    layout, out_layout = call.attrs.layout, call.attrs.out_layout
    if layout == out_layout and "[" not in layout:
        legalized = _STOCK[call.op.name](bb, call)
        # TVM's GPU rules do not schedule windows of several sizes; the function would run on the
        # host.
        return bind_threads(bb, legalized, always=is_adaptive)
    if "[" in layout:  # TVM treats each of the parts in brackets as an axis
        whole = Layout.of(layout)
        extents = whole.extents(data.ty.shape.values)
        shape = relax.ShapeExpr([extents[axis] for axis in whole.names])
        data, layout = _relayout(bb, data, shape, layout, whole.names), whole.names
    result = bb.emit(_BUILDERS[call.op.name](data, layout=layout, **attrs))
    return _relayout(bb, result, call.ty.shape, layout, out_layout)


def _relayout(
    bb: relax.BlockBuilder, tensor: relax.Expr, shape: relax.ShapeExpr, layout: str, to: str
) -> relax.Expr:
    """Convert a tensor to another layout, in which it has this shape."""
    if layout == to:
        return tensor
    return bb.emit_te(relayout, tensor, list(shape.values), layout, to)


def _max_pool_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = check_pool_backward(call, bb)
    gradient = bb.call_te(
        max_pool_backward, *call.args, **_windows(attrs), primfunc_name_hint=short_name(call)
    )
    return bind_threads(bb, gradient)


def _avg_pool_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = check_pool_backward(call, bb)
    output_grad, data = call.args
    gradient = bb.call_te(
        avg_pool_backward,
        output_grad,
        list(data.ty.shape.values),
        count_include_pad=bool(attrs.count_include_pad),
        out_dtype=dtype_of(data.ty),
        **_windows(attrs),
        primfunc_name_hint=short_name(call),
    )
    return bind_threads(bb, gradient, always=False)


def _max_pool_jvp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    tangent = bb.call_te(
        max_pool_jvp,
        *call.args,
        list(call.ty.shape.values),
        **_windows(check_pool_attrs(call)),
        primfunc_name_hint=short_name(call),
    )
    return bind_threads(bb, tangent)


def _adaptive_avg_pool_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, data = call.args
    layout, out_layout = call.attrs.layout, call.attrs.out_layout
    if call.attrs.output_size is None:  # every element is its own window
        same = _relayout(bb, output_grad, data.ty.shape, out_layout, layout)
        dtype = dtype_of(data.ty)
        return same if dtype_of(output_grad.ty) == dtype else relax.op.astype(same, dtype)
    return bb.call_te(
        adaptive_avg_pool_backward,
        output_grad,
        list(data.ty.shape.values),
        layout=layout,
        out_layout=out_layout,
        out_dtype=dtype_of(data.ty),
        primfunc_name_hint=short_name(call),
    )


def _windows(attrs: relax.op.op_attrs.Attrs) -> dict:
    return {
        "pool_size": int_list(attrs.pool_size),
        "strides": int_list(attrs.strides),
        "padding": int_list(attrs.padding),
        "dilation": int_list(attrs.dilation),
        "layout": attrs.layout,
        "out_layout": attrs.out_layout,
    }


#: The errors of TVM's legalizations, for the operators that it has.
_CORRECTS = {
    "max_pool2d": (
        "reads the argmax out of bounds where the windows do not tile the data, breaks ties and "
        "NaN differently from PyTorch, and supports neither dilation nor a separate out_layout"
    ),
    "avg_pool2d": (
        "divides by a different area than the forward operator where ceil_mode or the padding "
        "truncates a window, and supports neither dilation nor a separate out_layout"
    ),
}
_OUT_LAYOUT = (
    "does not legalize calls with a separate out_layout, and misreads the axes of a layout that "
    "has parts in brackets"
)

for _rank in RANKS:
    for _kind, _forward, _backward in (
        ("max", _max_pool, _max_pool_backward),
        ("avg", _pool, _avg_pool_backward),
    ):
        _pooling = f"{_kind}_pool{_rank}d"
        _corrects = f"drops NaN, {_OUT_LAYOUT}" if _kind == "max" else _OUT_LAYOUT
        register_legalize(f"relax.nn.{_pooling}", corrects=_corrects)(_forward)
        register_legalize(f"relax.grad.{_pooling}_backward", corrects=_CORRECTS.get(_pooling))(
            _backward
        )
    register_legalize(f"relax.grad.max_pool{_rank}d_jvp")(_max_pool_jvp)
    _pooling = f"adaptive_avg_pool{_rank}d"
    _corrects = f"{_OUT_LAYOUT}, and fails without an output_size" if _rank == 1 else _OUT_LAYOUT
    register_legalize(f"relax.nn.{_pooling}", corrects=_corrects)(_adaptive_avg_pool)
    register_legalize(f"relax.grad.{_pooling}_backward")(_adaptive_avg_pool_backward)
