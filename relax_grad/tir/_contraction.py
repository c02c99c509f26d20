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
from .program import is_float, parse


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
        return [each for each in self.c if each in self.a and each in self.b]

    @property
    def rows(self) -> list[tirx.Var]:
        return [each for each in self.c if each not in self.b]

    @property
    def columns(self) -> list[tirx.Var]:
        return [each for each in self.c if each not in self.a]

    @property
    def summed(self) -> list[tirx.Var]:
        return [each for each in self.a if each not in self.c]

    @property
    def are_of_a_contraction(self) -> bool:
        """Whether each loop indexes at least two of the tensors, and some loop is summed over."""
        places = [*self.a, *self.b, *self.c]
        return bool(self.summed) and all(places.count(each) >= 2 for each in places)


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
    if program.allocated or not all(is_float(str(each.dtype)) for each in program.inputs):
        return None
    found = [nest for part in program.parts for nest in nests(part.statement) or [None]]
    if len(found) != 2 or None in found:
        return None
    (output,) = program.outputs
    first, second = found
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
    if not all(isinstance(each, BufferLoad) for each in factors):
        return None
    if not loaded_buffer(factors[0]).same_as(inputs[0]):
        factors.reverse()
    if not all(loaded_buffer(each).same_as(one) for each, one in zip(factors, inputs, strict=True)):
        return None
    found = [
        _loops(nest, indices, tensor)
        for indices, tensor in (
            *((each.indices, loaded_buffer(each)) for each in factors),
            (item.indices, output),
        )
    ]
    if None in found or len({var for vars in found for var in vars}) != len(nest.loops):
        return None
    return _Axes(*found)


def _only(nest: Nest, kind: str, output: tirx.Var) -> Item | None:
    """Return the only store of a nest, if it is of a kind, has no condition, and writes to the
    result."""
    (item, *others) = nest.items
    is_such = not others and item.kind == kind and not item.guards and item.buffer.same_as(output)
    return item if is_such else None


def _loops(nest: Nest, indices: Sequence[tirx.PrimExpr], tensor: tirx.Var) -> list | None:
    """Return the loops that are the indices of a tensor, if they run over its whole extents, each
    over one."""
    ranges = {each.var: each for each in nest.loops}
    found = [ranges.get(index) if isinstance(index, tirx.Var) else None for index in indices]
    if None in found or len(set(indices)) != len(found):
        return None
    for each, extent in zip(found, tensor.shape, strict=True):
        start = each.start
        if not (isinstance(start, tirx.IntImm) and int(start) == 0):
            return None
        if not _same_extent(each.extent, extent):
            return None
    return [each.var for each in found]


def _same_extent(one: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
    if isinstance(one, tirx.IntImm) and isinstance(other, tirx.IntImm):
        return int(one) == int(other)
    return tvm_ffi.structural_equal(one, other)


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
        shape = [*(extents[each] for each in stacked), _size(left, extents), _size(right, extents)]
        return emit(relax.op.reshape(operand, shape))

    found = relax.op.matmul(matrix(a, axes.a, rows, summed), matrix(b, axes.b, summed, columns))
    order = [*stacked, *rows, *columns]
    is_plain = len(rows) == len(columns) == 1
    if not is_plain:
        found = relax.op.reshape(emit(found), [extents[each] for each in order])
    if order == axes.c:
        return found
    return relax.op.permute_dims(emit(found), [order.index(each) for each in axes.c])


def _permuted(
    operand: relax.Expr, loops: Sequence[tirx.Var], order: Sequence[tirx.Var], emit: Callable
) -> relax.Expr:
    if list(loops) == list(order):
        return operand
    places = [list(loops).index(each) for each in order]
    return emit(relax.op.permute_dims(operand, places))


def _size(loops: Sequence[tirx.Var], extents: dict) -> tirx.PrimExpr:
    """Return the product of extents."""
    size: tirx.PrimExpr = tirx.IntImm("int64", 1)
    for each in loops:
        size = size * extents[each]
    return size
