"""Propagation of divided axes through the bindings of a function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as own_op

from ...activity import holds_floats
from ...ir.bindings import used
from ...ir.compat import dtype_of, shapes_agree
from ...ir.module import tuple_fields, unused
from ..shards import check_extent
from ._emitter import Emitter
from ._labels import RULES, SHAPES, Axes
from ._layouts import Divided, as_int, is_equal, local_type, text

#: The layout of a value: of a tensor, None if all workers have the whole, or a list for the fields
#: of a tuple.
Layout = Divided | None | list


@dataclass
class Operand:
    """A tensor among the arguments of a call.

    Attributes
    ----------
    value : relax.Expr
        The worker's part, or the whole.
    kind : relax.TensorType
        The type of the whole tensor.
    layout : Divided or None
        How it is divided.
    name : str
        Its name in messages.
    """

    value: relax.Expr
    kind: relax.TensorType
    layout: Divided | None
    name: str


class Propagation:
    """The construction of one worker's bindings from a function of whole tensors.

    Attributes
    ----------
    num_workers : int
        The number of workers.
    emit : Emitter
        The bindings of the worker.

    Parameters
    ----------
    names : Iterable[str]
        The names of the function's variables, which new variables do not get.
    params : Sequence[relax.Var]
        The function's parameters.
    """

    def __init__(self, num_workers: int, names: Iterable[str], params: Sequence[relax.Var]):
        self.num_workers, self.emit, self._names = num_workers, Emitter(params), set(names)
        self._layouts: dict[relax.Var, Layout] = {}
        self._new: dict[relax.Var, relax.Var] = {}
        self._copies: dict[relax.Var, relax.Var] = {}
        self._slices: dict[tuple, relax.Var] = {}
        self._binding: relax.Binding | None = None

    def divide(self, variable: relax.Var, part: relax.Var, layout: Layout) -> None:
        """Take another variable for a worker's part of a variable."""
        self._new[variable], self._layouts[variable] = part, layout

    def _named(self, value: relax.Expr, name: str) -> relax.Var:
        """Bind a value to a variable with its own name."""
        name = unused(name, self._names)
        self._names.add(name)
        return self.emit(value, name)

    def layout(self, value: relax.Expr) -> Layout:
        """Return the layout of a variable; None for other expressions."""
        return self._layouts.get(value) if isinstance(value, relax.Var) else None

    def bind(self, binding: relax.Binding) -> None:
        """Add the bindings for one of whole tensors."""
        self._binding, value = binding, binding.value
        if isinstance(value, relax.If | relax.Function):
            variables = list(relax.analysis.free_vars(value))
        else:
            variables = used(value)
        divided = [variable for variable in variables if self._layouts.get(variable) is not None]
        if not divided:
            self.emit.bindings.append(binding)
        elif isinstance(binding, relax.MatchCast):
            self.refuse("match_cast", f"cannot take {self.described(divided[0])}")
        elif isinstance(value, relax.Var):
            self.divide(binding.var, self._new[value], self._layouts[value])
        elif isinstance(value, relax.Tuple):
            self._bind_tuple(binding.var, value)
        elif isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
            layouts = _of_tuple(self._layouts[value.tuple_value])
            field = relax.TupleGetItem(self._new[value.tuple_value], value.index)
            self.finish(binding.var, field, layouts[value.index] if layouts else None)
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            self._bind_call(binding.var, value, divided[0])
        else:
            what = "a conditional" if isinstance(value, relax.If) else "a call of a function"
            self.refuse(what, f"cannot take {self.described(divided[0])}")

    def refuse(self, what: str, reason: str) -> NoReturn:
        """Raise the error of a binding that cannot be propagated.

        Raises
        ------
        ValueError
            Always.
        """
        place = "" if self._binding is None else f" ({self._binding.var.name})"
        raise ValueError(f"TensorParallel: {what}{place}: {reason}")

    def described(self, variable: relax.Var) -> str:
        layout = self._layouts[variable]
        if isinstance(layout, Divided):
            return f"{variable.name}, whose axis {layout.axis} is divided among the workers"
        return f"{variable.name}, of which fields are divided among the workers"

    # Values

    def _bind_tuple(self, variable: relax.Var, value: relax.Tuple) -> None:
        layouts, fields = [], []
        for field in value.fields[:]:
            if isinstance(field, relax.Tuple):
                field = self.collected(field)
            layouts.append(self.layout(field))
            fields.append(self._new.get(field, field) if isinstance(field, relax.Var) else field)
        self.finish(variable, relax.Tuple(fields), layouts)

    def collected(self, value: relax.Expr) -> relax.Expr:
        """Return a result with whole tensors instead of divided ones."""
        layout = self.layout(value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self.collected(field) for field in value.fields[:]])
        if layout is None:
            return value
        if isinstance(layout, list):
            return relax.Tuple([self.collected(field) for field in self._fields(value)])
        return self._collected_tensor(value, layout)

    def _collected_tensor(self, value: relax.Var, layout: Divided) -> relax.Var:
        """Return the whole of a divided tensor: the sum of all parts, each at its place among
        zeros."""
        parts, size, at = as_int(layout.parts), as_int(layout.size), layout.axis
        own, extents = self._new[value], list(value.ty.shape.values)
        if parts is None or size is None or dtype_of(value.ty) == "bool":
            self.refuse(
                "a result",
                f"{self.described(value)} cannot be collected, because the extent of the axis is "
                "symbolic or the dtype is bool; end the divided computation by a row-parallel "
                "product",
            )
        whole = extents
        if parts > 1:
            before, behind = extents[:at], extents[at + 1 :]
            own = self.emit(op.reshape(own, [*before, parts, size, *behind]))
            whole, at = [*before, parts, self.num_workers * size, *behind], at + 1
        placed = own_op.redistribute_replica_to_shard_backward_input(
            own, whole, self.num_workers, at
        )
        total = self.emit(own_op.reduce_from_tensor_parallel(self.emit(placed)))
        return total if parts == 1 else self.emit(op.reshape(total, extents))

    def finish(self, variable: relax.Var, value: relax.Expr, layout: Layout) -> None:
        """Bind a result and check its type."""
        if layout is None or (isinstance(layout, list) and not any(layout)):
            value = relax.BlockBuilder().normalize(value)
            self._check_type(variable.ty, value.ty, None)
            self.emit.bindings.append(relax.VarBinding(variable, value))
            return
        part = self.emit(value, variable.name)
        self._check_type(variable.ty, part.ty, layout)
        self.divide(variable, part, layout)

    def _check_type(self, whole: relax.Type, actual: relax.Type, layout: Layout) -> None:
        if isinstance(whole, relax.TupleType):
            layouts = layout if isinstance(layout, list) else [None] * len(whole.fields)
            for field, own, how in zip(whole.fields[:], actual.fields[:], layouts, strict=True):
                self._check_type(field, own, how)
            return
        if not isinstance(whole, relax.TensorType):
            return
        wanted = local_type(whole, _of_tensor(layout))
        if not shapes_agree(actual, wanted) or dtype_of(actual) != dtype_of(wanted):
            self.refuse(
                "the result", f"its type on a worker should be {wanted}, but it is {actual}"
            )

    # Calls

    def _bind_call(self, variable: relax.Var, call: relax.Call, divided: relax.Var) -> None:
        name = call.op.name
        if name not in RULES and name not in SHAPES:
            self.refuse(
                name,
                f"there is no rule for the operator with {self.described(divided)}; leave the "
                "parameter whole, or end the divided computation before this operator by a "
                "row-parallel product",
            )
        arguments, operands = self._operands(call)
        kinds = [operand.kind for operand in operands]
        for operand in operands:
            if operand.kind.shape is None or not isinstance(operand.kind.shape, relax.ShapeExpr):
                self.refuse(
                    name, f"the shape of {operand.name} must be known, but it is {operand.kind}"
                )
        if name in SHAPES and SHAPES[name](self, variable, call, operands):
            return
        axes = RULES[name](call, kinds, variable.ty)
        label, layout = self.divided_label(name, axes, operands)
        if label in axes.whole:
            first = next(operand for operand in operands if operand.layout is not None)
            self.refuse(
                name,
                f"the operator needs axis {layout.axis} of {first.name} whole, but it is divided "
                "among the workers",
            )
        for i, (operand, labels) in enumerate(zip(operands, axes.operands, strict=True)):
            axis, own = self._axis_in(operand, labels, label, layout), layout
            repeats = axes.repeats.get((i, label), 1)
            if axis is not None and repeats > 1:
                own = self._shared(name, operand, axis, layout, repeats)
            operand.value = self.local(operand, axis, own)
        made = relax.Call(call.op, arguments(), call.attrs, call.ty_args, call.span)
        if label in axes.sums or label in axes.means:
            own = self._named(made, f"{variable.name}_part")
            self.finish(variable, self._reduced(own, label in axes.means), None)
            return
        layouts = [
            layout.moved(labels.index(label)) if label in labels else None
            for labels in axes.results
        ]
        self.finish(
            variable, made, layouts if isinstance(variable.ty, relax.TupleType) else layouts[0]
        )

    def _reduced(self, own: relax.Var, is_mean: bool) -> relax.Call:
        total = own_op.reduce_from_tensor_parallel(own)
        if not is_mean:
            return total
        share = relax.const(1.0 / self.num_workers, dtype_of(own.ty))
        return op.multiply(self.emit(total), share)

    def _operands(self, call: relax.Call) -> tuple[Callable[[], list[relax.Expr]], list[Operand]]:
        """Return a function that makes the arguments of a call again, and the tensors among
        them."""
        operands: list[Operand] = []

        def add(value: relax.Expr) -> Operand:
            layout = _of_tensor(self.layout(value))
            name = value.name if isinstance(value, relax.Var) else "a constant"
            own = self._new.get(value, value) if isinstance(value, relax.Var) else value
            operands.append(Operand(own, value.ty, layout, name))
            return operands[-1]

        plan: list[Operand | list[Operand] | relax.Expr] = []
        for argument in call.args[:]:
            if isinstance(argument.ty, relax.TensorType):
                plan.append(add(argument))
            elif isinstance(argument.ty, relax.TupleType) and any(
                isinstance(field, relax.TensorType) for field in argument.ty.fields[:]
            ):
                plan.append([add(field) for field in self._fields(argument)])
            else:
                plan.append(argument)

        def arguments() -> list[relax.Expr]:
            return [
                relax.Tuple([field.value for field in entry])
                if isinstance(entry, list)
                else entry.value
                if isinstance(entry, Operand)
                else entry
                for entry in plan
            ]

        return arguments, operands

    def _fields(self, value: relax.Expr) -> Sequence[relax.Expr]:
        """Return the fields of a tuple as variables with layouts."""
        if isinstance(value, relax.Tuple):
            return value.fields[:]
        layouts = _of_tuple(self.layout(value))
        if layouts is None:
            return [self.emit(field) for field in tuple_fields(value)]
        fields = []
        for i, layout in enumerate(layouts):
            whole = relax.Var(f"{value.name}_{i}", value.ty.fields[i])
            self.finish(whole, relax.TupleGetItem(self._new[value], i), layout)
            fields.append(whole)
        return fields

    def divided_label(
        self, name: str, axes: Axes, operands: list[Operand]
    ) -> tuple[Hashable, Divided]:
        """Return the label of the divided axis, and its layout."""
        label: Hashable = None
        layout: Divided | None = None
        first: Operand | None = None
        for i, (operand, labels) in enumerate(zip(operands, axes.operands, strict=True)):
            if operand.layout is None:
                continue
            own = labels[operand.layout.axis]
            of_label = operand.layout.repeated(axes.repeats.get((i, own), 1))
            if first is None or layout is None:
                label, layout, first = own, of_label, operand
            elif own != label:
                self.refuse(
                    name,
                    f"axis {layout.axis} of {first.name} and axis {operand.layout.axis} of "
                    f"{operand.name} are divided, which are different axes of the operator; a "
                    "worker would have a part of each only",
                )
            elif not of_label.is_like(layout):
                self.refuse(
                    name,
                    f"axis {layout.axis} of {first.name} is divided within "
                    f"{layout.parts} parts, but axis {operand.layout.axis} of {operand.name} "
                    f"within {operand.layout.parts}; annotate both with the same parts",
                )
        if layout is None:
            self.refuse(name, "no tensor among its operands is divided")
        return label, layout

    def _shared(
        self, name: str, operand: Operand, axis: int, layout: Divided, repeats: int
    ) -> Divided:
        """Return the layout of an operand of which several positions of the divided axis share
        one."""
        size = as_int(layout.size)
        if size is None or size % repeats:
            self.refuse(
                name,
                f"axis {axis} of {operand.name} has the extent "
                f"{text(operand.kind.shape.values[axis])}, "
                f"and {repeats} positions of the divided axis share one of them, so that the "
                f"{self.num_workers} workers must divide this extent; use fewer workers, or leave "
                "the parameters whole",
            )
        return Divided(axis, layout.parts, size // repeats)

    def _axis_in(
        self, operand: Operand, labels: Sequence, label: Hashable, layout: Divided
    ) -> int | None:
        """Return the axis of an operand with a label, or None if all positions of the label take
        the whole operand."""
        if label not in labels:
            return None
        axis = labels.index(label)
        is_one = as_int(operand.kind.shape.values[axis]) == 1
        return None if is_one and operand.layout is None else axis

    def local(self, operand: Operand, axis: int | None, layout: Divided) -> relax.Expr:
        """Return an operand of a computation that is divided along one of the operand's axes, or
        along none of them."""
        if operand.layout is not None:
            return operand.value
        if axis is None:
            return self.copy(operand.value)
        return self._slice(operand, axis, layout)

    def copy(self, value: relax.Expr) -> relax.Expr:
        """Return a tensor that all workers have, such that its gradient is the sum of all workers'
        parts."""
        if not isinstance(value, relax.Var) or not holds_floats(value.ty):
            return value
        if value not in self._copies:
            self._copies[value] = self._named(
                own_op.copy_to_tensor_parallel(value), f"{value.name}_copy"
            )
        return self._copies[value]

    def _slice(self, operand: Operand, axis: int, layout: Divided) -> relax.Var:
        """Return a worker's part of a tensor that all workers have."""
        name = "an operand" if self._binding is None else self._binding.value.op.name
        parts, size = as_int(layout.parts), as_int(layout.size)
        extents = list(operand.kind.shape.values)
        if not is_equal(extents[axis], layout.parts * self.num_workers * layout.size):
            self.refuse(
                name,
                f"axis {axis} of {operand.name} has the extent {text(extents[axis])}, but the "
                "divided axis of the other operand has "
                f"{text(layout.parts * self.num_workers * layout.size)}",
            )
        if parts is None or size is None:
            self.refuse(
                name,
                f"axis {axis} of {operand.name} would be divided into {layout.parts} parts, but "
                "a tensor that all workers have can be divided only into a constant number of "
                "parts",
            )
        key = (operand.value, axis, parts)
        if isinstance(operand.value, relax.Var) and key in self._slices:
            return self._slices[key]
        value, at = self.copy(operand.value), axis
        if parts > 1:
            spread = [*extents[:axis], parts, self.num_workers * size, *extents[axis + 1 :]]
            value, at = self.emit(op.reshape(value, spread)), axis + 1
        part = self.emit(op.distributed.redistribute_replica_to_shard(value, self.num_workers, at))
        if parts > 1:
            extents[axis] = parts * size
            part = self.emit(op.reshape(part, extents))
        if isinstance(operand.value, relax.Var):
            self._slices[key] = part
        return part


def _of_tensor(layout: Layout) -> Divided | None:
    """Return the layout of a tensor, which is no list."""
    if isinstance(layout, list):
        raise TypeError(f"a tensor has the layouts of the fields of a tuple: {layout}")
    return layout


def _of_tuple(layout: Layout) -> list[Layout] | None:
    """Return the layouts of the fields of a tuple, or None if all are whole."""
    if isinstance(layout, Divided):
        raise TypeError(f"a tuple has the layout of a tensor: {layout}")
    return layout


def divided_at(
    name: str, kind: relax.TensorType, axis: int, parts: int, num_workers: int
) -> Divided:
    """Return the layout of a parameter that is divided along an axis."""
    extent = as_int(kind.shape.values[axis])
    if extent is None:
        raise ValueError(
            f"{name}: axis {axis} must have a constant extent to be divided, but the type is {kind}"
        )
    check_extent(name, axis, extent, parts, num_workers)
    return Divided(axis, parts, extent // (parts * num_workers))
