"""Reads the calls of a compiled function of Relax, and places its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx

from ..ir.compat import constant_value, dtype_of
from ._places import Slot, place
from .plan import ARENA, CONSTANTS, Call, Function, Move, Tensor, aligned, bytes_of


class Entry(NamedTuple):
    """A function of a module to plan.

    Attributes
    ----------
    name : str
        Its name.
    arguments : tuple[str or tuple[str, ...], ...]
        The names of its parameters, and of the fields of parameters that are tuples. Names of
        tensors of the state are those; others are inputs.
    updates : tuple[tuple[str, ...], ...]
        The tensors of the state whose new values are the last fields of the result.
    """

    name: str
    arguments: tuple[str | tuple[str, ...], ...]
    updates: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class _InArena:
    """A tensor of the arena whose place is not known yet, or a view of one."""

    shape: tuple[int, ...]
    dtype: str
    slot: Slot

    def placed(self) -> Tensor:
        return Tensor(self.shape, self.dtype, ARENA, self.slot.offset)


class Constants:
    """The bytes of constants, each once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._known: dict[tuple, Tensor] = {}

    def tensor(self, array: np.ndarray, dtype: str) -> Tensor:
        """Return the place of a constant."""
        data = np.ascontiguousarray(array).tobytes()
        key = (array.shape, dtype, data)
        if key not in self._known:
            self._known[key] = Tensor(tuple(array.shape), dtype, CONSTANTS, len(self.data))
            self.data += data + bytes(aligned(max(1, len(data))) - len(data))
        return self._known[key]


#: Functions of the virtual machine that check types, or have nothing to do in a plan.
_IGNORED = frozenset(
    {
        "vm.builtin.check_tensor_info",
        "vm.builtin.check_tuple_info",
        "vm.builtin.check_prim_value_info",
        "vm.builtin.check_shape_info",
        "vm.builtin.match_shape",
        "vm.builtin.match_prim_value",
        "vm.builtin.null_value",
        "relax.null_value",
        "relax.vm.alloc_storage",
        "relax.vm.kill_object",
    }
)

#: The number of the other calls that a plan understands.
_ALLOCATION, _RESHAPE = "relax.vm.alloc_tensor", "vm.builtin.reshape"


def read(
    module: tvm.IRModule, entry: Entry, state: Mapping[str, Tensor], constants: Constants
) -> Function:
    """Return the plan of a function, whose kernels have the names in the module.

    Parameters
    ----------
    module : tvm.IRModule
        The module after the last pass of the pipeline.
    entry : Entry
        The function.
    state : Mapping[str, Tensor]
        The tensors of the state by name.
    constants : Constants
        Gets the function's constants.

    Raises
    ------
    ValueError
        If the function is no list of calls of kernels.
    """
    return _Reader(module, entry, state, constants).read()


