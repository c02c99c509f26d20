"""Parsing of tensor expression functions into loop nests, one for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range

from ...ir.compat import (
    Analyzer,
    BufferLoad,
    SBlock,
    SBlockRealize,
    loaded_buffer,
    structural_map,
    structural_walk,
)
from ...ir.conditions import with_named_conditions
from ...ir.expressions import loads, substitute, variables
from ...ir.floats import with_guarded_floats, without_guards
from ...ir.int64 import int64_index, with_int64_indices
from ...ir.module import is_buffer
from ._dependence import are_disjoint, is_pure
from ._integers import with_folding_integers

_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce

#: The maximum number of loads and variables of an expression after its ``Let`` values are inlined.
_LARGEST = 400

#: The operations that combine two partial results of a reduction.
_COMBINERS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min, tirx.And, tirx.Or)


@dataclass(frozen=True)
class Axis:
    """A variable that runs from 0 to an extent."""

    var: tirx.Var
    extent: tirx.PrimExpr

    @property
    def size(self) -> int | None:
        """The extent, or None if it is symbolic."""
        return int(self.extent) if isinstance(self.extent, tirx.IntImm) else None


def size_of(axes: Iterable[Axis]) -> int | None:
    """Return the number of iterations of axes, or None if an extent is symbolic."""
    size = 1
    for axis in axes:
        if axis.size is None:
            return None
        size *= axis.size
    return size


@dataclass(frozen=True)
class Nest:
    """The loops that compute one tensor: ``buffer[indices] = value`` for each element of the axes.

    Attributes
    ----------
    axes : Sequence[Axis]
        The loops, in the order of the tensor's axes.
    buffer : tirx.Buffer
        The tensor that is written.
    indices : Sequence[tirx.PrimExpr]
        The indices of the element that is written.
    value : tirx.PrimExpr
        The value; in a reduction, the term that is combined with the partial result.
    reduced : Sequence[Axis]
        The loops of a reduction.
    combine : Callable, optional
        The operation that combines two values of a reduction.
    init : tirx.PrimExpr, optional
        The initial value of a reduction.
    """

    axes: Sequence[Axis]
    buffer: tirx.Buffer
    indices: Sequence[tirx.PrimExpr]
    value: tirx.PrimExpr
    reduced: Sequence[Axis] = ()
    combine: Callable | None = None
    init: tirx.PrimExpr | None = None

    @cached_property
    def loads(self) -> list:
        """The loads of the value."""
        return loads(self.value)

    @cached_property
    def operands(self) -> frozenset[tirx.Buffer]:
        """The tensors that are read."""
        return frozenset(map(loaded_buffer, self.loads))


def nests_of(function: tirx.PrimFunc) -> tuple[list[Nest], list[tirx.Buffer]] | None:
    """Return the nests of a function and the buffers that it allocates.

    The iterations of each nest are independent, except in a reduction.

    Returns
    -------
    parts : tuple[list[Nest], list[tirx.Buffer]] or None
        None if a part of the function has another form, if the independence of its iterations
        cannot be proved, or if a buffer is not contiguous.
    """
    parts = sections_of(function)
    if parts is None or not all(isinstance(section, Nest) for section in parts[0]):
        return None
    return parts


def sections_of(
    function: tirx.PrimFunc,
) -> tuple[list[Nest | tirx.Stmt], list[tirx.Buffer]] | None:
    """Return the nests of a function and its other statements, in order, and the buffers that it
    allocates.

    Returns
    -------
    parts : tuple[list[Nest | tirx.Stmt], list[tirx.Buffer]] or None
        None if a buffer is not contiguous, or a statement has other effects than loads and stores
        of the buffers.
    """
    realize = function.body
    if not isinstance(realize, SBlockRealize) or realize.iter_values:
        return None
    root = realize.block
    if root.match_buffers or root.init is not None:
        return None
    buffers = [param for param in function.params if is_buffer(param)]
    buffers += root.alloc_buffers
    if not all(map(_is_row, buffers)):
        return None
    sections = [_wide(_nest(part)) or _without_names(part) for part in parts_of(root.body)]
    if None in sections:
        return None
    written: set[tirx.Buffer] = set()
    read: set[tirx.Buffer] = set()
    for section in sections:
        if isinstance(section, Nest):
            written.add(section.buffer)
            read |= section.operands
        elif is_plain(section):
            written |= stored(section)
            read |= set(map(loaded_buffer, loads(section)))
        else:
            return None
    if not written | read <= set(buffers) or not (read - written).isdisjoint(root.alloc_buffers):
        return None
    return sections, list(root.alloc_buffers)


def is_plain(statement: tirx.Stmt) -> bool:
    """Tell whether a statement consists of serial loops, conditions, bindings and blocks with loads
    and stores."""
    parts: list = []
    structural_walk(statement, (tirx.Stmt, parts.append))
    return is_pure(statement) and all(
        isinstance(part, _PLAIN) and _is_simple(part) for part in parts
    )


_PLAIN = (
    *(tirx.For, tirx.IfThenElse, tirx.SeqStmt, tirx.Bind, tirx.BufferStore, tirx.Evaluate),
    *(SBlockRealize, SBlock),
)


def _is_simple(statement: tirx.Stmt) -> bool:
    if isinstance(statement, tirx.For):
        step = getattr(statement, "step", None)
        is_serial = statement.kind == tirx.ForKind.SERIAL and statement.thread_binding is None
        return is_serial and (step is None or is_one(step))
    if isinstance(statement, SBlock):
        return not statement.alloc_buffers and not statement.match_buffers
    return getattr(statement, "predicate", None) is None or isinstance(statement, SBlockRealize)


def stored(statement: tirx.Stmt) -> set[tirx.Buffer]:
    """Return the buffers that a statement writes to."""
    stores: list[tirx.BufferStore] = []
    structural_walk(statement, (tirx.BufferStore, stores.append))
    return {store.buffer for store in stores}


def parts_of(body: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements of a sequence; a single statement counts as a sequence of one."""
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _is_row(buffer: tirx.Buffer) -> bool:
    """Tell whether a buffer is contiguous, starts at offset 0 and holds scalar numbers of a
    supported dtype."""
    offset = buffer.elem_offset
    is_first = offset is None or (isinstance(offset, tirx.IntImm) and int(offset) == 0)
    is_number = str(buffer.dtype).rstrip("0123456789") in ("float", "bfloat", "int", "uint", "bool")
    is_scalar = tvm.DataType(str(buffer.dtype)).lanes == 1
    return not buffer.strides and is_first and is_number and is_scalar


