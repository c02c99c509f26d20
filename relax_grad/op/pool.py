"""The backward operators of pooling.

TVM has ``max_pool2d_backward`` and ``avg_pool2d_backward``. The operators for one and three spatial
axes and for adaptive pooling are added here in the same form. All are linear in the output
gradient. The transpose of the backward operator of average pooling is average pooling itself. That
of ``max_pool{1,2,3}d_backward`` is ``max_pool{1,2,3}d_jvp``, and with it the family is closed under
differentiation (:mod:`relax_grad.rules.grad`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax
from tvm.ir import Op

from ..ir.compat import shapes_may_differ
from ..ir.layout import Layout
from ._infer import check_positive, check_shape, forward_type, tensor_type, type_of_shape, unused
from ._layout import follow_layout_attrs
from .declare import declare_op
from .rank import RANKS, named, rank_of, spatial_axes


def _jvp(rank: int) -> Callable[..., relax.Call]:
    """Return the builder of the derivative of max pooling of this rank."""

    def build(
        data_tangent: relax.Expr,
        data: relax.Expr,
        pool_size: int | Sequence[int] = 1,
        strides: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        count_include_pad: bool = False,
        layout: str = f"NC{spatial_axes(rank)}",
        out_layout: str | None = None,
    ) -> relax.Call:
        """Derivative of {forward} along a direction: the tangent of each window's largest element.

        It is the transpose of ``relax.grad.{forward}_backward``. If several elements of a window
        are equally large, both choose the same one.

        Parameters
        ----------
        data_tangent : relax.Expr
            The direction, of the shape of the data.
        data : relax.Expr
            The data of ``{forward}``.
        pool_size, strides, padding, dilation, ceil_mode, count_include_pad, layout, out_layout
            As given to ``relax.op.nn.{forward}``.

        Returns
        -------
        result : relax.Call
            A tensor of the shape that {forward} returns, in ``out_layout``, and of the dtype of
            ``data_tangent``; 0 for a window that holds only padding.
        """
        attrs = _pool_attrs(
            rank,
            pool_size,
            strides,
            padding,
            dilation,
            ceil_mode,
            count_include_pad,
            layout,
            out_layout,
        )
        return relax.Call(Op.get(f"relax.grad.max_pool{rank}d_jvp"), [data_tangent, data], attrs)

    return named(build, f"max_pool{rank}d_jvp", forward=f"max_pool{rank}d")


def _backward(kind: str, rank: int) -> Callable[..., relax.Call]:
    """Return the builder of the gradient of maximum or average pooling of this rank."""
    forward = f"{kind}_pool{rank}d"
    default = inspect.signature(getattr(relax.op.nn, forward)).parameters["count_include_pad"]

    def build(
        output_grad: relax.Expr,
        data: relax.Expr,
        pool_size: int | Sequence[int] = 1,
        strides: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        count_include_pad: bool = default.default,
        layout: str = f"NC{spatial_axes(rank)}",
        out_layout: str | None = None,
    ) -> relax.Call:
        """Gradient of {forward} with respect to its data.

        Parameters
        ----------
        output_grad : relax.Expr
            The gradient with respect to the result of {forward}, in ``out_layout``.
        data : relax.Expr
            The data of ``{forward}``, in ``layout``.
        pool_size, strides, padding, dilation, ceil_mode, count_include_pad, layout, out_layout
            As given to ``relax.op.nn.{forward}``.

        Returns
        -------
        result : relax.Call
            A tensor of the type of ``data``.
        """
        attrs = _pool_attrs(
            rank,
            pool_size,
            strides,
            padding,
            dilation,
            ceil_mode,
            count_include_pad,
            layout,
            out_layout,
        )
        return relax.Call(Op.get(f"relax.grad.{forward}_backward"), [output_grad, data], attrs)

    return named(build, f"{forward}_backward", forward=forward)


def _adaptive_backward(rank: int) -> Callable[..., relax.Call]:
    """Return the builder of the gradient of adaptive average pooling of this rank."""
    forward = f"adaptive_avg_pool{rank}d"

    def build(
        output_grad: relax.Expr,
        data: relax.Expr,
        output_size: int | Sequence[int] | None = None,
        layout: str = f"NC{spatial_axes(rank)}",
        out_layout: str | None = None,
    ) -> relax.Call:
        """Gradient of {forward} with respect to its data.

        Parameters
        ----------
        output_grad : relax.Expr
            The gradient with respect to the result of {forward}, in ``out_layout``.
        data : relax.Expr
            The data of ``{forward}``, in ``layout``; only its type is used.
        output_size, layout, out_layout
            As given to ``relax.op.nn.{forward}``.

        Returns
        -------
        result : relax.Call
            A tensor of the type of ``data``.
        """
        make = getattr(relax.op.nn, forward)
        attrs = make(unused(rank + 2), output_size, layout, out_layout).attrs
        return relax.Call(Op.get(f"relax.grad.{forward}_backward"), [output_grad, data], attrs)

    return named(build, f"{forward}_backward", forward=forward)


def check_pool_attrs(call: relax.Call) -> relax.op.op_attrs.Attrs:
    """Return the attributes of a pooling call, completed as the forward operator does.

    Raises
    ------
    ValueError
        Names the operator and the attribute that has no gradient.
    """
    attrs, rank = call.attrs, rank_of(call)
    _check_layouts(call)
    check_positive(call, "pool_size", "strides", "dilation")
    for name in ("pool_size", "strides", "dilation", "padding"):
        # The forward operator's builder expands a single value to all axes.
        lengths = sorted({1, rank, 2 * rank} if name == "padding" else {1, rank})
        value = [int(extent) for extent in getattr(attrs, name)]
        if len(value) not in lengths:
            raise ValueError(
                f"{call.op.name}: {name} must hold {' or '.join(map(str, lengths))} integers, but "
                f"it is {value}"
            )
    return _pool_attrs(
        rank,
        attrs.pool_size,
        attrs.strides,
        attrs.padding,
        attrs.dilation,
        attrs.ceil_mode,
        attrs.count_include_pad,
        attrs.layout,
        attrs.out_layout,
    )


def check_adaptive_attrs(call: relax.Call) -> relax.op.op_attrs.Attrs:
    """Return the attributes of an adaptive pooling call.

    Raises
    ------
    ValueError
        Names the operator and the layout that has no gradient.
    """
    _check_layouts(call)
    return call.attrs


def pool_attrs(call: relax.Call) -> dict:
    """Return the attributes that a pooling and its backward operators share.

    Raises
    ------
    ValueError
        If no gradient is defined for these attributes.
    """
    attrs = check_pool_attrs(call)
    return {
        "pool_size": attrs.pool_size,
        "strides": attrs.strides,
        "padding": attrs.padding,
        "dilation": attrs.dilation,
        "ceil_mode": attrs.ceil_mode,
        "count_include_pad": attrs.count_include_pad,
        "layout": attrs.layout,
        "out_layout": attrs.out_layout,
    }


def adaptive_attrs(call: relax.Call) -> dict:
    """Return the attributes that an adaptive pooling and its backward operator share.

    Raises
    ------
    ValueError
        If no gradient is defined for these attributes.
    """
    attrs = check_adaptive_attrs(call)
    return {
        "output_size": attrs.output_size,
        "layout": attrs.layout,
        "out_layout": attrs.out_layout,
    }


def check_pool_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.op.op_attrs.Attrs:
    """Check a call of a maximum or average pooling's backward operator and return its attributes.

    TVM infers the types of the forward operators from the type of the data alone.

    Raises
    ------
    TypeError, ValueError
        Names the operator, the argument or attribute, and the expected and the found value.
    """
    attrs = check_pool_attrs(call)
    output_grad = tensor_type(call, 0, "output_grad")
    check_shape(call, "output_grad", output_grad, _forward_type(call, ctx, attrs))
    return attrs


def _check_layouts(call: relax.Call) -> None:
    plain = f"NC{spatial_axes(rank_of(call))}"
    for name in ("layout", "out_layout"):
        written = getattr(call.attrs, name)
        layout = Layout.of(written)
        if sorted(layout.names) != sorted(plain) or not {"N", "C"}.issuperset(layout.parts):
            raise ValueError(
                f"{call.op.name}: {name} must have the axes {plain!r} in any order, with parts "
                f"of N and C at most split off as in {plain + '4c'!r}, but it is {written!r}"
            )


def _pool_attrs(rank: int, pool_size: int | Sequence[int], *attrs: Any) -> relax.op.op_attrs.Attrs:
    """Complete the attributes as the forward operator does."""
    return getattr(relax.op.nn, f"max_pool{rank}d")(unused(rank + 2), pool_size, *attrs).attrs


def _infer_jvp(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    attrs = check_pool_attrs(call)
    forward = _forward_type(call, ctx, attrs)
    tangent, data = tensor_type(call, 0, "data_tangent"), call.args[1].ty
    if shapes_may_differ(tangent, data):
        raise ValueError(
            f"{call.op.name}: data_tangent must have the shape of data, whose type is {data}, but "
            f"its type is {tangent}"
        )
    return type_of_shape(tangent, forward.shape, forward.ndim)


def _infer_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    check_pool_backward(call, ctx)
    return call.args[1].ty


def _infer_adaptive_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    attrs = check_adaptive_attrs(call)
    output_grad = tensor_type(call, 0, "output_grad")
    forward = _forward_type(call, ctx, attrs, f"adaptive_avg_pool{rank_of(call)}d")
    check_shape(call, "output_grad", output_grad, forward)
    return call.args[1].ty


def _forward_type(
    call: relax.Call,
    ctx: relax.BlockBuilder,
    attrs: relax.op.op_attrs.Attrs,
    forward: str | None = None,
) -> relax.TensorType:
    """Return the result type of pooling the call's data; it is the same for maximum and average."""
    data = relax.Var("data", tensor_type(call, 1, "data"))
    op = Op.get(f"relax.nn.{forward or f'max_pool{rank_of(call)}d'}")
    return forward_type(call, ctx, relax.Call(op, [data], attrs))