class _Reader:
    def __init__(
        self, module: tvm.IRModule, entry: Entry, state: Mapping[str, Tensor], constants: Constants
    ):
        self._module, self._entry, self._state, self._constants = module, entry, state, constants
        self._slots: list[Slot] = []
        self._inputs: dict[str, _InArena] = {}
        self._values: dict[relax.Var, Any] = {}
        self._calls: list[tuple[str, list]] = []

    def read(self) -> Function:
        function = self._module[self._entry.name]
        for parameter, names in zip(function.params, self._entry.arguments, strict=True):
            self._values[parameter] = self._argument(names, parameter.ty)
        for block in function.body.blocks:
            for binding in block.bindings:
                self._values[binding.var] = self._value(binding.value)
        returned, moves = self._results(self._value(function.body.body))
        self._set_lifetimes([*returned, *(source for source, _ in moves)])
        arena = place(self._slots)
        return Function(
            self._entry.name,
            tuple((name, value.placed()) for name, value in self._inputs.items()),
            tuple(Call(name, tuple(map(_placed, values))) for name, values in self._calls),
            results=tuple(map(_placed, returned)),
            moves=tuple(Move(_placed(source), target) for source, target in moves),
            arena=arena,
            workspace=0,
        )

    def _argument(self, names: str | tuple[str, ...], ty: relax.Type) -> Any:
        if not isinstance(names, str):
            return [self._argument(name, part) for name, part in zip(names, ty.fields, strict=True)]
        if names in self._state:
            return self._state[names]
        self._inputs[names] = value = self._in_arena(_shape(ty.shape), dtype_of(ty))
        value.slot.use(0)
        return value

    def _in_arena(self, shape: tuple[int, ...], dtype: str) -> _InArena:
        slot = Slot(bytes_of(shape, dtype))
        self._slots.append(slot)
        return _InArena(shape, dtype, slot)

    def _results(self, result: Any) -> tuple[list, list[tuple[Any, Tensor]]]:
        """Return the results for the caller, and the new values of tensors of the state that have
        another place."""
        fields = result if isinstance(result, list) else [result]
        count = len(fields) - len(self._entry.updates)
        moves = []
        for names, values in zip(self._entry.updates, fields[count:], strict=True):
            for name, value in zip(names, values, strict=True):
                if value is not self._state[name]:
                    moves.append((value, self._state[name]))
        self._check_order(moves)
        return list(_leaves(fields[:count])), moves

    def _check_order(self, moves: Sequence[tuple[Any, Tensor]]) -> None:
        """Refuse moves, which run one after another, of tensors of the state that others change."""
        changed = {(target.area, target.offset) for _, target in moves}
        for source, target in moves:
            if isinstance(source, Tensor) and (source.area, source.offset) in changed:
                names = {tensor.offset: name for name, tensor in self._state.items()}
                raise self._refused(
                    f"gives {names[target.offset]} the value of {names[source.offset]}, which it "
                    "changes too; compute the new value instead of exchanging tensors of the state"
                )

    def _set_lifetimes(self, results: Sequence) -> None:
        """Note the moments at which each tensor is used: 0 are the inputs, and the last one is
        after all calls.

        The virtual machine's releases say less: a storage is released before its tensors.
        """
        for moment, (_, arguments) in enumerate(self._calls, start=1):
            for value in arguments:
                if isinstance(value, _InArena):
                    value.slot.use(moment)
        for value in results:
            if isinstance(value, _InArena):
                value.slot.use(len(self._calls) + 1)

    def _value(self, expr: relax.Expr) -> Any:
        if isinstance(expr, relax.Var):
            return self._values[expr]
        if isinstance(expr, relax.Tuple):
            return [self._value(part) for part in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.If):
            raise self._refused(
                "has a branch at run time; a plan needs the same calls for every batch: choose the "
                "branch before the export, or compute both sides and select by relax.op.where"
            )
        constant = constant_value(expr)
        if constant is not None:
            return self._constants.tensor(constant, dtype_of(expr.ty))
        if isinstance(expr, relax.Call):
            return self._called(expr)
        return _number(expr)

    def _called(self, call: relax.Call) -> Any:
        if isinstance(call.op, tvm.ir.GlobalVar):
            return self._kernel(call)
        name = str(getattr(call.op, "name", None) or getattr(call.op, "global_symbol", call.op))
        if name in _IGNORED:
            return None
        if name == _ALLOCATION:
            return self._in_arena(_shape(call.args[2]), _dtype(call.args[3]))
        if name == _RESHAPE:
            return _reshaped(self._value(call.args[0]), _shape(call.args[1]))
        if name == "vm.builtin.alloc_shape_heap":
            raise self._refused(
                "computes extents at run time; a plan needs extents that are known before"
            )
        raise self._refused(
            f"calls the packed function {name}, which is no kernel; a plan can only call compiled "
            "functions: replace the operator, or export with TVM's runtime by leaving out "
            'runtime="none"'
        )

    def _kernel(self, call: relax.Call) -> None:
        name = call.op.name_hint
        if not isinstance(self._module[call.op], tirx.PrimFunc):
            raise self._refused(
                f"calls the function {name} of Relax, as a loop at run time does; unroll it before "
                "the export"
            )
        self._calls.append((name, [self._value(argument) for argument in call.args]))

    def _refused(self, reason: str) -> ValueError:
        return ValueError(f'runtime="none": the function {self._entry.name} {reason}')


def _leaves(values: Sequence) -> Iterator:
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value)
        else:
            yield value


def _placed(value: Any) -> Any:
    return value.placed() if isinstance(value, _InArena) else value


def _shape(shape: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in shape.values)


def _dtype(expr: relax.Expr) -> str:
    return str(expr.value)


def _number(expr: relax.Expr) -> int | float | None:
    """Return the value of a number; None for other expressions, which calls of kernels lack."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    return float(expr) if isinstance(expr, tirx.FloatImm) else None


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, _InArena):
        return _InArena(shape, value.dtype, value.slot)
    return Tensor(shape, value.dtype, value.area, value.offset)
