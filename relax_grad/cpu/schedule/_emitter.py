"""The base classes of the generators of loops, over elements and for reductions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.ir import Op

from ...ir.compat import Analyzer, BufferLoad, loaded_buffer, structural_map, structural_walk
from ...ir.expressions import substitute, variable_rule
from ..target import CPU
from ._access import Accesses
from ._functions import as_arithmetic, calls_in, has_functions, is_arithmetic, kept
from ._fuse import Group
from ._halves import bits_of_rounded, rounds
from ._identities import arguments_of
from ._nest import Axis, Nest, product, simplify
from ._selections import selected_loads, selections, with_selections

#: Functions that LLVM supports on vectors.
_VECTOR_CALLS = {
    f"tirx.{name}"
    for name in ("exp", "log", "sqrt", "fabs", "floor", "ceil", "reinterpret", "shift_left")
}


class Elementwise:
    """A generator of the computation of an element of each result of a group over flat buffers.

    Parameters
    ----------
    group : Group
        The group, as returned by :func:`._fuse.flat`.
    """

    def __init__(self, group: Group):
        group = replace(group, nests=[with_selections(nest) for nest in group.nests])
        self.group = group
        self.first: Nest = group.nests[0]
        self.axes: Sequence[Axis] = self.first.axes
        self.read = [{loaded_buffer(load) for load in nest.loads} for nest in group.nests]
        self.selected = [selected_loads(nest) for nest in group.nests]

    def element(
        self,
        at: dict,
        result: tirx.PrimExpr | None = None,
        loaded: dict | None = None,
        known: Analyzer | None = None,
        stored: dict | None = None,
    ) -> None:
        """Emit the computation of one element.

        Parameters
        ----------
        at : dict
            The values of the axes.
        result : tirx.PrimExpr, optional
            The result of the reduction, if the first nest is one.
        loaded : dict, optional
            Values that replace loads.
        known : Analyzer, optional
            An analyzer that simplifies values.
        stored : dict, optional
            For some buffers, another buffer and the index there to store to.
        """
        values, elsewhere = dict(loaded or {}), stored or {}
        is_last, results = self.group.stores_last, []
        for i, nest in enumerate(self.group.nests):
            is_sum = result is not None and i == 0
            for load in () if is_sum else self.selected[i]:
                if load not in values and loaded_buffer(load) not in values:
                    here = at_place(load, at, {})
                    simple = None if known is None else simplify(here, known)
                    values[load] = T.Bind(here if simple is None else simple)
            value = result if is_sum else at_place(nest.value, at, values)
            simple = None if known is None else simplify(value, known)
            value = value if simple is None else simple
            value = value if is_sum else self.arithmetic(value)
            if is_last or any(nest.buffer in later for later in self.read[i + 1 :]):
                values[nest.buffer] = value = self.keep(value)
            if nest.buffer in elsewhere:
                buffer, index = elsewhere[nest.buffer]
                results.append((buffer, value, [index]))
            elif nest.buffer in self.group.stored:
                results.append((nest.buffer, value, [substitute(i, at) for i in nest.indices]))
            if not is_last:
                _store(results)
        _store(results)

    def arithmetic(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return a value as the processor computes it; statements before it compute some."""
        return value

    def keep(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Emit a statement that computes a value, and return the value."""
        return T.Bind(value)


class Emitter(Elementwise):
    """A generator of the loops of a group over flat buffers.

    Parameters
    ----------
    group : Group
        The group, as returned by :func:`._fuse.flat`.
    cpu : CPU
        The target CPU.
    """

    def __init__(self, group: Group, cpu: CPU):
        super().__init__(group)
        self.cpu = cpu
        self.accesses = Accesses(self.group.nests)

    def is_vector(self, number: int) -> bool:
        """Tell whether TVM vectorises the value of a nest of the group, without branches."""
        nest = self.group.nests[number]
        value = nest.value
        if any(nest.buffer in later for later in self.read[number + 1 :]) and _casts(value, "bool"):
            return False  # TVM fails on a variable whose value is the cast of a vector of booleans
        return (
            is_vectorisable(value)
            and not any(map(is_arithmetic, calls_in(value)))
            and len(self.selected[number]) == len(selections(value))
        )

    def lanes(self, dtype: str) -> int:
        """Return the number of elements of a dtype that a vector register holds."""
        size = max(2, tvm_ffi.dtype(str(dtype)).bits // 8)
        return max(2, self.cpu.lanes * 4 // size)

    def arithmetic(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return a value with functions and roundings as arithmetic; statements before it compute
        some."""
        if rounds(value):
            (argument,) = arguments_of(value)
            return bits_of_rounded(self.keep(as_arithmetic(argument)))
        return as_arithmetic(value)

    def keep(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        return (kept if has_functions(value) else T.Bind)(value)

    @contextlib.contextmanager
    def loops(
        self, axes: Sequence[Axis], parallel: bool = False, at: dict | None = None
    ) -> Iterator[dict]:
        """Open loops and yield the values of the axes; with ``parallel``, the outer axes are one
        parallel loop.

        ``at`` holds the values of the axes of the enclosing loops.
        """
        together = self._outer(axes) if parallel else []
        at = dict(at or {})
        with contextlib.ExitStack() as stack:
            if together:
                rest = stack.enter_context(T.parallel(0, product([a.extent for a in together])))
                for axis in together[:0:-1]:
                    at[axis.var] = T.Bind(rest % axis.extent)
                    rest = T.Bind(rest // axis.extent)
                at[together[0].var] = rest
            for axis in axes[len(together) :]:
                at[axis.var] = stack.enter_context(T.serial(0, substitute(axis.extent, at)))
            yield at

    def _outer(self, axes: Sequence[Axis]) -> list[Axis]:
        """Return the outermost axes, enough of them to give each core several tasks.

        At most the first one is symbolic: the indices are quotients by the extents of the others,
        and a symbolic extent may be 0.
        """
        count = 1
        outer: list[Axis] = []
        for axis in axes:
            if outer and (axis.size is None or count >= 8 * self.cpu.cores):
                break
            outer.append(axis)
            count *= axis.size or 1
        return outer


def _store(results: list) -> None:
    """Emit the stores of buffers, values and indices, and clear the list."""
    for buffer, value, indices in results:
        T.buffer_store(buffer, value, indices)
    results.clear()


def at_place(expr: tirx.PrimExpr, at: dict, known: dict) -> tirx.PrimExpr:
    """Return an expression at given values of the axes, with known values in place of loads."""

    def load(old: tirx.PrimExpr) -> tirx.PrimExpr:
        return known.get(old, known.get(loaded_buffer(old), old))

    rules = [(BufferLoad, load), (tirx.Var, variable_rule(at))]
    return structural_map(expr, rules, order="pre")


def _casts(expr: tirx.PrimExpr, dtype: str) -> bool:
    """Tell whether an expression casts a value of a dtype."""
    casts: list[tirx.Cast] = []
    structural_walk(expr, (tirx.Cast, casts.append))
    return any(str(node.value.ty.dtype) == dtype for node in casts)


def is_vectorisable(expr: tirx.PrimExpr) -> bool:
    """Tell whether TVM vectorises an expression: all calls are arithmetic functions or have vector
    forms."""
    return all(
        is_arithmetic(call) or (isinstance(call.op, Op) and call.op.name in _VECTOR_CALLS)
        for call in calls_in(expr)
    )
