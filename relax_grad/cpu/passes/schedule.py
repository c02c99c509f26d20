"""Schedules of tensor functions that are no kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.tirx.buffer import BufferType

from ...errors import ScheduleWarning
from ...ir.aliases import is_name, leaves, named_by
from ...ir.bindings import bindings_of
from ...ir.compat import dtype_of, replace_attrs, structural_map, structural_walk
from ...ir.divisions import with_checked_divisions
from ...ir.floats import with_guards
from ...ir.loops import with_canonical_loops
from ...ir.module import IS_SCHEDULED, NO_ALIASES, SCHEDULED_ATTRS
from ...ir.remainders import with_truncated_remainders
from ...ir.shared_values import with_shared_arguments
from ..schedule import schedule
from ..target import CPU
from ._target import TargetPass


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ScheduleLoops")
class ScheduleLoops(TargetPass):
    """Schedule the loops of every function of tensor expressions that is not scheduled yet.

    Loops are reordered, parallelised and vectorised only if their dependences are known to allow
    it. Other loops stay as they are. A function also stays as it is if a call passes one tensor for
    two parameters and the function writes to one of them. If there is no such call, all functions
    are marked with ``noalias``.

    The functions rely only on the alignment of the elements, because a tensor of PyTorch may begin
    anywhere.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        The target of the compilation; by default the current target. If LLVM does not compile for
        the target, the pass leaves the module unchanged.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import target, transform
    >>> x = relax.Var("x", relax.TensorType((8, 16), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         y = bb.emit(relax.op.exp(bb.emit(relax.op.sin(x))))
    ...         z = bb.emit_output(relax.op.tanh(y))
    ...     _ = bb.emit_func_output(z)
    >>> module = relax.transform.LegalizeOps()(bb.get())
    >>> module = transform.ScheduleLoops(target.x86_64("v3", 2))(module)
    >>> bool(module["tir_exp"].attrs["tirx.is_scheduled"])
    True
    """

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        return _with_schedules(mod, cpu, _unaligned_schedule)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ScheduleLoops")
class DeclareSchedules(TargetPass):
    """A variant of :class:`ScheduleLoops` that declares the scheduled functions, which are made
    later.

    Parameters
    ----------
    target : tvm.target.Target
        The target of the compilation.
    declare : Callable
        Takes a function without a schedule, a callable that returns the scheduled function, and a
        description of the other inputs of the schedule; returns the declaration.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        declare: Callable[[tirx.PrimFunc, Callable[[], tirx.PrimFunc], str], tirx.PrimFunc],
    ):
        super().__init__(target)
        self._declare = declare

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        return _with_schedules(mod, cpu, self._declared)

    def _declared(self, function: tirx.PrimFunc, cpu: CPU, name: str) -> tirx.PrimFunc:
        make = partial(_unaligned_schedule, function, cpu, name)
        return self._declare(function, make, f"schedule for {cpu}")


def _with_schedules(
    mod: tvm.IRModule, cpu: CPU, schedule_one: Callable[[tirx.PrimFunc, CPU, str], tirx.PrimFunc]
) -> tvm.IRModule:
    """Return a module whose functions of tensor expressions are scheduled and marked as
    scheduled."""
    aliased = _with_aliases(mod)
    functions = dict(mod.functions_items())
    for variable, function in functions.items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        if not _is_scheduled(function):
            function = with_canonical_loops(function)
            is_free = variable not in aliased
            function = (
                schedule_one(function, cpu, variable.name_hint)
                if is_free
                else _finished(function, variable.name_hint)
            )
            function = function.with_attrs(SCHEDULED_ATTRS)
        # LLVM code generation applies one assumption about aliases to all functions of a module.
        functions[variable] = function.with_attr(NO_ALIASES, not aliased)
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _unaligned_schedule(function: tirx.PrimFunc, cpu: CPU, name: str) -> tirx.PrimFunc:
    return _finished(_scheduled(function, cpu, name), name)


def _finished(function: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    function = with_shared_arguments(_unaligned(function))
    function = with_checked_divisions(with_truncated_remainders(function), name)
    return with_guards(function)


def _scheduled(function: tirx.PrimFunc, cpu: CPU, name: str) -> tirx.PrimFunc:
    """Return a scheduled function; if the scheduler fails, warn and return the function
    unchanged."""
    try:
        return schedule(function, cpu)
    # A user's function also compiles without a schedule, so no error of the scheduler may reach the
    # user.
    except Exception as error:
        warnings.warn(
            f"relax_grad could not schedule the tensor function {name}, which runs without a "
            f"schedule, in one thread; please report this: {type(error).__name__}: {error}",
            ScheduleWarning,
            stacklevel=2,
        )
        return function


def _with_aliases(mod: tvm.IRModule) -> set[GlobalVar]:
    """Return the tensor functions that write to a tensor and also take it as another parameter."""
    aliased: set[GlobalVar] = set()
    written: dict[GlobalVar, list[bool]] = {}
    for function in mod.functions.values():
        if not isinstance(function, relax.Function):
            continue
        names: dict[relax.Var, object] = {param: param for param in function.params}
        for binding in bindings_of(function.body):
            value = binding.value
            named = named_by(value, names) if is_name(value) else None
            names[binding.var] = binding.var if named is None else named
            callee, arguments = _called(value)
            if callee is None or not isinstance(mod[callee], tirx.PrimFunc):
                continue
            tensors = [leaves(names.get(argument)) for argument in arguments]
            owners = [parts[0] if len(parts) == 1 else None for parts in tensors]
            if len(set(owners)) == len(owners):
                continue
            if callee not in written:
                written[callee] = written_params(mod[callee])
            if any(
                is_written and owner is not None and owners.count(owner) > 1
                for owner, is_written in zip(owners, written[callee], strict=False)
            ):
                aliased.add(callee)
    return aliased


def _called(value: relax.Expr) -> tuple[GlobalVar | None, Sequence[relax.Expr]]:
    """Return the function of the module that a value calls, and its arguments.

    In a call of ``call_tir``, which may pass extents too, the callee is an argument of the
    operator.
    """
    if isinstance(value, relax.Call):
        if isinstance(value.op, GlobalVar):
            return value.op, value.args
        if (
            len(value.args) == 2
            and isinstance(value.args[0], GlobalVar)
            and isinstance(value.args[1], relax.Tuple)
        ):
            return value.args[0], value.args[1].fields
    return None, ()


def written_params(function: tirx.PrimFunc) -> list[bool]:
    """Tell for each parameter of a function whether the function writes to it."""
    stores: list[tirx.BufferStore] = []
    structural_walk(function.body, (tirx.BufferStore, stores.append))
    buffers = {store.buffer for store in stores}
    return [param in buffers for param in function.params]


def _is_scheduled(function: tirx.PrimFunc) -> bool:
    return function.attrs is not None and bool(function.attrs.get(IS_SCHEDULED, False))


def _unaligned(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function without TVM's assumption that tensors begin at multiples of 64 bytes."""

    def of_elements(kind: BufferType) -> BufferType:
        return replace_attrs(kind, data_alignment=max(1, tvm_ffi.dtype(dtype_of(kind)).itemsize))

    return structural_map(function, (BufferType, of_elements))
