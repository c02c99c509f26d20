"""Gradients of the activations."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient
from .._util import zero


@register_gradient("relax.nn.relu", corrects="is 1 at 0, where PyTorch's and JAX's are 0")
def relu(orig_var, orig_call, output_grad, ctx):
    """Gradient of relu.

    Forward form: ``y = relu(x)``.

    Backward form: ``[where(x <= 0, 0, y_grad)]``; as in PyTorch, it is 0 at 0, and a NaN in ``x`` lets
    the gradient pass.
    """
    (x,) = orig_call.args
    closed = relax.op.less_equal(x, zero(x))
    return [relax.op.where(closed, zero(x), output_grad)]
