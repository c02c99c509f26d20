"""The ranges of indices that reach a function from its parameters, and the check of values against
them.

A parameter reaches an index through casts, shapes, slices, paddings, offsets, and selections such
as for ignored targets. Elements that take another way, such as a computation or a mask, are
not known to be indices: they have no range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax, tirx

from .compat import Analyzer, constant_value, dtype_of

#: Operators that keep all elements and their values.
_SHAPES = frozenset(
    f"relax.{name}"
    for name in ("reshape", "expand_dims", "squeeze", "permute_dims", "flatten", "broadcast_to")
)


@dataclass(frozen=True)
class IndexRange:
    """The range of the elements of a parameter that are indices.

    An element ``v`` selects the element ``v + shift`` of an axis. It must be below its extent, and
    at least 0, or minus the extent if negative indices count from the end.

    Attributes
    ----------
    input : str
        The name of the parameter.
    extent : int or str
        The extent of the indexed axis; the name of a symbolic one.
    from_end : bool
        Whether negative indices count from the end.
    shift : int
        The number that the function adds to an element.
    ignored : tuple[int, ...]
        Further values that an element may have.
    slices : tuple[tuple[int, int, int], ...]
        The elements that are indices, along each axis: the first one, the number of elements after
        the last one, and the step. Empty for all elements.
    """

    input: str
    extent: int | str
    from_end: bool = False
    shift: int = 0
    ignored: tuple[int, ...] = ()
    slices: tuple[tuple[int, int, int], ...] = ()

    def check(self, values: np.ndarray, symbols: Mapping[str, int], remedy: str = "") -> None:
        """Raise IndexError with the first element out of range.

        Parameters
        ----------
        values : np.ndarray
            The parameter.
        symbols : Mapping[str, int]
            The symbolic extents by their names.
        remedy : str
            The end of the error's text.
        """
        extent = symbols[self.extent] if isinstance(self.extent, str) else self.extent
        low, high = (-extent if self.from_end else 0) - self.shift, extent - self.shift
        bounds = zip(self.slices, values.shape, strict=False)
        part = values[tuple(slice(a, max(n - b, 0), step) for (a, b, step), n in bounds)]
        if not part.size or (low <= int(part.min()) and int(part.max()) < high):
            return
        wrong = (part < low) | (part >= high)
        for ignored in self.ignored:
            wrong &= part != ignored
        if not wrong.any():
            return
        place = [int(i) for i in np.argwhere(wrong)[0]]
        value = int(part[tuple(place)])
        for axis, (first, _, step) in enumerate(self.slices):
            place[axis] = first + step * place[axis]
        name = f"{self.input}[{', '.join(map(str, place))}]" if place else self.input
        wanted = f"must be from {low} to {high - 1}" if low < high else "cannot be an index"
        others = "".join(f" or the ignored {value}" for value in self.ignored)
        raise IndexError(
            f"{name} is {value}, but it selects one of {extent} elements, and "
            f"{wanted}{others}{remedy}"
        )


@dataclass(frozen=True)
class _Part:
    """The elements of a parameter that a variable holds, with ``shift`` added.

    While ``axes`` is not None, axis ``i`` of the variable has the elements ``first + step * k`` of
    axis ``i`` of the parameter; those that the parameter does not have are a padding.
    """

    input: str
    whole: tuple
    axes: tuple[tuple[int, int], ...] | None
    slices: tuple[tuple[int, int, int], ...] = ()
    shift: int = 0
    ignored: tuple[int, ...] = ()
    #: Whether negative values select nothing, where negative indices count from the end.
    is_positive: bool = False
    #: Whether negative values count from the end already.
    is_wrapped: bool = False

    def fixed(self, kind: relax.TensorType) -> _Part | None:
        """Return the part for a variable with other axes; None if the slices depend on symbolic
        extents."""
        if self.axes is None:
            return self
        analyzer, slices = Analyzer(), []
        for (first, step), extent, whole in zip(
            self.axes, kind.shape.values, self.whole, strict=True
        ):
            behind = analyzer.simplify(whole - 1 - first - (extent - 1) * step)
            if not isinstance(behind, tirx.IntImm):
                return None
            begin = first if first >= 0 else first - first // step * step
            slices.append((begin, max(int(behind), 0), step))
        is_whole = all(step == (0, 0, 1) for step in slices)
        return replace(self, axes=None, slices=() if is_whole else tuple(slices))


def index_ranges(
    module: tvm.IRModule, name: str, inputs: Collection[str]
) -> tuple[IndexRange, ...]:
    """Return the ranges of the elements of a function's parameters that it uses as indices, or as
    classes.

    Parameters
    ----------
    module : tvm.IRModule
        The module.
    name : str
        The name of the function.
    inputs : Collection[str]
        The names of the parameters.

    Returns
    -------
    ranges : tuple[IndexRange, ...]
        The ranges, without repetition. Indices within the branches of a conditional have none.
    """
    function, known = module[name], {}
    for param in function.params:
        if param.name in inputs and _holds_integers(param.ty):
            shape = tuple(param.ty.shape.values)
            known[param] = _Part(param.name, shape, ((0, 1),) * len(shape))
    return tuple(dict.fromkeys(_ranges(module, function, known))) if known else ()


def _holds_integers(kind: relax.Type) -> bool:
    return (
        isinstance(kind, relax.TensorType)
        and kind.shape is not None
        and kind.dtype is not None
        and dtype_of(kind).startswith(("int", "uint"))
    )


def _ranges(
    module: tvm.IRModule, function: relax.Function, known: Mapping[relax.Var, _Part]
) -> Iterator[IndexRange]:
    """Yield the ranges of a function, some of whose parameters are parts."""
    parts, values = dict(known), {}
    blocks = function.body.blocks[:] if isinstance(function.body, relax.SeqExpr) else []
    for binding in (binding for block in blocks for binding in block.bindings[:]):
        variable, value = binding.var, binding.value
        values[variable] = value
        if isinstance(value, relax.Var) and value in parts:
            parts[variable] = parts[value]
        if not isinstance(value, relax.Call):
            continue
        args = value.args[:]
        operand_parts = [parts.get(arg) if isinstance(arg, relax.Var) else None for arg in args]
        if not any(operand_parts):
            continue
        if isinstance(value.op, relax.GlobalVar):
            callee = module[value.op.name_hint]
            if isinstance(callee, relax.Function):
                pairs = zip(callee.params, operand_parts, strict=True)
                yield from _ranges(module, callee, {p: part for p, part in pairs if part})
        elif isinstance(value.op, tvm.ir.Op):
            yield from _uses(value, operand_parts)
            yield from _tested(value, operand_parts[0])
            passed = _passed(variable, value, operand_parts, values)
            if passed is not None:
                parts[variable] = passed


def _uses(call: relax.Call, parts: list[_Part | None]) -> Iterator[IndexRange]:
    """Yield the ranges of the parts that a call uses as indices."""
    name, index = call.op.name, parts[1] if len(parts) > 1 else None
    ignored: tuple[int, ...] = ()
    if index is None:
        return
    data, from_end = call.args[0].ty, True
    if name == "relax.take" and call.attrs.mode in ("fast", "nan"):
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
        from_end = call.attrs.mode == "fast"
    elif name in ("relax.gather_elements", "relax.scatter_elements"):
        axis = int(call.attrs.axis)
    elif name == "relax.scatter_nd" and _is_one(call.args[1].ty.shape.values[-1]):
        axis = 0
    elif name == "relax.nn.nll_loss":
        axis, from_end = min(data.ndim - 1, 1), False
        ignored = (int(call.attrs.ignore_index) - index.shift,)
    else:
        return
    part = index.fixed(call.args[1].ty)
    if part is None or data.shape is None:
        return
    extent = data.shape.values[axis]
    if isinstance(extent, tirx.IntImm | tirx.Var):
        yield IndexRange(
            part.input,
            int(extent) if isinstance(extent, tirx.IntImm) else extent.name,
            part.is_wrapped or (from_end and not part.is_positive),
            shift=part.shift,
            ignored=(*part.ignored, *ignored),
            slices=part.slices,
        )


def _tested(call: relax.Call, part: _Part | None) -> Iterator[IndexRange]:
    """Yield the range of an index of one of several axes: joined, they are compared with their
    extents."""
    extent = _integer(call.args[1]) if call.op.name == "relax.greater_equal" else None
    if part is None or extent is None or not part.is_wrapped:
        return
    part = part.fixed(call.args[0].ty)
    if part is not None:
        yield IndexRange(
            part.input, extent, True, shift=part.shift, ignored=part.ignored, slices=part.slices
        )


def _passed(
    variable: relax.Var,
    call: relax.Call,
    parts: list[_Part | None],
    values: Mapping[relax.Var, relax.Expr],
) -> _Part | None:
    """Return the part that the result of a call is; None if it is another value."""
    name, args = call.op.name, call.args[:]
    if name == "relax.where":
        return _selected(args, parts, values)
    if name in ("relax.add", "relax.subtract"):
        part, offset = parts[0], _integer(args[1])
        if name == "relax.add" and part is None:
            part, offset = parts[1], _integer(args[0])
        if part is None or offset is None or part.is_positive or part.is_wrapped:
            return None
        if variable.ty.ndim != args[0 if part is parts[0] else 1].ty.ndim:
            return None
        return replace(part, shift=part.shift + (offset if name == "relax.add" else -offset))
    part = parts[0]
    if part is None:
        return None
    if name == "relax.astype":
        return part if _holds_integers(variable.ty) else None
    if name in _SHAPES:
        return part.fixed(args[0].ty)
    if part.axes is None:
        return None
    if name == "relax.strided_slice":
        return _sliced(part, call)
    if name == "relax.nn.pad" and call.attrs.pad_mode == "constant":
        before = [int(width) for width in call.attrs.pad_width][::2]
        pairs = zip(part.axes, before, strict=True)
        return replace(part, axes=tuple((first - step * n, step) for (first, step), n in pairs))
    return None


def _sliced(part: _Part, call: relax.Call) -> _Part | None:
    _, axes, begins, _, *rest = call.args[:]
    moved, starts = _numbers(axes), _numbers(begins)
    if part.axes is None or moved is None or starts is None:
        return None
    steps = _numbers(rest[0]) if rest else [1] * len(moved)
    if steps is None:
        return None
    new_axes = list(part.axes)
    for axis, begin, step in zip(moved, starts, steps, strict=True):
        if begin < 0 or step < 1:
            return None
        first, inner = new_axes[axis]
        new_axes[axis] = first + inner * begin, inner * step
    return replace(part, axes=tuple(new_axes))


def _selected(args: list, parts: list[_Part | None], values: Mapping) -> _Part | None:
    """Return the part of ``where`` with a condition on the values of a part, such as for
    ignored targets."""
    test = values.get(args[0]) if isinstance(args[0], relax.Var) else args[0]
    if not isinstance(test, relax.Call) or not isinstance(test.op, tvm.ir.Op):
        return None
    operand, bound = test.args[0], _integer(test.args[1]) if len(test.args) > 1 else None
    kept = 1 if test.op.name == "relax.not_equal" else 2
    part = parts[kept]
    if bound is None or part is None or not args[kept].same_as(operand):
        return None
    if test.op.name in ("relax.equal", "relax.not_equal"):
        return replace(part, ignored=(*part.ignored, bound - part.shift))
    if test.op.name != "relax.less" or bound != 0 or part.is_positive or part.is_wrapped:
        return None
    other = values.get(args[1]) if isinstance(args[1], relax.Var) else args[1]
    if isinstance(other, relax.Call) and other.op.name == "relax.add" and parts[1] is not None:
        return replace(part, is_wrapped=True)
    return replace(part, is_positive=True) if parts[1] is None else None


def _is_one(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _integer(expr: relax.Expr) -> int | None:
    """Return the value of a constant integer without axes; None for all others."""
    value = constant_value(expr)
    return (
        int(value) if value is not None and value.size == 1 and value.dtype.kind in "iu" else None
    )


def _numbers(expr: relax.Expr) -> list[int] | None:
    """Return the integers of a tuple; None if one is unknown."""
    if not isinstance(expr, relax.Tuple):
        return None
    values = [getattr(field, "value", field) for field in expr.fields]
    is_known = all(isinstance(value, int | tirx.IntImm) for value in values)
    return [int(value) for value in values] if is_known else None