def loops_of(statement: tirx.Stmt) -> tuple[list[Axis], list[Axis], tirx.Stmt] | None:
    """Return the spatial axes, the reduced axes and the block of a loop nest.

    The axes are in the order of the block. They have the extents of the loops: a loop may be
    shorter than the domain of its axis.

    Returns
    -------
    loops : tuple[list[Axis], list[Axis], SBlock] or None
        None unless the loops are serial loops from 0 around one block, and each loop variable is
        the value of one axis.
    """
    loops: dict[tirx.Var, tirx.PrimExpr] = {}
    while isinstance(statement, tirx.For):
        if statement.kind != tirx.ForKind.SERIAL or not is_zero(statement.min):
            return None
        step = getattr(statement, "step", None)
        if statement.thread_binding is not None or not (step is None or is_one(step)):
            return None
        loops[statement.loop_var] = statement.extent
        statement = statement.body
    if not isinstance(statement, SBlockRealize):
        return None
    block = statement.block
    if not (isinstance(statement.predicate, tirx.IntImm) and int(statement.predicate)):
        return None
    at: dict[tirx.Var, tirx.Var] = {}
    for iteration, value in zip(block.iter_vars, statement.iter_values, strict=True):
        if not is_zero(iteration.dom.min) or iteration.iter_type not in (_SPATIAL, _REDUCED):
            return None
        if isinstance(value, tirx.Var):
            if value not in loops or value in at:
                return None
            at[value] = iteration.var
        elif not (is_zero(value) and is_one(iteration.dom.extent)):
            return None
    if len(at) != len(loops):
        return None
    extents = {at[var]: substitute(extent, at) for var, extent in loops.items()}
    axes: list[Axis] = []
    reduced: list[Axis] = []
    for iteration in block.iter_vars:
        extent = extents.get(iteration.var, iteration.dom.extent)
        if str(extent.ty.dtype) != str(iteration.var.ty.dtype):
            return None
        (reduced if iteration.iter_type == _REDUCED else axes).append(Axis(iteration.var, extent))
    own = {axis.var for axis in axes}
    # The extent of a reduction may depend on the element; all other extents must be independent of
    # the axes.
    if any(own & variables(axis.extent) for axis in axes) or any(
        variables(axis.extent) & {reduction.var for reduction in reduced}
        for axis in (*axes, *reduced)
    ):
        return None
    return axes, reduced, block


def _nest(statement: tirx.Stmt) -> Nest | None:
    """Return a statement as a nest, or None if it has another form or dependent iterations."""
    loops = loops_of(statement)
    if loops is None:
        return None
    axes, reduced, block = loops
    store = block.body
    if not isinstance(store, tirx.BufferStore) or block.alloc_buffers or block.match_buffers:
        return None
    if getattr(store, "predicate", None) is not None or not is_pure(store):
        return None
    if not are_disjoint([store.indices], axes) or any(map(loads, store.indices)):
        return None
    value = _without_names(store.value)
    if value is None:
        return None
    value = with_folding_integers(value)
    if reduced:
        return _reduction(axes, reduced, store, value, block.init)
    if block.init or not all(
        tvm_ffi.structural_equal(list(load.indices), list(store.indices))
        for load in loads(value)
        if loaded_buffer(load).same_as(store.buffer)
    ):
        return None
    return Nest(axes, store.buffer, store.indices, value)


