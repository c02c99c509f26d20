"""Gradients of changes of dtype."""

from __future__ import annotations

from tvm import relax

from ..registry import register_gradient
from ._util import cast_like, is_float, no_grad


def _cast_gradient(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    (x,) = orig_call.args
    if not (is_float(x) and is_float(orig_var)):
        return [no_grad(x)]
    return [cast_like(ctx, output_grad, x)]


@register_gradient("relax.astype", corrects="passes a gradient through integers and booleans")
def astype(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of astype.

    Forward form: ``y = astype(x, dtype)``.

    Backward form: ``[astype(y_grad, x.dtype)]`` between floating-point dtypes, ``[no_grad]``
    otherwise.
    """
    return _cast_gradient(orig_var, orig_call, output_grad, ctx)


@register_gradient("relax.wrap_param")
def wrap_param(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of wrap_param.

    Forward form: ``y = wrap_param(x, dtype)``, a cast.

    Backward form: ``[astype(y_grad, x.dtype)]`` between floating-point dtypes, ``[no_grad]``
    otherwise.
    """
    return _cast_gradient(orig_var, orig_call, output_grad, ctx)
