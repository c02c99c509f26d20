"""Gradients of element-wise functions of one argument."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax, tirx

from ..op.rank import named
from ..registry import register_gradient
from ._util import cast_like, const_like, is_float, no_grad, widen, zero

#: ``(x, y, y_grad) -> x_grad`` in float32 at least; ``y`` is the forward operator's result.
Partial = Callable[[relax.Expr, relax.Expr, relax.Expr], relax.Expr]


def _one_minus_square(x: relax.Expr) -> relax.Expr:
    """Return ``1 - x**2`` as a product, which does not cancel near 1."""
    one = const_like(1, x)
    return (one - x) * (one + x)


def _square_minus_one(x: relax.Expr) -> relax.Expr:
    """Return ``x**2 - 1`` as a product, which does not cancel near 1, and is not -0 at -1."""
    one, magnitude = const_like(1, x), relax.op.abs(x)
    return (magnitude - one) * (magnitude + one)


def _erf(x: relax.Expr, y: relax.Expr, grad: relax.Expr) -> relax.Expr:
    return grad * const_like(2 / math.sqrt(math.pi), x) * relax.op.exp(relax.op.negative(x * x))


#: The backward form of each operator, as text and as expressions. At the edges of a domain they
#: match PyTorch: infinite where the slope is infinite, NaN where the function is NaN.
_PARTIALS: dict[str, tuple[str, Partial]] = {
    "abs": ("y_grad * sign(x)", lambda x, y, grad: grad * relax.op.sign(x)),
    "acos": (
        "-y_grad / sqrt(1 - x**2)",
        lambda x, y, grad: relax.op.negative(grad) * relax.op.rsqrt(_one_minus_square(x)),
    ),
    "acosh": (
        "y_grad / sqrt(x**2 - 1)",
        lambda x, y, grad: grad * relax.op.rsqrt(_square_minus_one(x)),
    ),
    "asin": (
        "y_grad / sqrt(1 - x**2)",
        lambda x, y, grad: grad * relax.op.rsqrt(_one_minus_square(x)),
    ),
    "asinh": (
        "y_grad / sqrt(x**2 + 1)",
        lambda x, y, grad: grad * relax.op.rsqrt(x * x + const_like(1, x)),
    ),
    "atan": ("y_grad / (x**2 + 1)", lambda x, y, grad: grad / (x * x + const_like(1, x))),
    "atanh": ("y_grad / (1 - x**2)", lambda x, y, grad: grad / _one_minus_square(x)),
    "cosh": ("y_grad * sinh(x)", lambda x, y, grad: grad * relax.op.sinh(x)),
    "erf": ("y_grad * 2 / sqrt(pi) * exp(-x**2)", _erf),
    "rsqrt": ("-y_grad / 2 * y**3", lambda x, y, grad: const_like(-0.5, x) * grad * y * y * y),
    "sinh": ("y_grad * cosh(x)", lambda x, y, grad: grad * relax.op.cosh(x)),
    "square": ("2 * y_grad * x", lambda x, y, grad: const_like(2, x) * grad * x),
    "tan": ("y_grad * (1 + y**2)", lambda x, y, grad: grad * (const_like(1, x) + y * y)),
}

_CORRECTS = {"abs": "is 1 at 0, where PyTorch's and JAX's are 0"}


def _register(name: str, form: str, partial: Partial) -> None:
    def rule(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        """Gradient of {forward}.

        Forward form: ``y = {forward}(x)``.

        Backward form: ``[{form}]``, in float32 at least.
        """
        (x,) = orig_call.args
        if not is_float(x):
            return [no_grad(x)]
        wide = (ctx.normalize(widen(expr)) for expr in (x, orig_var, output_grad))
        return [cast_like(ctx, partial(*wide), x)]

    named(rule, name, forward=name, form=form)
    register_gradient(f"relax.{name}", corrects=_CORRECTS.get(name))(rule)


for _name, (_form, _partial) in _PARTIALS.items():
    _register(_name, _form, _partial)


@register_gradient("relax.clip")
def clip(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of clip.

    Forward form: ``y = clip(x, min, max)``.

    Backward form: ``[where(y == x, y_grad, 0), no_grad, no_grad]``: elements that clip does not
    change, including those equal to a bound, pass the gradient on, as in PyTorch. For NaN the
    gradient is 0. If ``min > max`` the result is ``min`` for every ``x``, and the gradient is 0.
    """
    x, low, high = orig_call.args
    bounds = [no_grad(low), no_grad(high)]
    if not is_float(x):
        return [no_grad(x), *bounds]
    are_known = all(isinstance(bound, (tirx.IntImm, tirx.FloatImm)) for bound in (low, high))
    if are_known and low.value > high.value:
        return [relax.op.zeros_like(x), *bounds]
    kept = relax.op.equal(orig_var, x)
    return [relax.op.where(kept, output_grad, zero(x)), *bounds]
