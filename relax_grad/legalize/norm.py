"""Legalization of the normalisations, where TVM's is wrong."""

from __future__ import annotations

from tvm import relax
from tvm.relax.transform.legalize_ops.nn import _nn_batch_norm as tvm_batch_norm

from .._compat import dtype_of
from ..registry import register_legalize


@register_legalize(
    "relax.nn.batch_norm",
    corrects="returns float32 for half precision, against its own type, and takes a negative axis in "
    "training for another one",
)
def _batch_norm(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Compute half precision in float32, and count a negative axis from the start."""
    attrs = call.attrs
    dtypes = [dtype_of(argument.ty) for argument in call.args]
    half = "float16" in dtypes or "bfloat16" in dtypes
    if int(attrs.axis) >= 0 and not half:
        return tvm_batch_norm(bb, call)
    arguments = [
        relax.op.astype(argument, "float32") if half else argument for argument in call.args
    ]
    result = bb.emit(
        relax.op.nn.batch_norm(
            *arguments,
            axis=int(attrs.axis) % call.args[0].ty.ndim,
            epsilon=float(attrs.epsilon),
            center=attrs.center,
            scale=attrs.scale,
            momentum=float(attrs.momentum),
            training=attrs.training,
        )
    )
    if not half:
        return result
    return relax.Tuple(
        [
            relax.op.astype(relax.TupleGetItem(result, i), dtype_of(field))
            for i, field in enumerate(call.ty.fields)
        ]
    )
