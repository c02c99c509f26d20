"""The precision in which each operator computes under :class:`~.autocast.Autocast`."""

from __future__ import annotations

from enum import Enum

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of
from ..ir.dtypes import HALVES


class Precision(Enum):
    """The dtype in which an operator computes, if its operands have float32 or a half precision."""

    HALF = "computed in the half precision, with sums in float32"
    FLOAT32 = "computed in float32"
    ROUNDED = "computed in float32, and rounded to the dtype of the data"
    WIDEST = "computed in the widest dtype of the operands"
    DATA = "computed with data in the half precision; the other operands keep their dtypes"
    KEPT = "computed in the dtypes that it has"


_CONVOLUTIONS = [f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")]

#: The operators by their precision; all others compute in the widest dtype.
OPERATORS = {
    Precision.HALF: (
        *("relax.matmul", "relax.outer", "relax.einsum", *_CONVOLUTIONS),
        *("relax.nn.attention", "relax.nn.attention_bias", "relax.nn.attention_var_len"),
        *("relax.grad.attention_dropout", "relax.grad.lstm", "relax.grad.gru"),
        *("relax.grad.rnn_tanh", "relax.grad.rnn_relu"),
    ),
    Precision.FLOAT32: (
        *("relax.exp", "relax.log", "relax.log_add_exp", "relax.power", "relax.nn.softplus"),
        *("relax.prod", "relax.cumprod", "relax.nn.avg_pool3d", "relax.image.grid_sample"),
        *("relax.nn.log_softmax", "relax.nn.nll_loss", "relax.nn.cross_entropy_with_logits"),
        *("relax.acosh", "relax.asinh", "relax.cosh", "relax.sinh", "relax.tan"),
        *("relax.acos", "relax.asin", "relax.rsqrt"),
    ),
    Precision.ROUNDED: (
        *("relax.nn.batch_norm", "relax.nn.layer_norm", "relax.nn.group_norm"),
        *("relax.nn.instance_norm", "relax.nn.rms_norm", "relax.nn.softmax"),
        *("relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu", "relax.nn.selu"),
        "relax.nn.prelu",
        *("relax.sum", "relax.mean", "relax.variance", "relax.std", "relax.cumsum"),
        *("relax.nn.avg_pool1d", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool1d"),
        *("relax.nn.adaptive_avg_pool2d", "relax.nn.adaptive_avg_pool3d"),
        *("relax.image.resize2d", "relax.image.resize3d"),
    ),
    Precision.DATA: ("relax.grad.quantized_matmul",),
    Precision.KEPT: ("relax.grad.with_backward",),
}

#: The reductions whose result is in float32 if it is a scalar, such as the mean of a loss.
_REDUCTIONS = ("relax.sum", "relax.mean")

#: The operators that call functions, whose dtypes are fixed, and operators of TVM's runtime.
_CALLS = ("relax.call_", "relax.invoke_", "relax.builtin.", "relax.memory.", "relax.vm.")

_OF_NAME = {name: precision for precision, names in OPERATORS.items() for name in names}


def precision_of(call: relax.Call) -> Precision:
    """Return the precision of a call."""
    if not isinstance(call.op, Op):
        return Precision.KEPT
    name = call.op.name
    if name in _REDUCTIONS and isinstance(call.ty, relax.TensorType) and call.ty.ndim == 0:
        return Precision.FLOAT32
    if name.startswith(_CALLS):
        return Precision.KEPT
    return _OF_NAME.get(name, Precision.WIDEST)


def is_product(expr: relax.Expr | None) -> bool:
    """Tell whether an expression is a matrix product or a convolution in a half precision, to which
    a model adds a bias."""
    return (
        isinstance(expr, relax.Call)
        and isinstance(expr.op, Op)
        and expr.op.name in ("relax.matmul", *_CONVOLUTIONS, *OPERATORS[Precision.DATA])
        and dtype_in(expr.ty) in HALVES
    )


def dtype_in(ty: relax.Type) -> str | None:
    """Return the dtype of a tensor whose dtype has a precision: a half one, float32 or float64."""
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return None
    dtype = dtype_of(ty)
    return dtype if dtype in (*HALVES, "float32", "float64") else None
