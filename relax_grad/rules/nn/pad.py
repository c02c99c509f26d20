"""Gradient of padding."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...errors import GradientError
from ...op.pad import PAD_MODES, pad_attrs
from ...registry import register_gradient
from .._util import is_const, shape_arg, shape_of


@register_gradient("relax.nn.pad")
def pad(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of pad.

    Forward form: ``y = pad(x, pad_width, pad_mode, pad_value)``; a negative width crops.

    Backward form: ``[pad_backward_data(y_grad, x.shape, pad_width, pad_mode)]``: each element of x
    sums the gradients of its copies in y. ``pad_value`` is an attribute and has no gradient.
    """
    (x,) = orig_call.args
    attrs = pad_attrs(orig_call)
    if attrs["pad_mode"] not in PAD_MODES:
        raise GradientError(
            f"pad_mode must be one of {', '.join(map(repr, PAD_MODES))}, but it is "
            f"{attrs['pad_mode']!r}, which TVM treats as 'constant'"
        )
    if any(is_const(extent) and int(extent) < 0 for extent in shape_of(orig_var)):
        raise GradientError(
            f"pad_width {attrs['pad_width']} crops {x.ty} by more than its extents: TVM infers "
            f"{orig_var.ty}"
        )
    return [backward.pad_backward_data(output_grad, shape_arg(x), **attrs)]
