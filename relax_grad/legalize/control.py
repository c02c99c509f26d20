"""Legalization of the operators that compute nothing."""

from __future__ import annotations

from tvm import relax

from ..registry import register_legalize


@register_legalize("relax.grad.stop_gradient")
def _stop_gradient(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return call.args[0]


@register_legalize("relax.grad.differentiable_once")
def _differentiable_once(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return call.args[0]


@register_legalize("relax.grad.with_backward")
def _with_backward(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return call.args[0]
