"""The backward operators of convolution.

``conv2d_backward_data`` and ``conv2d_backward_weight`` are linear in both of their tensors, and with
the convolution itself they are closed under differentiation: the gradient of each is built of the
other two (:mod:`relax_grad.rules.grad`).

Arguments and attributes are those of ``relax.op.nn.conv2d``, with the output gradient in front and the
shape of what is produced in the place of the tensor itself, as in ``torch.nn.grad``.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

from ._declare import (
    Shape,
    as_shape,
    check_layouts,
    check_positive,
    check_shape,
    declare_op,
    forward_type,
    shape_values,
    tensor_type,
)


def conv2d_backward_data(
    output_grad: relax.Expr, data_shape: relax.Expr | Shape, weight: relax.Expr, **attrs
) -> relax.Call:
    """Gradient of conv2d with respect to its data.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``conv2d(data, weight, **attrs)``, in
        ``out_layout``.
    data_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the data, in ``data_layout``.
    weight : relax.Expr
        The weight, in ``kernel_layout``.
    **attrs
        ``strides``, ``padding``, ``dilation``, ``groups``, ``data_layout``, ``kernel_layout`` and
        ``out_layout`` as given to ``relax.op.nn.conv2d``. ``out_dtype`` is the dtype of the result,
        by default that of ``output_grad``; half precision is accumulated in float32.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``data_shape``.
    """
    return relax.Call(
        Op.get("relax.grad.conv2d_backward_data"),
        [output_grad, as_shape(data_shape), weight],
        _conv2d_attrs(attrs),
    )


def conv2d_backward_weight(
    output_grad: relax.Expr, data: relax.Expr, weight_shape: relax.Expr | Shape, **attrs
) -> relax.Call:
    """Gradient of conv2d with respect to its weight.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``conv2d(data, weight, **attrs)``, in
        ``out_layout``.
    data : relax.Expr
        The data, in ``data_layout``.
    weight_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the weight, in ``kernel_layout``.
    **attrs
        As for :func:`conv2d_backward_data`.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``weight_shape``.
    """
    return relax.Call(
        Op.get("relax.grad.conv2d_backward_weight"),
        [output_grad, data, as_shape(weight_shape)],
        _conv2d_attrs(attrs),
    )


def _conv2d_attrs(attrs: dict) -> relax.op.op_attrs.Conv2DAttrs:
    """Complete the attributes in the way the forward operator does."""
    unused = relax.Var("unused", relax.TensorType(dtype="float32", ndim=4))
    return relax.op.nn.conv2d(unused, unused, **attrs).attrs


def _infer_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    data_shape = shape_values(call, 1, "data_shape")
    weight = tensor_type(call, 2, "weight")
    dtype = call.attrs.out_dtype or output_grad.dtype
    return _checked_result(call, ctx, output_grad, data_shape, weight.shape, dtype, data_shape)


def _infer_backward_weight(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    data = tensor_type(call, 1, "data")
    weight_shape = shape_values(call, 2, "weight_shape")
    dtype = call.attrs.out_dtype or output_grad.dtype
    return _checked_result(call, ctx, output_grad, data.shape, weight_shape, dtype, weight_shape)


def _checked_result(call, ctx, output_grad, data_shape, weight_shape, dtype, result_shape):
    """Hold the three shapes against each other by the type inference of the forward operator."""
    attrs = call.attrs
    check_layouts(
        call,
        data_layout=(attrs.data_layout, "NCHW"),
        kernel_layout=(attrs.kernel_layout, "OIHW"),
        out_layout=(attrs.out_layout, "NCHW"),
    )
    check_positive(call, "strides", "dilation", "groups")
    data, weight = (
        relax.Var(name, relax.TensorType(shape, "float32") if shape else relax.TensorType(ndim=4))
        for name, shape in (("data", data_shape), ("weight", weight_shape))
    )
    forward = forward_type(call, ctx, relax.Call(Op.get("relax.nn.conv2d"), [data, weight], attrs))
    check_shape(call, "output_grad", output_grad, forward)
    if result_shape is None:
        return relax.TensorType(dtype=dtype, ndim=4)
    return relax.TensorType(result_shape, dtype)


declare_op(
    "conv2d_backward_data",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of conv2d."),
        ("data_shape", "Shape", "The shape of the data."),
        ("weight", "Tensor", "The weight."),
    ],
    _infer_backward_data,
    conv2d_backward_data,
    "relax.attrs.Conv2DAttrs",
)
declare_op(
    "conv2d_backward_weight",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of conv2d."),
        ("data", "Tensor", "The data."),
        ("weight_shape", "Shape", "The shape of the weight."),
    ],
    _infer_backward_weight,
    conv2d_backward_weight,
    "relax.attrs.Conv2DAttrs",
)
