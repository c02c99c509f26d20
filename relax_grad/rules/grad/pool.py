"""Gradients of the backward operators of pooling."""

from __future__ import annotations

from collections.abc import Callable

from tvm.relax import op
from tvm.relax.op import grad as backward

from ...op.pool import adaptive_attrs, pool_attrs
from ...op.rank import RANKS
from .._linear import register_linear


def _register_max_pool(name: str, of_tangent: Callable, of_cotangent: Callable) -> None:
    """Register the gradients of the two backward operators of a max pooling, which are transposes
    of each other.

    The positions of the largest elements do not change with the data, except where two elements
    become equal.
    """
    register_linear(
        f"{name}_backward",
        f"dx = {name}_backward(dy, x)",
        f"{name}_jvp(dx_grad, x)",
        lambda grad, call: of_tangent(grad, call.args[1], **pool_attrs(call)),
    )
    register_linear(
        f"{name}_jvp",
        f"y' = {name}_jvp(x', x)",
        f"{name}_backward(y'_grad, x)",
        lambda grad, call: of_cotangent(grad, call.args[1], **pool_attrs(call)),
    )


def _register_average(name: str, forward: Callable, attrs_of: Callable) -> None:
    """Register the gradient of the backward operator of a linear pooling, whose transpose is the
    pooling."""
    register_linear(
        f"{name}_backward",
        f"dx = {name}_backward(dy, x)",
        f"{name}(dx_grad)",
        lambda grad, call: forward(grad, **attrs_of(call)),
        accumulates=True,
        note="Of x, only the shape is read.",
    )


for _rank in RANKS:
    _name = f"max_pool{_rank}d"
    _register_max_pool(
        _name, getattr(backward, f"{_name}_jvp"), getattr(backward, f"{_name}_backward")
    )
    for _kind, _attrs in (("avg_pool", pool_attrs), ("adaptive_avg_pool", adaptive_attrs)):
        _name = f"{_kind}{_rank}d"
        _register_average(_name, getattr(op.nn, _name), _attrs)
