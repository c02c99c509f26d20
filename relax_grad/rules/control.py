"""The gradient of a computation that has its own backward function."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op.grad import no_grad

from ..errors import GradientError
from ..ir.arguments import with_shapes
from ..ir.bindings import substitute
from ..ir.module import tuple_fields
from ..registry import register_gradient


@register_gradient("relax.grad.with_backward")
def with_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of with_backward.

    Forward form: ``y = with_backward(outputs, inputs, residuals, backward)``, which is ``outputs``.

    Backward form: ``inputs`` have ``backward(*y, *residuals, *y_grad)``, whose body is emitted; the
    other arguments have no gradient. The function takes ``y`` instead of ``outputs``, so that
    second derivatives pass through it.
    """
    outputs, _, residuals, backward = orig_call.args
    module = ctx.get()
    if backward not in module.functions:
        raise GradientError(
            f"the module has no function {backward.name_hint}; differentiate it before functions "
            "are removed"
        )
    arguments = [*map(tuple_fields, (orig_var, residuals, output_grad))]
    arguments = [
        field if isinstance(field, (relax.Var, relax.ShapeExpr)) else ctx.emit(field)
        for fields in arguments
        for field in fields
    ]
    function = with_shapes(module[backward], arguments)
    values = dict(zip(function.params, arguments, strict=True))
    for block in function.body.blocks:
        for binding in block.bindings:
            value = substitute(binding.value, values)
            if isinstance(binding, relax.MatchCast):
                values[binding.var] = ctx.match_cast(value, binding.ty)
            else:
                values[binding.var] = ctx.emit(value, binding.var.name)
    result = substitute(function.body.body, values)
    fields = tuple_fields(result)
    if not isinstance(result, relax.Tuple):
        fields = [ctx.emit(field) for field in fields]
    return [no_grad(outputs), relax.Tuple(fields), no_grad(residuals), no_grad(backward)]