def _wide(nest: Nest | None) -> Nest | None:
    """Return a nest with axes of int64 instead of int32, the dtype of indices of flat
    buffers."""
    if nest is None:
        return None
    axes = [*nest.axes, *nest.reduced]
    if all(str(axis.var.ty.dtype) == "int64" for axis in axes):
        return nest
    names = {axis.var: tirx.Var(axis.var.name, "int64") for axis in axes}
    known = Analyzer()
    wide_axes = {}
    for axis in axes:
        extent = int64_index(axis.extent, names, known)
        wide_axes[axis.var] = Axis(names[axis.var], extent)
        known.bind(names[axis.var], Range(0, extent))
    return replace(
        nest,
        axes=[wide_axes[axis.var] for axis in nest.axes],
        indices=[int64_index(index, names, known) for index in nest.indices],
        value=with_int64_indices(nest.value, names, known),
        reduced=[wide_axes[axis.var] for axis in nest.reduced],
    )


def _reduction(
    axes: list[Axis],
    reduced: list[Axis],
    store: tirx.BufferStore,
    value: tirx.PrimExpr,
    init: tirx.Stmt | None,
) -> Nest | None:
    """Return the nest of a reduction, or None if it has another form."""
    if not isinstance(init, tirx.BufferStore) or not isinstance(value, _COMBINERS):
        return None
    is_same = init.buffer.same_as(store.buffer) and tvm_ffi.structural_equal(
        list(init.indices), list(store.indices)
    )
    own = {axis.var for axis in reduced}
    if not is_same or any(own & variables(index) for index in store.indices):
        return None
    if loads(init.value) or variables(init.value) or not is_pure(init.value):
        return None
    known, term = value.a, value.b
    if not _is_load_of(known, store):
        known, term = term, known
    if not _is_load_of(known, store) or any(
        loaded_buffer(load).same_as(store.buffer) for load in loads(term)
    ):
        return None
    return Nest(
        axes,
        store.buffer,
        store.indices,
        value=term,
        reduced=reduced,
        combine=type(value),
        init=init.value,
    )


def _without_names(expr: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """Return an expression with its ``Let`` values inlined, or None if the result is too large.

    A variable may be defined only once, but the emitted loops contain a value several times.
    """
    values = {}

    def body(let: tirx.Let) -> tirx.PrimExpr:
        values[let.var] = let.value
        return let.body

    expr = structural_map(expr, (tirx.Let, body))
    while not variables(expr).isdisjoint(values):
        expr = substitute(expr, values)
        if _size(expr) > _LARGEST:
            return None
    return expr


def _size(expr: tirx.PrimExpr) -> int:
    """Return the number of loads and variables in an expression."""
    nodes: list[tirx.PrimExpr] = []
    structural_walk(expr, ((BufferLoad, tirx.Var), nodes.append))
    return len(nodes)


def _is_load_of(value: tirx.PrimExpr, store: tirx.BufferStore) -> bool:
    return (
        isinstance(value, BufferLoad)
        and loaded_buffer(value).same_as(store.buffer)
        and tvm_ffi.structural_equal(value.indices, store.indices)
    )


def is_zero(value: tirx.PrimExpr) -> bool:
    """Tell whether an expression is the integer constant 0."""
    return isinstance(value, tirx.IntImm) and int(value) == 0


def is_one(value: tirx.PrimExpr) -> bool:
    """Tell whether an expression is the integer constant 1."""
    return isinstance(value, tirx.IntImm) and int(value) == 1


# Expressions


def product(extents: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return the product of extents; the empty product is 1."""
    return reduce(lambda a, b: a * b, extents, tirx.IntImm("int64", 1))


def analyzer(axes: Sequence[Axis]) -> Analyzer:
    """Return an analyzer with the ranges of axes."""
    known = Analyzer()
    for axis in axes:
        known.bind(axis.var, Range(0, axis.extent))
    return known


def simplified(nest: Nest) -> Nest:
    """Return a nest with simplified indices and value; axes of extent 1 become 0."""
    known = analyzer([*nest.axes, *nest.reduced])
    value = simplify(nest.value, known)
    return replace(
        nest,
        indices=[known.simplify(index) for index in nest.indices],
        value=nest.value if value is None else value,
    )


def simplify(expr: tirx.PrimExpr, known: Analyzer) -> tirx.PrimExpr | None:
    """Return an expression simplified by TVM, except its floating-point operations, or None if TVM
    fails.

    TVM fails on a division by 0, even one that is never executed, on a comparison of integers of
    two dtypes, and on the cast of a constant to an integer dtype that cannot represent it.
    """
    expr, named = with_named_conditions(with_guarded_floats(expr))
    try:
        expr = known.simplify(expr)
        for variable, condition in reversed(named):
            expr = substitute(expr, {variable: known.simplify(condition)})
    except (tvm.error.InternalError, TypeError, ValueError):
        return None
    return without_guards(expr)
