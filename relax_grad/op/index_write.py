"""The backward operators of the operators that write at indices.

TVM writes updates with equal indices one after the other. For ``update`` the last one wins; for
``mean`` each update halves the previous value. The operators here follow the same order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.utils import convert_to_expr

from ..ir.compat import Analyzer, dtype_of
from ._infer import (
    check_shape,
    forward_type,
    tensor_type,
    type_of_argument,
    type_of_shape,
)
from .declare import Shape, as_shape, declare_op
from .index_nd import as_tuple, points_type, tuple_of_tensors

#: The reductions that TVM compiles; its scatter_nd has no mean.
REDUCTIONS = {
    "relax.scatter_elements": ("update", "add", "mul", "mean", "max", "min"),
    "relax.scatter_nd": ("update", "add", "mul", "max", "min"),
}


def scatter_elements_backward_updates(
    output_grad: relax.Expr, indices: relax.Expr, axis: int = 0, reduction: str = "update"
) -> relax.Call:
    """Gradient of scatter_elements with respect to its updates, for the reductions update and mean.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    indices : relax.Expr
        The indices, of the rank of the data.
    axis : int
        As given to ``relax.op.scatter_elements``.
    reduction : str
        ``"update"`` or ``"mean"``; the gradient for ``"add"`` is ``gather_elements_jvp``.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of the indices in the dtype of ``output_grad``: each update's share of
        the final value at its index. It is 0 for an overwritten update and for an out-of-bounds
        index.
    """
    attrs = relax.op.scatter_elements(output_grad, indices, output_grad, axis, reduction).attrs
    return relax.Call(
        Op.get("relax.grad.scatter_elements_backward_updates"), [output_grad, indices], attrs
    )


def scatter_nd_backward_updates(output_grad: relax.Expr, indices: relax.Expr) -> relax.Call:
    """Gradient of scatter_nd with respect to its updates, for the reduction update.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    indices : relax.Expr
        The indices.

    Returns
    -------
    result : relax.Call
        A tensor of the shape of the updates in the dtype of ``output_grad``; 0 for an overwritten
        update and for an out-of-bounds index.
    """
    return relax.Call(
        Op.get("relax.grad.scatter_nd_backward_updates"), [output_grad, indices], None
    )


def index_put_backward_values(
    output_grad: relax.Expr, indices: relax.Expr | Sequence[relax.Expr]
) -> relax.Call:
    """Gradient of index_put without accumulation with respect to values of the shape of the
    indices.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    indices : relax.Expr or Sequence[relax.Expr]
        An index tensor for each axis.

    Returns
    -------
    result : relax.Call
        A tensor of the shape to which the indices are broadcast in the dtype of ``output_grad``; 0
        for an overwritten value and for an out-of-bounds index.
    """
    return relax.Call(
        Op.get("relax.grad.index_put_backward_values"), [output_grad, as_tuple(indices)], None
    )


def slice_scatter_backward_src(
    output_grad: relax.Expr,
    src_shape: relax.Expr | Shape,
    start: relax.Expr | int | tirx.PrimExpr,
    end: relax.Expr | int | tirx.PrimExpr,
    step: relax.Expr | int | tirx.PrimExpr,
    axis: int = 0,
) -> relax.Call:
    """Gradient of slice_scatter with respect to its source.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    src_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of the source.
    start, end, step, axis
        As given to ``relax.op.slice_scatter``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``src_shape`` in the dtype of ``output_grad``; 0 for elements that were
        not written.
    """
    bounds = [convert_to_expr(bound) for bound in (start, end, step)]
    attrs = relax.op.slice_scatter(output_grad, output_grad, *bounds, axis).attrs
    return relax.Call(
        Op.get("relax.grad.slice_scatter_backward_src"),
        [output_grad, as_shape(src_shape), *bounds],
        attrs,
    )


def scatter_elements_scan(
    start: relax.Expr,
    indices: relax.Expr,
    factors: relax.Expr,
    terms: relax.Expr | None = None,
    axis: int = 0,
) -> relax.Call:
    """States before each update of ``state[place] = factors[k] * state[place] + terms[k]``.

    With the data as ``start``, the updates as ``factors`` and no ``terms``, it gives the value at
    each update's index just before scatter_elements with the reduction mul applies that update.

    Parameters
    ----------
    start : relax.Expr
        The initial state, of the shape of the data.
    indices : relax.Expr
        The index of each update, as for ``relax.op.scatter_elements``.
    factors : relax.Expr
        A factor for each update.
    terms : relax.Expr, optional
        A term for each update; 0 if there are none.
    axis : int
        As given to ``relax.op.scatter_elements``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``factors``; 0 for an out-of-bounds index.
    """
    return _elements_scan("scatter_elements_scan", start, indices, factors, terms, axis=axis)


def scatter_elements_scan_reverse(
    start: relax.Expr,
    indices: relax.Expr,
    factors: relax.Expr,
    terms: relax.Expr | None = None,
    axis: int = 0,
) -> relax.Call:
    """``scatter_elements_scan`` in reverse, from the last update to the first."""
    return _elements_scan(
        "scatter_elements_scan_reverse", start, indices, factors, terms, axis=axis
    )


def scatter_nd_scan(
    start: relax.Expr, indices: relax.Expr, factors: relax.Expr, terms: relax.Expr | None = None
) -> relax.Call:
    """States before each update of ``state[place] = factors[k] * state[place] + terms[k]``.

    Parameters
    ----------
    start : relax.Expr
        The initial state, of the shape of the data.
    indices : relax.Expr
        The index of each update, as for ``relax.op.scatter_nd``.
    factors : relax.Expr
        A factor for each element of the updates.
    terms : relax.Expr, optional
        A term for each element of the updates; 0 if there are none.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``factors``; 0 for an out-of-bounds index.
    """
    return relax.Call(
        Op.get("relax.grad.scatter_nd_scan"), _present(start, indices, factors, terms), None
    )


def scatter_nd_scan_reverse(
    start: relax.Expr, indices: relax.Expr, factors: relax.Expr, terms: relax.Expr | None = None
) -> relax.Call:
    """``scatter_nd_scan`` in reverse, from the last update to the first."""
    return relax.Call(
        Op.get("relax.grad.scatter_nd_scan_reverse"), _present(start, indices, factors, terms), None
    )


def index_tuple(indices: relax.Expr) -> relax.Expr:
    """Return the indices of index_put as a tuple; they may be a single tensor."""
    return relax.Tuple([indices]) if isinstance(indices.ty, relax.TensorType) else indices


def listed_shape(
    ctx: relax.BlockBuilder, data: relax.Expr, indices: relax.Expr, values: relax.Expr
) -> relax.ShapeExpr | None:
    """Return the shape to reshape index_put's values to, if they are not broadcast.

    TVM reads the values in row-major order, whatever their shape; PyTorch broadcasts them to the
    shape of the indices.

    Returns
    -------
    shape : relax.ShapeExpr or None
        The shape of the indices if there are as many values, but in another shape. None if the
        values broadcast to it.

    Raises
    ------
    ValueError
        If the values fit in neither way, or a shape is unknown.
    """
    points = ctx.normalize(index_put_backward_values(data, index_tuple(indices))).ty.shape
    shape = values.ty.shape
    if not (isinstance(points, relax.ShapeExpr) and isinstance(shape, relax.ShapeExpr)):
        raise ValueError(
            "the broadcast shape of the indices and the shape of the values must be known, but "
            f"they are {points} and {shape}; use relax.match_cast to give them known shapes"
        )
    analyzer = Analyzer()
    aligned = list(points.values)[max(0, len(points) - len(shape)) :]
    if len(shape) <= len(points) and all(
        analyzer.can_prove_equal(a, 1) or analyzer.can_prove_equal(a, b)
        for a, b in zip(shape.values, aligned, strict=True)
    ):
        return None
    counts = [functools.reduce(operator.mul, s.values, 1) for s in (points, shape)]
    if analyzer.can_prove_equal(*counts):
        return points
    raise ValueError(
        f"the values must be broadcastable to the shape {points} of the indices, or have as many "
        f"elements, but their shape is {shape}"
    )


def _elements_scan(
    name: str,
    start: relax.Expr,
    indices: relax.Expr,
    factors: relax.Expr,
    terms: relax.Expr | None,
    axis: int,
) -> relax.Call:
    attrs = relax.op.gather_elements(start, indices, axis).attrs
    return relax.Call(Op.get(f"relax.grad.{name}"), _present(start, indices, factors, terms), attrs)


def _present(*arguments: relax.Expr | None) -> list[relax.Expr]:
    return [argument for argument in arguments if argument is not None]


def _infer_scatter_elements_updates(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    indices = tensor_type(call, 1, "indices")
    if call.attrs.reduction not in ("update", "mean"):
        raise ValueError(
            f"{call.op.name}: reduction must be 'update' or 'mean', but it is "
            f"{call.attrs.reduction!r}"
        )
    updates = type_of_shape(output_grad, indices.shape, indices.ndim)
    forward = relax.Call(
        Op.get("relax.scatter_elements"),
        [call.args[0], call.args[1], relax.Var("updates", updates)],
        call.attrs,
    )
    forward_type(call, ctx, forward)
    return updates


def _infer_scatter_nd_updates(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    tensor_type(call, 0, "output_grad")
    return points_type(call, ctx, call.args[0], tensor_type(call, 1, "indices"))


def _infer_index_put_values(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    indices = tuple_of_tensors(call, 1, "indices")
    if output_grad.ndim not in (-1, len(indices)):
        raise ValueError(
            f"{call.op.name}: indices must be {output_grad.ndim} tensors, one for each axis of "
            f"output_grad ({output_grad}), but there are {len(indices)}"
        )
    return points_type(call, ctx, call.args[0], indices)


def _infer_slice_scatter_src(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    src = type_of_argument(call, 1, "src_shape", tensor_type(call, 0, "output_grad"))
    forward = relax.Call(
        Op.get("relax.slice_scatter"),
        [call.args[0], relax.Var("src", src), *call.args[2:]],
        call.attrs,
    )
    forward_type(call, ctx, forward)
    return src


def _infer_scatter_elements_scan(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    axis = int(call.attrs.axis)
    start, indices, factors, *_ = call.args
    return _infer_scan(
        call, ctx, lambda: relax.op.scatter_elements(start, indices, factors, axis, "mul")
    )


def _infer_scatter_nd_scan(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    start, indices, factors, *_ = call.args
    return _infer_scan(call, ctx, lambda: relax.op.scatter_nd(start, indices, factors, "mul"))


def _infer_scan(
    call: relax.Call, ctx: relax.BlockBuilder, forward: Callable[[], relax.Expr]
) -> relax.Type:
    tensor_type(call, 0, "start")
    tensor_type(call, 1, "indices")
    factors = tensor_type(call, 2, "factors")
    forward_type(call, ctx, forward())
    if len(call.args) == 4:
        terms = tensor_type(call, 3, "terms")
        if dtype_of(terms) != dtype_of(factors):
            raise TypeError(
                f"{call.op.name}: terms must have the dtype of factors, {dtype_of(factors)}, but "
                f"they have {dtype_of(terms)}"
            )
        check_shape(call, "terms", terms, factors)
    return factors


_OUTPUT_GRAD = ("output_grad", "Tensor", "The gradient with respect to the result.")
_INDICES = ("indices", "Tensor", "The indices.")
_SCAN = [
    ("start", "Tensor", "The initial state."),
    ("indices", "Tensor", "The position of each update."),
    ("factors", "Tensor", "A factor for each update."),
    ("terms", "Optional[Tensor]", "A term for each update."),
]

declare_op(
    "scatter_elements_backward_updates",
    [_OUTPUT_GRAD, _INDICES],
    _infer_scatter_elements_updates,
    scatter_elements_backward_updates,
    "relax.attrs.ScatterElementsAttrs",
)
declare_op(
    "scatter_nd_backward_updates",
    [_OUTPUT_GRAD, _INDICES],
    _infer_scatter_nd_updates,
    scatter_nd_backward_updates,
)
declare_op(
    "index_put_backward_values",
    [_OUTPUT_GRAD, ("indices", "Tuple", "The index tensors.")],
    _infer_index_put_values,
    index_put_backward_values,
)
declare_op(
    "slice_scatter_backward_src",
    [
        _OUTPUT_GRAD,
        ("src_shape", "Shape", "The shape of the tensor that is written."),
        ("start", "PrimExpr", "The start of the slice."),
        ("end", "PrimExpr", "The end of the slice."),
        ("step", "PrimExpr", "The step of the slice."),
    ],
    _infer_slice_scatter_src,
    slice_scatter_backward_src,
    "relax.attrs.SliceScatterAttrs",
)
for _builder in (scatter_elements_scan, scatter_elements_scan_reverse):
    declare_op(
        _builder.__name__,
        _SCAN,
        _infer_scatter_elements_scan,
        _builder,
        "relax.attrs.GatherElementsAttrs",
    )
for _scan in (scatter_nd_scan, scatter_nd_scan_reverse):
    declare_op(_scan.__name__, _SCAN, _infer_scatter_nd_scan, _scan)
