"""The contraction of two tensors: ``c[i, j] = sum over k of a[i, k] * b[k, j]``, with any number
and order of axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import relax, tirx

from ..errors import GradientError
from ..ir.compat import BufferLoad, loaded_buffer
from .flat import ADD, ASSIGN, Item, Nest, nests
from .program import parse
from .statements import is_float


@dataclass(frozen=True)
class _Axes:
    """The loops of a contraction, by the tensors whose elements they index.

    Attributes
    ----------
    a, b, c : list[tirx.Var]
        The loop of each dimension of the operands and of the result.
    """

    a: list[tirx.Var]
    b: list[tirx.Var]
    c: list[tirx.Var]

    @property
    def stacked(self) -> list[tirx.Var]:
        return [axis for axis in self.c if axis in self.a and axis in self.b]

    @property
    def rows(self) -> list[tirx.Var]:
        return [axis for axis in self.c if axis not in self.b]

    @property
    def columns(self) -> list[tirx.Var]:
        return [axis for axis in self.c if axis not in self.a]

    @property
    def summed(self) -> list[tirx.Var]:
        return [axis for axis in self.a if axis not in self.c]

    @property
    def are_of_a_contraction(self) -> bool:
        """Whether each loop indexes at least two of the tensors, and some loop is summed over."""
        places = [*self.a, *self.b, *self.c]
        return bool(self.summed) and all(places.count(axis) >= 2 for axis in places)


def contraction(function: tirx.PrimFunc) -> Callable | None:
    """Return the matrix product that computes a contraction.

    Parameters
    ----------
    function : tirx.PrimFunc
        A function of two operands and a result.

    Returns
    -------
    recipe : Callable or None
        Makes the product from the arguments and a function that emits an operand. None if the
        function is not exactly the loops of a contraction of tensors of one dtype, which starts
        at 0.
    """
    if len(function.params) != 3:
        return None
    try:
        program = parse(function, 1)
    except GradientError:
        return None
    if program.allocated or not all(is_float(str(tensor.dtype)) for tensor in program.inputs):
        return None
    loop_nests: list[Nest] = []
    for part in program.parts:
        of_part = nests(part.statement)
        if not of_part:
            return None
        loop_nests += of_part
    if len(loop_nests) != 2:
        return None
    (output,) = program.outputs
    first, second = loop_nests
    if not _fills_with_zeros(first, output):
        return None
    axes = _axes(second, output, program.inputs)
    if axes is None or not axes.are_of_a_contraction:
        return None
    return lambda arguments, emit: _product(axes, arguments, emit)


def _fills_with_zeros(nest: Nest, output: tirx.Var) -> bool:
    item = _only(nest, ASSIGN, output)
    if item is None or _loops(nest, item.indices, output) is None:
        return False
    return isinstance(item.value, tirx.FloatImm) and float(item.value) == 0


def _axes(nest: Nest, output: tirx.Var, inputs: Sequence[tirx.Var]) -> _Axes | None:
    item = _only(nest, ADD, output)
    if item is None or not isinstance(item.value, tirx.Mul):
        return None
    factors = [item.value.a, item.value.b]
    if not all(isinstance(factor, BufferLoad) for factor in factors):
        return None
    if not loaded_buffer(factors[0]).same_as(inputs[0]):
        factors.reverse()
    if not all(
        loaded_buffer(factor).same_as(tensor)
        for factor, tensor in zip(factors, inputs, strict=True)
    ):
        return None
    axes = []
    for indices, tensor in (
        *((factor.indices, loaded_buffer(factor)) for factor in factors),
        (item.indices, output),
    ):
        loops = _loops(nest, indices, tensor)
        if loops is None:
            return None
        axes.append(loops)
    if len({var for loops in axes for var in loops}) != len(nest.loops):
        return None
    return _Axes(*axes)


def _only(nest: Nest, kind: str, output: tirx.Var) -> Item | None:
    """Return the only store of a nest, if it is of a kind, has no condition, and writes to the
    result."""
    (item, *others) = nest.items
    is_such = not others and item.kind == kind and not item.guards and item.buffer.same_as(output)
    return item if is_such else None


def _loops(nest: Nest, indices: Sequence[tirx.PrimExpr], tensor: tirx.Var) -> list | None:
    """Return the loops that are the indices of a tensor, if they run over its whole extents, each
    over one."""
    ranges = {loop.var: loop for loop in nest.loops}
    loops = [ranges[index] for index in indices if isinstance(index, tirx.Var) and index in ranges]
    if len(loops) < len(indices) or len(set(indices)) != len(loops):
        return None
    for loop, extent in zip(loops, tensor.shape, strict=True):
        start = loop.start
        if not (isinstance(start, tirx.IntImm) and int(start) == 0):
            return None
        if not _same_extent(loop.extent, extent):
            return None
    return [loop.var for loop in loops]


def _same_extent(extent: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
    if isinstance(extent, tirx.IntImm) and isinstance(other, tirx.IntImm):
        return int(extent) == int(other)
    return tvm_ffi.structural_equal(extent, other)


def _product(axes: _Axes, arguments: Sequence[relax.Expr], emit: Callable) -> relax.Expr:
    """Return a contraction as a product of stacks of matrices."""
    a, b = arguments
    extents = {
        var: extent
        for argument, loops in ((a, axes.a), (b, axes.b))
        for var, extent in zip(loops, argument.ty.shape.values, strict=True)
    }
    groups = axes.stacked, axes.rows, axes.summed, axes.columns
    stacked, rows, summed, columns = groups

    def matrix(
        operand: relax.Expr, loops: Sequence[tirx.Var], left: list, right: list
    ) -> relax.Expr:
        operand = _permuted(operand, loops, [*stacked, *left, *right], emit)
        if len(left) == len(right) == 1:
            return operand
        shape = [*(extents[axis] for axis in stacked), _size(left, extents), _size(right, extents)]
        return emit(relax.op.reshape(operand, shape))

    product = relax.op.matmul(matrix(a, axes.a, rows, summed), matrix(b, axes.b, summed, columns))
    order = [*stacked, *rows, *columns]
    is_plain = len(rows) == len(columns) == 1
    if not is_plain:
        product = relax.op.reshape(emit(product), [extents[axis] for axis in order])
    if order == axes.c:
        return product
    return relax.op.permute_dims(emit(product), [order.index(axis) for axis in axes.c])


def _permuted(
    operand: relax.Expr, loops: Sequence[tirx.Var], order: Sequence[tirx.Var], emit: Callable
) -> relax.Expr:
    if list(loops) == list(order):
        return operand
    places = [list(loops).index(axis) for axis in order]
    return emit(relax.op.permute_dims(operand, places))


def _size(loops: Sequence[tirx.Var], extents: dict) -> tirx.PrimExpr:
    """Return the product of extents."""
    size: tirx.PrimExpr = tirx.IntImm("int64", 1)
    for axis in loops:
        size = size * extents[axis]
    return size
