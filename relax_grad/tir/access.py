"""The inverse of a load: which iterations of a nest read a given element.

A contribution to ``a[f(v)]`` in the iterations ``v`` is a scatter. If ``f`` can be inverted, the
same sum is a gather: each element ``j`` adds up the contributions of the iterations with
``f(v) = j``. A gather has no races, and every loop over the elements can run in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm_ffi
from tvm import tirx
from tvm.ir import Range as Interval

from ..ir.compat import Analyzer, detect_linear_equation
from ..ir.expressions import loads, substitute, variables
from .statements import Loop, cast, is_number


@dataclass(frozen=True)
class Range:
    """A variable of a loop, which runs over ``range(start, start + extent)``."""

    var: tirx.Var
    start: tirx.PrimExpr
    extent: tirx.PrimExpr

    @property
    def size(self) -> int | None:
        """The extent, or None if it is symbolic."""
        return int(self.extent) if isinstance(self.extent, tirx.IntImm) else None


@dataclass(frozen=True)
class Gather:
    """The iterations that read one element.

    Attributes
    ----------
    axes : tuple[Range, ...]
        The index of the element, a variable for each dimension.
    reduced : tuple[Range, ...]
        The loops that remain; their iterations are added up.
    values : dict[tirx.Var, tirx.PrimExpr]
        The values of the other loop variables.
    guards : tuple[tirx.PrimExpr, ...]
        The conditions under which these values are an iteration that reads the element.
    """

    axes: tuple[Range, ...]
    reduced: tuple[Range, ...]
    values: dict[tirx.Var, tirx.PrimExpr]
    guards: tuple[tirx.PrimExpr, ...]

    def analyzer(self) -> Analyzer:
        """Return an analyzer that knows the ranges of the element and of the remaining loops."""
        return _analyzer((*self.axes, *self.reduced))


def ranges_of(loops: Sequence[Loop]) -> list[Range] | None:
    """Return the ranges of loops, or None if the range of one depends on the variable of another,
    or on data."""
    own = {loop.var for loop in loops}
    for loop in loops:
        for expr in (loop.start, loop.extent):
            if own & variables(expr) or loads(expr):
                return None
    return [Range(loop.var, loop.start, loop.extent) for loop in loops]


def gather(
    indices: Sequence[tirx.PrimExpr], shape: Sequence[tirx.PrimExpr], loops: Sequence[Range]
) -> Gather | None:
    """Return the iterations that read an element; None if the indices cannot be inverted.

    Parameters
    ----------
    indices : Sequence[tirx.PrimExpr]
        The indices of the load, in terms of the variables of the loops.
    shape : Sequence[tirx.PrimExpr]
        The shape of the buffer.
    loops : Sequence[Range]
        The loops, whose ranges are independent of each other.
    """
    if any(loads(index) for index in indices):
        return None
    axes = tuple(
        Range(tirx.Var(f"j{i}", "int64"), tirx.IntImm("int64", 0), cast(extent, "int64"))
        for i, extent in enumerate(shape)
    )
    values = _reshaped(indices, axes, loops)
    if values is not None:
        return Gather(axes, (), values, ())
    split, parts = _without_divisions(indices, loops)
    inner = [substitute(index, parts) for index in indices]
    values = _solved(_simplified(inner, split), axes, split)
    if values is None:
        return None
    values.update({var: substitute(value, values) for var, value in parts.items()})
    analyzer = _analyzer(span for span in (*axes, *split) if span.var not in values)
    values = {var: analyzer.simplify(value) for var, value in values.items()}
    reduced = tuple(span for span in split if span.var not in values)
    guards: list[tirx.PrimExpr] = []
    for span in (*split, *loops):
        if span.var in values:
            value = values[span.var]
            guards += [value >= span.start, value < span.start + span.extent]
    for axis, index in zip(axes, indices, strict=True):
        guards.append(substitute(index, values) == tirx.Cast(_dtype(index), axis.var))
    needed: list[tirx.PrimExpr] = []
    for guard in guards:
        guard = analyzer.simplify(guard)
        if is_number(guard, 1) or analyzer.can_prove(guard):
            continue
        if not any(tvm_ffi.structural_equal(guard, other) for other in needed):
            needed.append(guard)
    return Gather(axes, reduced, values, tuple(needed))


def _reshaped(
    indices: Sequence[tirx.PrimExpr], axes: Sequence[Range], loops: Sequence[Range]
) -> dict[tirx.Var, tirx.PrimExpr] | None:
    """Return the values of the loop variables if the load enumerates all elements of the buffer in
    row-major order.

    That is a reshape: the position of the element in memory gives each variable by a division.
    """
    sizes = [span.size for span in (*axes, *loops)]
    is_known = bool(loops) and None not in sizes and all(is_number(x.start, 0) for x in loops)
    if not is_known or not _divisions(indices):
        return None
    dtype = _dtype(loops[0].var)
    position, own, stride = tirx.IntImm(dtype, 0), tirx.IntImm(dtype, 0), 1
    for index, axis in reversed(list(zip(indices, axes, strict=True))):
        factor = tirx.IntImm(dtype, stride)
        position = position + tirx.Cast(dtype, index) * factor
        own = own + tirx.Cast(dtype, axis.var) * factor
        stride *= axis.size
    (position,) = _simplified([position], loops)
    long = [loop for loop in loops if loop.size != 1]
    parts = detect_linear_equation(position, [loop.var for loop in long]) if long else []
    if not len(parts) or not all(isinstance(part, tirx.IntImm) for part in parts):
        return None
    factors = {loop: int(part) for loop, part in zip(long, parts[:-1], strict=True)}
    values, reached = {loop.var: loop.start for loop in loops if loop.size == 1}, 1
    for loop in sorted(long, key=lambda loop: factors[loop]):
        if factors[loop] != reached or loop.size is None:
            return None
        extent = tirx.IntImm(dtype, loop.size)
        value = tirx.FloorMod(tirx.FloorDiv(own, tirx.IntImm(dtype, reached)), extent)
        values[loop.var] = value
        reached *= loop.size
    if reached != stride or int(parts[-1]):
        return None
    analyzer = _analyzer(axes)
    return {
        var: analyzer.simplify(tirx.Cast(str(var.ty.dtype), value)) for var, value in values.items()
    }


def _divisions(indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
    divisions: list[tirx.PrimExpr] = []
    for index in indices:
        tvm_ffi.structural_walk(index, ((tirx.FloorDiv, tirx.FloorMod), divisions.append))
    return divisions


def _without_divisions(
    indices: Sequence[tirx.PrimExpr], loops: Sequence[Range]
) -> tuple[list[Range], dict[tirx.Var, tirx.PrimExpr]]:
    """Return loops with those split that indices divide, and the values of the variables that were
    split.

    A variable ``v`` of ``4 * q + r`` iterations has no division in ``v // 4`` and ``v % 4``.
    """
    left: list[Range] = list(loops)
    values: dict[tirx.Var, tirx.PrimExpr] = {}
    for node in _divisions(indices):
        for loop in loops:
            if loop.var in values or not isinstance(node.b, tirx.IntImm):
                continue
            divisor, size, dtype = int(node.b), loop.size, str(loop.var.ty.dtype)
            if size is None or not 1 < divisor < size or size % divisor:
                continue
            if not is_number(loop.start, 0) or not _is_term(node.a, loop.var):
                continue
            outer, inner = (tirx.Var(f"{loop.var.name}_{i}", dtype) for i in range(2))
            zero = tirx.IntImm(dtype, 0)
            place = left.index(loop)
            left[place : place + 1] = [
                Range(outer, zero, tirx.IntImm(dtype, size // divisor)),
                Range(inner, zero, tirx.IntImm(dtype, divisor)),
            ]
            values[loop.var] = outer * tirx.IntImm(dtype, divisor) + inner
    return left, values


def _is_term(expr: tirx.PrimExpr, var: tirx.Var) -> bool:
    """Tell whether an expression is linear in a variable, with the factor 1."""
    parts = detect_linear_equation(expr, [var])
    return len(parts) == 2 and is_number(parts[0], 1)


def _simplified(indices: Sequence[tirx.PrimExpr], loops: Sequence[Range]) -> list[tirx.PrimExpr]:
    analyzer = _analyzer(loops)
    return [analyzer.simplify(index) for index in indices]


def _analyzer(ranges: Iterable[Range]) -> Analyzer:
    """Return an analyzer that knows the ranges of variables."""
    analyzer = Analyzer()
    for span in ranges:
        analyzer.bind(span.var, Interval.from_min_extent(span.start, span.extent))
    return analyzer


#: The extent that is assumed for a symbolic one.
_UNKNOWN = 1 << 40


def _dtype(expr: tirx.PrimExpr) -> str:
    return str(expr.ty.dtype)


def _solved(
    indices: Sequence[tirx.PrimExpr], axes: Sequence[Range], loops: Sequence[Range]
) -> dict[tirx.Var, tirx.PrimExpr] | None:
    """Return values of loop variables for which the indices are a given element; None if that is
    not known.

    Each dimension that is linear in the variables determines one of them. The values are in terms
    of the element and of the variables without a value.
    """
    left = {loop.var: loop for loop in loops if loop.size != 1}
    values = {loop.var: loop.start for loop in loops if loop.size == 1}
    open_dims = list(range(len(indices)))
    while open_dims:
        solution = _next(indices, open_dims, left, values)
        if solution is None:
            break
        dim, solved = solution
        place = tirx.Cast(_dtype(indices[dim]), axes[dim].var)
        for var, value in solved(place).items():
            dtype = str(var.ty.dtype)
            value = value if _dtype(value) == dtype else tirx.Cast(dtype, value)
            values = {name: substitute(old, {var: value}) for name, old in values.items()}
            values[var] = value
            del left[var]
        open_dims.remove(dim)
    # The other dimensions are conditions, which are worth testing only if few iterations remain.
    for dim in open_dims:
        if variables(indices[dim]) & set(left):
            return None
    return values


def _next(
    indices: Sequence[tirx.PrimExpr],
    open_dims: Sequence[int],
    left: Mapping[tirx.Var, Range],
    values: Mapping[tirx.Var, tirx.PrimExpr],
) -> tuple[int, Callable[[tirx.PrimExpr], dict[tirx.Var, tirx.PrimExpr]]] | None:
    """Return a dimension, and a function from its index to the values of the variables that it
    determines.

    A dimension of one variable comes first. Variables like the digits of a number, as ``i`` and
    ``r < 2`` in ``2 * i + r``, are all determined; in other windows, it is the longest loop.
    """
    analyzer, best = Analyzer(), None
    for dim in open_dims:
        index = analyzer.simplify(substitute(indices[dim], values))
        own = [var for var in left if var in variables(index)]
        parts = detect_linear_equation(index, own) if own else []
        if not len(parts) or not all(isinstance(part, tirx.IntImm) for part in parts[:-1]):
            continue
        factors = [int(part) for part in parts[:-1]]
        rank, i = min(
            ((len(own), -(left[var].size or _UNKNOWN)), i)
            for i, var in enumerate(own)
            if factors[i]
        )
        if best is None or rank < best[0]:
            terms = [(factors[k], left[var]) for k, var in enumerate(own)]
            best = rank, (dim, partial(_determined, terms, i, parts[-1]))
    return best and best[1]


def _determined(
    terms: Sequence[tuple[int, Range]], chosen: int, offset: tirx.PrimExpr, place: tirx.PrimExpr
) -> dict[tirx.Var, tirx.PrimExpr]:
    """Return the values of variables for which ``offset`` and the terms add up to a place."""
    dtype = _dtype(place)

    def number(value: int) -> tirx.IntImm:
        return tirx.IntImm(dtype, value)

    digits = _digits(terms)
    if digits is not None:
        rest, values = place - offset, {}
        for factor, loop in digits:
            values[loop.var] = tirx.FloorDiv(rest, number(factor))
            rest = tirx.FloorMod(rest, number(factor))
        return values
    factor, loop = terms[chosen]
    others = [
        number(other) * tirx.Cast(dtype, own.var)
        for k, (other, own) in enumerate(terms)
        if k != chosen
    ]
    rest = place - sum(others, offset)
    if abs(factor) == 1:
        return {loop.var: rest if factor == 1 else -rest}
    return {loop.var: tirx.FloorDiv(rest, number(factor))}


def _digits(terms: Sequence[tuple[int, Range]]) -> list[tuple[int, Range]] | None:
    """Return several terms from the largest factor to the smallest, if each exceeds the sum of all
    smaller terms."""
    if len(terms) < 2 or not all(is_number(loop.start, 0) for _, loop in terms):
        return None
    ordered, reached = sorted(terms, key=lambda term: term[0]), 0
    for i, (factor, loop) in enumerate(ordered):
        if factor <= reached or (loop.size is None and i < len(ordered) - 1):
            return None
        reached += factor * ((loop.size or 1) - 1)
    return ordered[::-1]


def determines(index: tirx.PrimExpr, var: tirx.Var, inner: Sequence[Range]) -> bool:
    """Tell whether each value of an index has one value of a variable, whatever the
    inner loops do."""
    own = [loop for loop in inner if loop.var in variables(index)]
    parts = detect_linear_equation(index, [var, *(loop.var for loop in own)])
    if not len(parts) or not all(isinstance(part, tirx.IntImm) for part in parts[:-1]):
        return False
    factor, *others = (abs(int(part)) for part in parts[:-1])
    reached = 0
    for other, loop in zip(others, own, strict=True):
        if loop.size is None:
            return False
        reached += other * (loop.size - 1)
    return factor > reached


def renamed(ranges: Sequence[Range]) -> tuple[list[Range], dict[tirx.Var, tirx.Var]]:
    """Return the ranges with new variables, and the new variables by the old ones."""
    names = {span.var: tirx.Var(span.var.name, span.var.ty.dtype) for span in ranges}
    return [replace(span, var=names[span.var]) for span in ranges], names
