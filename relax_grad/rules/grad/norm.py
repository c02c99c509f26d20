"""Gradients of the backward operators of the normalisations."""

from __future__ import annotations

from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._util import no_grad


@register_gradient("relax.grad.divide_by_count")
def divide_by_count(orig_var, orig_call, output_grad, ctx):
    """Gradient of divide_by_count.

    Forward form: ``y = divide_by_count(x, shape, axis)``.

    Backward form: ``[divide_by_count(y_grad, shape, axis), no_grad]``.
    """
    _, of_shape = orig_call.args
    return [
        backward.divide_by_count(output_grad, of_shape, orig_call.attrs.axis),
        no_grad(of_shape),
    ]
