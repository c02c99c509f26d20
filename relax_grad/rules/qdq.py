"""Gradients of quantization: the straight-through estimator.

``q = quantize(x, scale, zero_point)`` is a staircase, whose derivative is zero or undefined. The
straight-through estimator (Bengio, Leonard and Courville, 2013) replaces the rounding by the
identity, and keeps the clipping to the range of ``q``. With ``dequantize``, the pair has

- the gradient 1 for ``x`` where ``q`` is not clipped and 0 where it is, as PyTorch's fake_quantize;
- the gradient ``round(x / scale) - x / scale`` for ``scale`` where ``q`` is not clipped, and
  ``q - zero_point`` where it is: learned step size quantization (Esser et al., 2020), and PyTorch's
  learnable fake_quantize.

``q`` is an integer or float8 tensor, which has no gradient of its own. If ``dequantize`` takes the
result of ``quantize``, the adjoint of ``q`` is a float32 tensor: the gradient with respect to the
numbers that ``q`` stands for. Any other consumer of ``q``, such as a cast, contributes no gradient,
as for every integer. If another operator stands between the two, this is an error: ``q`` is not
treated as a constant.
"""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import Op

from ..errors import GradientError
from ..ir.bindings import expanded
from ..registry import register_gradient
from ._util import (
    cast_like,
    dtype_of,
    is_float,
    is_one,
    no_grad,
    reshape_like,
    shape_of,
    unbroadcast,
)

_QUANTIZE = Op.get("relax.quantize")
_CARRIERS = ("float16", "bfloat16", "float32", "float64")


@register_gradient("relax.quantize")
def quantize(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of quantize, straight through the rounding.

    Forward form: ``q = clip(round(x / scale) + zero_point, min, max)`` with the range of the
    result's dtype; for float8, without the rounding.

    Backward form: with ``g`` the gradient ``q_grad`` where ``q`` is not clipped and 0 where it is,
    ``[g / scale, sum(-g * x / scale**2), no_grad]``, the sum over the elements that share a scale.
    A floating-point ``zero_point`` has the gradient ``sum(g)``.
    """
    x, scale, zero_point = orig_call.args
    wide = ctx.normalize(_float32(x))
    step, offset = _parameters(orig_call, ctx)
    ratio = ctx.normalize(wide / step)
    out_dtype = dtype_of(orig_var)
    level = (relax.op.round(ratio) if "int" in out_dtype else ratio) + offset
    low, high = (float(bound(out_dtype).value) for bound in (tirx.min_value, tirx.max_value))
    inside = relax.op.equal(relax.op.clip(level, low, high), level)
    kept = ctx.normalize(relax.op.where(inside, _float32(output_grad), relax.const(0, "float32")))
    x_grad = ctx.normalize(kept / step)
    return [
        cast_like(ctx, x_grad, x),
        _parameter_grad(ctx, relax.op.negative(x_grad * ratio), step, scale),
        _parameter_grad(ctx, kept, offset, zero_point),
    ]


@register_gradient("relax.dequantize", quantized=True)
def dequantize(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of dequantize.

    Forward form: ``y = scale * (q - zero_point)``.

    Backward form: ``[y_grad * scale, sum(y_grad * dequantize(q, 1, zero_point)), no_grad]``, the
    sum over the elements that share a scale. The first is the gradient of a floating-point ``q``,
    or the float32 adjoint of a ``q`` that ``quantize`` produces; any other ``q`` has no gradient. A
    floating-point ``zero_point`` has the gradient ``sum(-y_grad * scale)``.

    Raises
    ------
    GradientError
        If an operator stands between ``quantize`` and ``dequantize``.
    """
    data, scale, zero_point = orig_call.args
    step, offset = _parameters(orig_call, ctx)
    grad = ctx.normalize(_float32(output_grad))
    data_grad = ctx.normalize(grad * step)
    if dtype_of(data) in _CARRIERS:
        data_partial = cast_like(ctx, data_grad, data)
    elif _is_quantized(ctx, data):
        data_partial = data_grad
    else:
        data_partial = no_grad(data)
    # q - zero_point as a dequantize, because its rule passes gradients on through integers.
    one = relax.const(1, "float32")
    levels = relax.op.dequantize(data, one, zero_point, int(orig_call.attrs.axis), "float32")
    return [
        data_partial,
        _parameter_grad(ctx, grad * levels, step, scale),
        _parameter_grad(ctx, relax.op.negative(data_grad), offset, zero_point),
    ]


def _parameters(call: relax.Call, ctx: relax.BlockBuilder) -> list[relax.Expr]:
    """Return scale and zero point in float32, broadcastable to the data."""
    data, *parameters = call.args
    ndim = len(shape_of(data))
    # A 0-d tensor has no axis; its parameters have one element.
    others = [i for i in range(ndim) if i != int(call.attrs.axis) % ndim]

    def broadcast(parameter: relax.Expr) -> relax.Expr:
        extents = shape_of(parameter)
        if all(map(is_one, extents)):
            return relax.op.reshape(parameter, [1] * ndim)
        return relax.op.expand_dims(parameter, others) if others else parameter

    return [ctx.normalize(_float32(broadcast(parameter))) for parameter in parameters]


def _parameter_grad(
    ctx: relax.BlockBuilder, grad: relax.Expr, operand: relax.Expr, parameter: relax.Expr
) -> relax.Expr:
    """Sum a gradient over the elements that share a scale or a zero point."""
    if not is_float(parameter):
        return no_grad(parameter)
    total = ctx.normalize(unbroadcast(ctx, grad, operand))
    return cast_like(ctx, reshape_like(total, parameter), parameter)


def _is_quantized(ctx: relax.BlockBuilder, data: relax.Expr) -> bool:
    """Tell whether a tensor is the result of quantize.

    Raises
    ------
    GradientError
        If it is computed from such a result through integers or float8, or chosen by a conditional.
    """
    value = _value(ctx, data)
    if isinstance(value, relax.Call) and value.op == _QUANTIZE:
        return True
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if isinstance(value, relax.If) and any(
            isinstance(bound, relax.Call) and bound.op == _QUANTIZE
            for bound in (binding.value for binding in expanded([relax.VarBinding(data, value)]))
        ):
            raise GradientError(
                f"{data} is the result of a conditional that quantizes; dequantize within its "
                "branches"
            )
        if not isinstance(value, relax.Call):
            continue
        if value.op == _QUANTIZE:
            raise GradientError(
                f"{data} is computed from the result of quantize by operators on integers, which "
                "have no gradient; dequantize directly after quantize, and apply the operators to "
                "its result"
            )
        for argument in value.args:
            if isinstance(argument, relax.Var) and argument not in seen and not _carries(argument):
                seen.add(argument)
                pending.append(_value(ctx, argument))
    return False


def _value(ctx: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr | None:
    """Return the value of a variable, looking through bindings and tuples; None for a parameter."""
    while isinstance(expr, relax.Var):
        expr = ctx.lookup_binding(expr)
    if isinstance(expr, relax.TupleGetItem):
        whole = _value(ctx, expr.tuple_value)
        if isinstance(whole, relax.Tuple):
            return _value(ctx, whole.fields[expr.index])
        return whole
    return expr


def _carries(expr: relax.Expr) -> bool:
    """Tell whether the gradient flows through a tensor in its own dtype."""
    return isinstance(expr.ty, relax.TensorType) and dtype_of(expr) in _CARRIERS


def _float32(expr: relax.Expr) -> relax.Expr:
    return relax.op.astype(expr, "float32")
