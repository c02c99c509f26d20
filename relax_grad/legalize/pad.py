"""Legalization of padding, which corrects TVM's, and of its backward operator."""

from __future__ import annotations

from tvm import relax, tirx

from ..op.pad import PAD_MODES
from ..registry import register_legalize
from ..topi import pad as topi_pad
from ..topi.util import is_static
from ._gpu import bind_threads, keep_apart
from ._util import int_list, is_empty, shape_values, stock, zeros

_STOCK_PAD = stock("relax.nn.pad")


@register_legalize(
    "relax.nn.pad",
    corrects=(
        "reflects only once and reads out of bounds for wider padding; reads an empty axis out of "
        "bounds or divides by its extent; pads with pad_value in an unknown mode; on a GPU, leaves "
        "the padding of a matrix-vector product undefined"
    ),
)
def _pad(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    mode, widths = str(call.attrs.pad_mode), int_list(call.attrs.pad_width)
    if mode not in PAD_MODES:
        raise ValueError(
            f"relax.nn.pad: pad_mode must be one of {', '.join(map(repr, PAD_MODES))}, not {mode!r}"
        )
    extents = shape_values(call.args[0].ty.shape)
    if mode == "constant" or all(
        map(_tvm_takes, extents, widths[::2], widths[1::2], [mode] * len(extents))
    ):
        # Behind a matrix-vector product, TVM's rule writes only the elements of the product.
        return keep_apart(bb, _STOCK_PAD(bb, call))
    padded = bb.call_te(topi_pad.pad, call.args[0], widths, mode, primfunc_name_hint="pad")
    return keep_apart(bb, padded)


@register_legalize("relax.grad.pad_backward_data")
def _pad_backward_data(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if is_empty(call):
        return zeros(bb, call)
    output_grad, data_shape = call.args
    gradient = bb.call_te(
        topi_pad.pad_backward_data,
        output_grad,
        shape_values(data_shape),
        int_list(call.attrs.pad_width),
        str(call.attrs.pad_mode),
        primfunc_name_hint="pad_backward_data",
    )
    return keep_apart(bb, bind_threads(bb, gradient))


def _tvm_takes(extent: tirx.PrimExpr, before: int, after: int, mode: str) -> bool:
    """Tell whether TVM reads in bounds along an axis, for every value of a symbolic extent."""
    if not is_static(extent):
        return before == after == 0
    widest = int(extent) - 1 if mode == "reflect" else max(before, after)
    return int(extent) > 0 and max(before, after) <= widest