_ARGUMENTS = [
    ("output_grad", "Tensor", "The gradient with respect to the result of the pooling."),
    ("data", "Tensor", "The data."),
]
_TANGENT = ("data_tangent", "Tensor", "The direction to differentiate along.")


def _declare_jvp(rank: int) -> Callable[..., relax.Call]:
    """Add the derivative of max pooling of a rank and return its builder."""
    builder = _jvp(rank)
    arguments = [_TANGENT, _ARGUMENTS[1]]
    declare_op(builder.__name__, arguments, _infer_jvp, builder, f"relax.attrs.Pool{rank}DAttrs")
    return builder


def _declare_backward(kind: str, rank: int) -> Callable[..., relax.Call]:
    """Add the backward operator of a pooling of a rank and return its builder."""
    builder = _backward(kind, rank)
    attrs = f"relax.attrs.Pool{rank}DAttrs"
    declare_op(builder.__name__, _ARGUMENTS, _infer_backward, builder, attrs)
    return builder


def _declare_adaptive(rank: int) -> Callable[..., relax.Call]:
    """Add the backward operator of the adaptive average pooling of a rank and return its
    builder."""
    builder = _adaptive_backward(rank)
    attrs = f"relax.attrs.AdaptivePool{rank}DAttrs"
    declare_op(builder.__name__, _ARGUMENTS, _infer_adaptive_backward, builder, attrs)
    return builder


max_pool1d_jvp, max_pool2d_jvp, max_pool3d_jvp = map(_declare_jvp, RANKS)

# TVM has the operators of rank 2.
max_pool1d_backward, max_pool3d_backward = (_declare_backward("max", rank) for rank in (1, 3))
avg_pool1d_backward, avg_pool3d_backward = (_declare_backward("avg", rank) for rank in (1, 3))

adaptive_avg_pool1d_backward, adaptive_avg_pool2d_backward, adaptive_avg_pool3d_backward = map(
    _declare_adaptive, RANKS
)

# The data has the layout of the forward operator's data; the output gradient may have any layout.
follow_layout_attrs(
    *(f"relax.grad.{kind}_pool{rank}d_backward" for kind in ("max", "avg") for rank in RANKS),
    *(f"relax.grad.max_pool{rank}d_jvp" for rank in RANKS),
    *(f"relax.grad.adaptive_avg_pool{rank}d_backward" for rank in RANKS),
    leader=1,
)
