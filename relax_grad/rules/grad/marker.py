"""Gradients of the operators that only mark something in a graph."""

from __future__ import annotations

from ...registry import register_gradient
from .._util import no_grad as stop


@register_gradient("relax.grad.no_grad")
def no_grad(orig_var, orig_call, output_grad, ctx):
    """Gradient of no_grad.

    Forward form: ``y = no_grad(x)``, which is ``x``.

    Backward form: ``[no_grad]``: whatever contributes to ``x`` is a constant from here on.
    """
    return [stop(orig_call.args[0])]
