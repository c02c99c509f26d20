"""The backward operators of scans."""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of, shapes_may_differ
from ._infer import infer_data, shape_values, tensor_type, unused
from .declare import Shape, as_shape, declare_op


def cumsum_backward_data(
    output_grad: relax.Expr,
    data_shape: relax.Expr | Shape,
    axis: int | None = None,
    dtype: str | None = None,
    exclusive: bool = False,
) -> relax.Call:
    """Gradient of cumsum with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``cumsum(data, axis, dtype, exclusive)``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data.
    axis, dtype, exclusive
        As given to ``relax.op.cumsum``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``, which is ``dtype`` if
        that is given; half precision is accumulated in float32.
    """
    return relax.Call(
        Op.get("relax.grad.cumsum_backward_data"),
        [output_grad, as_shape(data_shape)],
        relax.op.cumsum(unused(), axis, dtype, exclusive).attrs,
    )


def linear_scan(
    multiplier: relax.Expr, increment: relax.Expr | None = None, axis: int = 0
) -> relax.Call:
    """Linear recurrence along an axis, the building block of the gradients of products.

    ``y[i + 1] = multiplier[i] * y[i] + increment[i]`` from ``y[0] = 0``. Without increments,
    ``y[i]`` is the product of the multipliers before ``i``, from ``y[0] = 1``.

    Parameters
    ----------
    multiplier : relax.Expr
        The multipliers.
    increment : relax.Expr, optional
        The increments, of the shape and the dtype of the multipliers.
    axis : int
        The axis.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and the dtype of ``multiplier``; half precision is accumulated in
        float32.
    """
    return _scan("linear_scan", multiplier, increment, axis)


def linear_scan_reverse(
    multiplier: relax.Expr, increment: relax.Expr | None = None, axis: int = 0
) -> relax.Call:
    """Linear recurrence from the end of an axis: :func:`linear_scan` in reverse.

    ``y[i - 1] = multiplier[i] * y[i] + increment[i]``, from 0, or from 1 without increments, at the
    last element.

    Parameters
    ----------
    multiplier, increment, axis
        As for :func:`linear_scan`.

    Returns
    -------
    result : relax.Call
        A tensor of the shape and the dtype of ``multiplier``; half precision is accumulated in
        float32.
    """
    return _scan("linear_scan_reverse", multiplier, increment, axis)


def _scan(name: str, multiplier: relax.Expr, increment: relax.Expr | None, axis: int) -> relax.Call:
    return relax.Call(
        Op.get(f"relax.grad.{name}"),
        [multiplier] if increment is None else [multiplier, increment],
        relax.op.flip(unused(), axis).attrs,
    )


def _infer_cumsum(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    shape_values(call, 1, "data_shape")  # raises for an argument that is not a shape
    if call.attrs.axis is not None:
        _check_axis(call, "data_shape", call.args[1].ty.ndim)
    return infer_data(call, ctx, "relax.cumsum", if_known=True)


def _infer_linear_scan(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    multiplier = tensor_type(call, 0, "multiplier")
    _check_axis(call, "multiplier", multiplier.ndim)
    if len(call.args) == 2:
        increment = tensor_type(call, 1, "increment")
        if shapes_may_differ(increment, multiplier) or dtype_of(increment) != dtype_of(multiplier):
            raise ValueError(
                f"{call.op.name}: increment must have the type {multiplier} of multiplier, but "
                f"it has {increment}"
            )
    return multiplier


def _check_axis(call: relax.Call, name: str, ndim: int) -> None:
    axis = int(call.attrs.axis)
    if ndim != -1 and not -ndim <= axis < ndim:
        raise ValueError(
            f"{call.op.name}: axis must lie in [{-ndim}, {ndim}), as {name} has {ndim} "
            f"dimensions, but it is {axis}"
        )


declare_op(
    "cumsum_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of cumsum."),
        ("data_shape", "Shape", "The shape of the data."),
    ],
    _infer_cumsum,
    cumsum_backward_data,
    "relax.attrs.ScanopAttrs",
)
for _builder in (linear_scan, linear_scan_reverse):
    declare_op(
        _builder.__name__,
        [
            ("multiplier", "Tensor", "The multipliers."),
            ("increment", "Optional[Tensor]", "The increments."),
        ],
        _infer_linear_scan,
        _builder,
        "relax.attrs.FlipAttrs",
    )
