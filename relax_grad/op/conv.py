"""The backward operators of convolution.

``conv{1,2,3}d_backward_data`` and ``conv{1,2,3}d_backward_weight`` are linear in both of their
tensors, and with the convolution itself they are closed under differentiation: the gradient of each
is built from the other two (:mod:`relax_grad.rules.grad`). A transposed convolution is the data
gradient of a convolution, and needs no further operator.

Arguments and attributes follow ``relax.op.nn.conv{1,2,3}d``, with the output gradient first
and the shape of the result instead of the tensor itself, as in ``torch.nn.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.ir import Op

from ._infer import (
    check_layouts,
    check_positive,
    check_shape,
    forward_type,
    shape_values,
    tensor_type,
    type_of_shape,
    unused,
)
from ._layout import Converted, first, layout_rule, moved, moved_shape, order
from .declare import Shape, as_shape, declare_op
from .rank import RANKS, named, rank_of, spatial_axes


def _backward_data(rank: int) -> Callable[..., relax.Call]:
    """Return the builder of the gradient of a convolution of this rank with respect to its data."""

    def build(
        output_grad: relax.Expr, data_shape: relax.Expr | Shape, weight: relax.Expr, **attrs: Any
    ) -> relax.Call:
        """Gradient of {forward} with respect to its data.

        Parameters
        ----------
        output_grad : relax.Expr
            The gradient with respect to the result of ``{forward}(data, weight, **attrs)``, in
            ``out_layout``.
        data_shape : relax.Expr or Sequence[int or PrimExpr]
            The shape of the data, in ``data_layout``.
        weight : relax.Expr
            The weight, in ``kernel_layout``.
        **attrs
            ``strides``, ``padding``, ``dilation``, ``groups``, ``data_layout``, ``kernel_layout``
            and ``out_layout`` as given to ``relax.op.nn.{forward}``. ``out_dtype`` is the dtype of
            the result, by default that of ``output_grad``; half precision is accumulated in
            float32.

        Returns
        -------
        result : relax.Call
            A tensor of shape ``data_shape``.
        """
        op = Op.get(f"relax.grad.conv{rank}d_backward_data")
        return relax.Call(op, [output_grad, as_shape(data_shape), weight], _attrs(rank, attrs))

    return named(build, f"conv{rank}d_backward_data", forward=f"conv{rank}d")


def _backward_weight(rank: int) -> Callable[..., relax.Call]:
    """Return the builder of the gradient of a convolution of this rank with respect to its
    weight."""

    def build(
        output_grad: relax.Expr, data: relax.Expr, weight_shape: relax.Expr | Shape, **attrs: Any
    ) -> relax.Call:
        """Gradient of {forward} with respect to its weight.

        Parameters
        ----------
        output_grad : relax.Expr
            The gradient with respect to the result of ``{forward}(data, weight, **attrs)``, in
            ``out_layout``.
        data : relax.Expr
            The data, in ``data_layout``.
        weight_shape : relax.Expr or Sequence[int or PrimExpr]
            The shape of the weight, in ``kernel_layout``.
        **attrs
            As for ``{forward}_backward_data``.

        Returns
        -------
        result : relax.Call
            A tensor of shape ``weight_shape``.
        """
        op = Op.get(f"relax.grad.conv{rank}d_backward_weight")
        return relax.Call(op, [output_grad, data, as_shape(weight_shape)], _attrs(rank, attrs))

    return named(build, f"conv{rank}d_backward_weight", forward=f"conv{rank}d")


def conv_attrs(call: relax.Call) -> dict:
    """Return the attributes that a convolution and its backward operators share."""
    attrs = call.attrs
    return {
        "strides": attrs.strides,
        "padding": attrs.padding,
        "dilation": attrs.dilation,
        "groups": attrs.groups,
        "data_layout": attrs.data_layout,
        "kernel_layout": attrs.kernel_layout,
        "out_layout": attrs.out_layout,
    }


def _attrs(rank: int, attrs: dict) -> relax.op.op_attrs.Attrs:
    """Complete the attributes as the forward operator does."""
    tensor = unused(rank + 2)
    return getattr(relax.op.nn, f"conv{rank}d")(tensor, tensor, **attrs).attrs


def _infer_backward_data(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    data_shape = shape_values(call, 1, "data_shape")
    weight = tensor_type(call, 2, "weight")
    return _checked_result(
        call, ctx, output_grad, data_shape, weight.shape, result_shape=data_shape
    )


def _infer_backward_weight(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    data = tensor_type(call, 1, "data")
    weight_shape = shape_values(call, 2, "weight_shape")
    return _checked_result(
        call, ctx, output_grad, data.shape, weight_shape, result_shape=weight_shape
    )


def _checked_result(
    call: relax.Call,
    ctx: relax.BlockBuilder,
    output_grad: relax.TensorType,
    data_shape: relax.Expr | Sequence | None,
    weight_shape: relax.Expr | Sequence | None,
    result_shape: Sequence | None,
) -> relax.TensorType:
    """Check the three shapes against each other by the type inference of the forward operator."""
    attrs, rank = call.attrs, rank_of(call)
    spatial = spatial_axes(rank)
    check_layouts(
        call,
        data_layout=(attrs.data_layout, f"NC{spatial}"),
        kernel_layout=(attrs.kernel_layout, f"OI{spatial}"),
        out_layout=(attrs.out_layout, f"NC{spatial}"),
    )
    check_positive(call, "strides", "dilation", "groups")
    data, weight = (
        relax.Var(
            name,
            relax.TensorType(shape, "float32") if shape else relax.TensorType(ndim=rank + 2),
        )
        for name, shape in (("data", data_shape), ("weight", weight_shape))
    )
    forward_op = Op.get(f"relax.nn.conv{rank}d")
    forward = forward_type(call, ctx, relax.Call(forward_op, [data, weight], attrs))
    check_shape(call, "output_grad", output_grad, forward)
    return type_of_shape(output_grad, result_shape, rank + 2, attrs.out_dtype)


def _declare(rank: int) -> Iterator[Callable]:
    """Add the two operators of a rank and yield their builders."""
    backward_data, backward_weight = _backward_data(rank), _backward_weight(rank)
    output_grad = (
        "output_grad",
        "Tensor",
        f"The gradient with respect to the result of conv{rank}d.",
    )
    data_shape, weight = (
        ("data_shape", "Shape", "The data's shape."),
        ("weight", "Tensor", "The weight."),
    )
    data, weight_shape = (
        ("data", "Tensor", "The data."),
        ("weight_shape", "Shape", "The weight's shape."),
    )
    for builder, arguments, infer_type in (
        (backward_data, [output_grad, data_shape, weight], _infer_backward_data),
        (backward_weight, [output_grad, data, weight_shape], _infer_backward_weight),
    ):
        yield declare_op(
            builder.__name__, arguments, infer_type, builder, f"relax.attrs.Conv{rank}DAttrs"
        )


(
    (conv1d_backward_data, conv1d_backward_weight),
    (conv2d_backward_data, conv2d_backward_weight),
    (conv3d_backward_data, conv3d_backward_weight),
) = map(_declare, RANKS)


@layout_rule(*(f"relax.grad.conv{rank}d_backward_data" for rank in RANKS))
def _layout_backward_data(
    call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
) -> Converted | None:
    out, _, kernel = layouts
    data, kernel, out = _desired(call, desired) or (out, kernel, out)
    shape = moved_shape(call, 1, data)
    if shape is None:
        return None
    return Converted([out, None, kernel], data, _layout_attrs(call, data, kernel, out), shape)


@layout_rule(*(f"relax.grad.conv{rank}d_backward_weight" for rank in RANKS))
def _layout_backward_weight(
    call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
) -> Converted | None:
    out, data, _ = layouts
    data, kernel, out = _desired(call, desired) or (data, first(len(data)), out)
    shape = moved_shape(call, 2, kernel)
    if shape is None:
        return None
    return Converted([out, data, None], kernel, _layout_attrs(call, data, kernel, out), shape)


def _desired(call: relax.Call, desired: Mapping[str, Sequence[str]]) -> tuple[str, str, str] | None:
    """Return the desired orders of the axes of data, weight and output gradient.

    They are given under the name of the operator, or of the convolution. None if they are not
    given, or are not permutations of the call's.
    """
    attrs = call.attrs
    wanted = desired.get(call.op.name) or desired.get(f"relax.nn.conv{rank_of(call)}d")
    if not wanted:
        return None
    data, kernel, *out = map(str, wanted)
    pairs = [
        (attrs.data_layout, data),
        (attrs.kernel_layout, kernel),
        (attrs.out_layout, out[0] if out else data),
    ]
    if any(sorted(old) != sorted(new) for old, new in pairs):
        return None
    (old_data, data), (old_kernel, kernel), (old_out, result) = pairs
    return order(old_data, data), order(old_kernel, kernel), order(old_out, result)


def _layout_attrs(call: relax.Call, data: str, kernel: str, out: str) -> dict:
    """Return the attributes of a call with its tensors in these orders of axes."""
    attrs = call.attrs
    return {
        "data_layout": "".join(moved(attrs.data_layout, data)),
        "kernel_layout": "".join(moved(attrs.kernel_layout, kernel)),
        "out_layout": "".join(moved(attrs.out_layout, out)),
    }
