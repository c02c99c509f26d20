"""What a function of tensor expressions computes: one nest of loops for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range

from .._compat import Analyzer, BufferLoad, SBlockRealize, loaded_buffer

_REDUCED = tirx.IterVar.CommReduce

#: What two partial results of a reduction are combined with.
_COMBINERS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min, tirx.And, tirx.Or)


@dataclass(frozen=True)
class Axis:
    """A variable that runs from 0 to an extent."""

    var: tirx.Var
    extent: tirx.PrimExpr

    @property
    def size(self) -> int | None:
        """The extent; None where it is symbolic."""
        return int(self.extent) if isinstance(self.extent, tirx.IntImm) else None


@dataclass(frozen=True)
class Nest:
    """The loops that compute one tensor: ``buffer[indices] = value`` for each element of the axes.

    Attributes
    ----------
    axes : Sequence[Axis]
        The loops, in the order of the tensor's axes.
    buffer : tirx.Buffer
        What is computed.
    indices : Sequence[tirx.PrimExpr]
        Where.
    value : tirx.PrimExpr
        The value; of a reduction, the term that is combined with what has been found.
    reduced : Sequence[Axis]
        The loops of a reduction.
    combine : Callable, optional
        Combines two values of a reduction.
    init : tirx.PrimExpr, optional
        What a reduction begins with.
    """

    axes: Sequence[Axis]
    buffer: tirx.Buffer
    indices: Sequence[tirx.PrimExpr]
    value: tirx.PrimExpr
    reduced: Sequence[Axis] = ()
    combine: Callable | None = None
    init: tirx.PrimExpr | None = None

    @property
    def loads(self) -> list:
        """What is read."""
        return loads(self.value)


def nests_of(function: tirx.PrimFunc) -> tuple[list[Nest], list[tirx.Buffer]] | None:
    """Return the nests of a function and the buffers that it allocates.

    None where a part of the function is something else: an opaque block, a reduction of several values at
    once, buffers that are not rows in memory, or tensors of bfloat16: TVM makes other arithmetic of theirs
    later, which what is emitted of nests does not stand (erf gave 0, and types disagreed).
    """
    realize = function.body
    if not isinstance(realize, SBlockRealize) or realize.iter_values:
        return None
    root = realize.block
    buffers = [param for param in function.params if is_buffer(param)]
    buffers += root.alloc_buffers
    if not all(_is_compact(buffer) and str(buffer.dtype) != "bfloat16" for buffer in buffers):
        return None
    parts = root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]
    nests = [_nest(part) for part in parts]
    return None if None in nests else (nests, list(root.alloc_buffers))


def is_buffer(param: tirx.Var) -> bool:
    """Tell whether a parameter is a tensor, not a number."""
    return isinstance(param.ty, tirx.buffer.BufferType)


def _is_compact(buffer: tirx.Buffer) -> bool:
    offset = buffer.elem_offset
    is_first = offset is None or (isinstance(offset, tirx.IntImm) and int(offset) == 0)
    return not buffer.strides and is_first


def _nest(statement: tirx.Stmt) -> Nest | None:
    """Return the nest that a statement is, if it is one."""
    extents = {}
    while isinstance(statement, tirx.For):
        if statement.kind != tirx.ForKind.SERIAL or not is_zero(statement.min):
            return None
        extents[statement.loop_var] = statement.extent
        statement = statement.body
    if not isinstance(statement, SBlockRealize):
        return None
    block = statement.block
    if not isinstance(block.body, tirx.BufferStore) or block.alloc_buffers or block.match_buffers:
        return None
    if not (isinstance(statement.predicate, tirx.IntImm) and int(statement.predicate)):
        return None
    axes, reduced = [], []
    for iteration, value in zip(block.iter_vars, statement.iter_values, strict=True):
        if not is_zero(iteration.dom.min):
            return None
        if isinstance(value, tirx.Var):
            if value not in extents:
                return None
            extents.pop(value)
        elif not (is_zero(value) and is_one(iteration.dom.extent)):
            return None
        axis = Axis(iteration.var, iteration.dom.extent)
        (reduced if iteration.iter_type == _REDUCED else axes).append(axis)
    if extents:
        return None
    store = block.body
    if not reduced:
        return None if block.init else Nest(axes, store.buffer, store.indices, store.value)
    return _reduction(axes, reduced, store, block.init)


def _reduction(axes, reduced, store, init) -> Nest | None:
    """Return the nest of a reduction to one value."""
    if not isinstance(init, tirx.BufferStore) or not isinstance(store.value, _COMBINERS):
        return None
    known, term = store.value.a, store.value.b
    if not _is_load_of(known, store):
        known, term = term, known
    if not _is_load_of(known, store) or any(
        loaded_buffer(load).same_as(store.buffer) for load in loads(term)
    ):
        return None
    combine = type(store.value)
    return Nest(axes, store.buffer, store.indices, term, reduced, combine, init.value)


def _is_load_of(value, store) -> bool:
    return (
        isinstance(value, BufferLoad)
        and loaded_buffer(value).same_as(store.buffer)
        and tvm_ffi.structural_equal(value.indices, store.indices)
    )


def is_zero(value) -> bool:
    """Tell whether something is the number 0."""
    return isinstance(value, tirx.IntImm) and int(value) == 0


def is_one(value) -> bool:
    """Tell whether something is the number 1."""
    return isinstance(value, tirx.IntImm) and int(value) == 1


# Expressions


def loads(expr: tirx.PrimExpr) -> list:
    """Return the loads in an expression, those in the indices of others included."""
    found = []
    tvm_ffi.structural_walk(expr, (BufferLoad, found.append))
    return found


def variables(expr: tirx.PrimExpr) -> set[tirx.Var]:
    """Return the variables in an expression."""
    found = set()
    tvm_ffi.structural_walk(expr, (tirx.Var, found.add))
    return found


def substitute(expr: tirx.PrimExpr, values: Mapping[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return an expression with values for variables."""
    return tvm_ffi.structural_map(expr, (tirx.Var, variable_rule(values)), order="pre")


def variable_rule(values: Mapping[tirx.Var, tirx.PrimExpr]) -> Callable:
    """Return what replaces a variable by its value, in the dtype of the variable."""

    def replaced(var):
        value = values.get(var)
        if value is None:
            return var
        dtype = str(var.ty.dtype)
        return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)

    return replaced


def product(extents: Sequence[tirx.PrimExpr]):
    """Return the product of extents, 1 of none."""
    return reduce(lambda a, b: a * b, extents, tirx.IntImm("int64", 1))


def analyzer(axes: Sequence[Axis]) -> Analyzer:
    """Return what knows the ranges of axes."""
    known = Analyzer()
    for axis in axes:
        known.bind(axis.var, Range(0, axis.extent))
    return known


def simplified(nest: Nest) -> Nest:
    """Return a nest with simple indices, those of extent 1 being 0."""
    known = analyzer([*nest.axes, *nest.reduced])
    value = simplify(nest.value, known)
    return replace(
        nest,
        indices=[known.simplify(index) for index in nest.indices],
        value=nest.value if value is None else value,
    )


def simplify(expr: tirx.PrimExpr, known: Analyzer) -> tirx.PrimExpr | None:
    """Return an expression that TVM has simplified; None where it fails to.

    It does where it finds a division by 0, even one that is never done, and where it compares integers of two
    dtypes.
    """
    try:
        return known.simplify(expr)
    except (tvm.error.InternalError, TypeError):
        return None
