"""Legalization of the operators that join and split tensors, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax, tirx

from ..ir.compat import dtype_of
from ..ir.module import tuple_fields
from ..registry import register_legalize
from ..topi import manipulate_join as topi_join
from ..topi.util import Shape, is_static, on_gpu
from ..topi.util import is_empty as is_known_empty
from ._util import EMPTY, int_list, is_empty, shape_values, stock, zeros

_STOCK_CONCAT = stock("relax.concat")
_STOCK_MESHGRID = stock("relax.meshgrid")
_STOCK_SPLIT = stock("relax.split")
_STOCK_STACK = stock("relax.stack")


@register_legalize("relax.concat", corrects="refuses axis=None")
def _concat(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    if call.attrs.axis is not None:
        return _STOCK_CONCAT(bb, call)
    # Type inference accepts axis=None for vectors only.
    return _STOCK_CONCAT(bb, relax.op.concat(call.args[0], axis=0))


@register_legalize("relax.grad.concat_backward_tensors")
def _concat_backward_tensors(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, shapes = call.args
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    parts = [list(field.values) for field in shapes.ty.fields]

    def made(kept: list[int]) -> relax.Expr:
        return bb.call_te(
            topi_join.concat_backward_tensors,
            output_grad,
            [parts[i] for i in kept],
            axis,
            primfunc_name_hint="concat_backward_tensors",
        )

    return _in_parts(bb, made, parts, dtype_of(output_grad.ty))


@register_legalize(
    "relax.split",
    corrects=(
        "refuses empty parts and unsorted indices, and makes parts of negative extent for indices "
        "beyond the end of the axis"
    ),
)
def _split(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (x,) = call.args
    attrs = call.attrs
    if isinstance(call.ty, relax.TensorType):
        return _STOCK_SPLIT(bb, call)
    axis = int(attrs.axis)
    extent = shape_values(x.ty.shape)[axis]
    parts = [list(field.shape.values) for field in call.ty.fields]
    if isinstance(attrs.indices_or_sections, tirx.IntImm):
        left_to_tvm = not is_static(extent) or int(extent) > 0
    else:
        ends = [0, *int_list(attrs.indices_or_sections)]
        left_to_tvm = is_static(extent) and all(map(int.__lt__, ends, [*ends[1:], int(extent)]))
    if left_to_tvm:
        return _STOCK_SPLIT(bb, call)
    begins = _begins(call, extent)

    def made(kept: list[int]) -> relax.Expr:
        return bb.call_te(
            topi_join.split,
            x,
            [parts[i] for i in kept],
            [begins[i] for i in kept],
            axis,
            primfunc_name_hint="split",
        )

    return _in_parts(bb, made, parts, dtype_of(x.ty))


@register_legalize("relax.grad.split_backward_x")
def _split_backward_x(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grads, x_shape = call.args
    axis = int(call.attrs.axis)
    shape = shape_values(x_shape)
    return bb.call_te(
        topi_join.split_backward_x,
        tuple_fields(output_grads),
        shape,
        _begins(call, shape[axis]),
        axis,
        primfunc_name_hint="split_backward_x",
    )


@register_legalize("relax.stack", corrects=EMPTY)
def _stack(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return zeros(bb, call) if is_empty(call) else _STOCK_STACK(bb, call)


@register_legalize("relax.grad.stack_backward_tensors")
def _stack_backward_tensors(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    axis = call.attrs.axis
    parts = bb.call_te(
        topi_join.stack_backward_tensors,
        call.args[0],
        0 if axis is None else int(axis),
        primfunc_name_hint="stack_backward_tensors",
    )
    return relax.Tuple([parts]) if len(call.ty.fields) == 1 else parts


@register_legalize("relax.meshgrid", corrects="returns a tensor, not a tuple, for a single vector")
def _meshgrid(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    grids = _STOCK_MESHGRID(bb, call)
    return relax.Tuple([grids]) if len(call.ty.fields) == 1 else grids


def _in_parts(
    bb: relax.BlockBuilder,
    made: Callable[[list[int]], relax.Expr],
    parts: Sequence[Shape],
    dtype: str,
) -> relax.Expr:
    """Return a tuple of parts, which a function makes from their numbers.

    On a GPU, no function makes parts that are known to be empty: TVM drops the bound of the threads
    that would write them.
    """
    kept = [i for i, shape in enumerate(parts) if not (on_gpu() and is_known_empty(shape))]
    results = made(kept) if kept else None
    if len(kept) == len(parts) > 1:
        return results
    fields = iter([results] if len(kept) == 1 else _fields(bb, results, len(kept)))
    empty = {
        i: bb.emit(relax.op.builtin.alloc_tensor(relax.ShapeExpr(list(shape)), dtype, 0))
        for i, shape in enumerate(parts)
        if i not in kept
    }
    return relax.Tuple([empty[i] if i in empty else next(fields) for i in range(len(parts))])


def _fields(bb: relax.BlockBuilder, results: relax.Expr | None, count: int) -> list[relax.Expr]:
    """Return the tensors of a tuple of results."""
    if results is None:
        return []
    variable = bb.emit(results)
    return [relax.TupleGetItem(variable, i) for i in range(count)]


def _begins(call: relax.Call, extent: tirx.PrimExpr) -> list:
    """Return the begin of each part of a split along the axis."""
    indices = call.attrs.indices_or_sections
    if isinstance(indices, tirx.IntImm):
        sections = int(indices)
        return [i * tirx.ceildiv(extent, sections) for i in range(sections)]
    return [
        0,
        *(tirx.min(tirx.const(max(index, 0), "int64"), extent) for index in int_list(indices)),
    ]
