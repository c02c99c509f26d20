"""Tensor expressions of scans: cumulative operations along an axis, in one pass over the memory.

A task scans a chunk of the axes after the scanned one. So it reads and writes rows of memory, and
tasks are independent. The running state is read from the result. On a GPU a thread scans one row:
each element depends on the previous one, so nothing is parallel along the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx, topi
from tvm.script.ir_builder import tirx as T

from ..ir.dtypes import accumulation_dtype
from ._loops import Chunks, extern
from .util import Shape, cast


def linear_scan(
    multiplier: te.Tensor, increment: te.Tensor | None, axis: int, reverse: bool
) -> te.Tensor:
    """Linear recurrence ``y[i + 1] = multiplier[i] * y[i] + increment[i]`` along an axis, from
    ``y[0] = 0``.

    Without increments it starts from 1 and gives the products of all previous elements. The last
    multiplier and increment are not used. An infinite state times the multiplier 0 is 0: a product
    of finite numbers may be out of range before it meets a 0.

    Parameters
    ----------
    multiplier : te.Tensor
        The multipliers.
    increment : te.Tensor or None
        The increments, of the shape and the dtype of the multipliers.
    axis : int
        The axis.
    reverse : bool
        Whether to go from the last element to the first,
        ``y[i - 1] = multiplier[i] * y[i] + increment[i]``.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the multipliers; half precision is accumulated in
        float32.
    """
    axis %= len(multiplier.shape)
    dtype = accumulation_dtype(multiplier.dtype)
    inputs = [multiplier] if increment is None else [multiplier, increment]
    first = tirx.const(1 if increment is None else 0, dtype)
    zero, largest = tirx.const(0, dtype), tirx.max_value(dtype)

    def step(
        buffers: Sequence[tirx.Buffer],
        state: tirx.PrimExpr,
        before: Sequence[tirx.PrimExpr],
        _: Sequence[tirx.PrimExpr],
    ) -> tirx.PrimExpr:
        factor = buffers[0][before].astype(dtype)
        is_lost = tirx.And(factor == zero, tirx.abs(state) > largest)
        value = tirx.Select(is_lost, zero, state * factor)
        return value if increment is None else value + buffers[1][before].astype(dtype)

    return cast(
        _scan(inputs, step, lambda *_: first, axis, reverse, dtype=dtype, name="linear_scan"),
        multiplier.dtype,
    )


def cumsum_backward_data(
    output_grad: te.Tensor, data_shape: Shape, axis: int | None, exclusive: bool
) -> te.Tensor:
    """Gradient of cumsum with respect to its data: the cumulative sum from the other end.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``cumsum(data, axis, exclusive)``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    axis : int or None
        The axis; None if cumsum flattened the data first.
    exclusive : bool
        Whether an element is left out of its own sum.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    dtype = accumulation_dtype(output_grad.dtype)

    def step(
        buffers: Sequence[tirx.Buffer],
        state: tirx.PrimExpr,
        before: Sequence[tirx.PrimExpr],
        here: Sequence[tirx.PrimExpr],
    ) -> tirx.PrimExpr:
        return state + buffers[0][before if exclusive else here].astype(dtype)

    def first(buffers: Sequence[tirx.Buffer], here: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        return tirx.const(0, dtype) if exclusive else buffers[0][here].astype(dtype)

    along = 0 if axis is None else axis % len(data_shape)
    total = _scan([output_grad], step, first, along, True, dtype=dtype, name="cumsum_backward_data")
    total = cast(total, output_grad.dtype)
    return topi.reshape(total, data_shape) if axis is None else total


def _scan(
    inputs: list[te.Tensor],
    step: Callable[..., tirx.PrimExpr],
    first: Callable[..., tirx.PrimExpr],
    axis: int,
    reverse: bool,
    dtype: str,
    name: str,
) -> te.Tensor:
    """Scan tensors of one shape along an axis.

    Parameters
    ----------
    inputs : list[te.Tensor]
        The tensors that ``step`` and ``first`` read, as buffers.
    step : Callable
        ``(buffers, state, before, here) -> state``: the next state, given the indices of the
        previous element and of the element to write.
    first : Callable
        ``(buffers, here) -> state``: the value of the first element.
    axis, reverse, dtype, name
        The axis, whether to go from its end, the dtype of the result and its name.
    """
    shape = list(inputs[0].shape)
    outer, extent, behind = shape[:axis], shape[axis], shape[axis + 1 :]
    chunks = Chunks(behind, before=outer)

    def body(*buffers: tirx.Buffer) -> None:
        *data, out = buffers
        with chunks.tasks() as (at_outer, chunk):

            def index(
                i: int | tirx.PrimExpr, at: Sequence[tirx.PrimExpr]
            ) -> tuple[tirx.PrimExpr, ...]:
                return (*at_outer, extent - 1 - i if reverse else i, *at)

            with T.If(extent > 0), T.Then():
                with chunks.loops(chunk) as at:
                    here = index(0, at)
                    T.buffer_store(out, first(data, here), list(here))
                with T.serial(extent - 1) as i, chunks.loops(chunk) as at:
                    before, here = index(i, at), index(i + 1, at)
                    T.buffer_store(out, step(data, out[before], before, here), list(here))

    return extern(body, inputs, shape, dtype, name)
