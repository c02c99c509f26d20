"""The place where a trainer's functions are compiled for and run: the CPU, or a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from .._progress import shown
from .._validation import described
from ..cpu import programs
from ..cpu.pipeline import pipeline
from ..ir.module import with_only
from ..transform import PlainNames
from . import _export
from ._donation import donating
from ._feed import Feed
from ._moment import Call

#: The kinds of devices that a trainer takes, each with TVM's name of its target.
_KINDS = {"cuda": "cuda"}

#: An architecture of CUDA with the operations of half precision.
_ANY_ARCH = "sm_80"


class Place:
    """The CPU: compiles for a target, and runs on tensors of the host.

    Parameters
    ----------
    target : Target
        The target.
    options : Mapping or None
        Further arguments of ``tvm.compile``.
    """

    def __init__(self, target: tvm.target.Target, options: Mapping[str, object] | None):
        self.target, self.options = target, options

    def step(self, step: Any) -> tvm.runtime.Executable:
        """Return the executable of a ``TrainStep``."""
        return _export.compiled(step, self.target, self.options)

    def module(self, module: tvm.IRModule) -> tvm.runtime.Executable:
        """Return the executable of a module that does not train."""
        return programs.compiled(module, self.target, self.options)

    def machine(self, executable: tvm.runtime.Executable) -> Mapping[str, Callable]:
        """Return the functions of an executable by their names."""
        return relax.VirtualMachine(executable, tvm.cpu())

    def feed(self, ahead: int) -> Feed | None:
        """Return what lets so many steps begin before the results of the one before them are read;
        None if a step computes before it returns."""
        return None

    def goes_on(self, calls: Sequence[Call]) -> Sequence[tvm.runtime.Tensor]:
        """Return the last arguments of a step after the steps under way."""
        return ()

    def call(
        self, machine: Mapping[str, Callable], name: str, arguments: list, feed: Feed | None
    ) -> tuple[Callable, list]:
        """Return a compiled function, which no interrupt divides, and its arguments where it takes
        them."""
        return machine[name], arguments

    def groups(self, groups: Mapping[str, list]) -> dict[str, list]:
        """Return the tensors of a state where the functions take them."""
        return dict(groups)

    def for_export(self, target: Any) -> Any:
        """Return the target of an exported folder; None for the target of the trainer."""
        return target


class DevicePlace(Place):
    """A device: functions take its tensors, and tensors of the host are copied to it.

    Parameters
    ----------
    target, options
        As for :class:`Place`.
    device : tvm.Device
        The device.
    library : str or None
        The library that computes calls; see :class:`relax_grad.backend.DispatchLibrary`.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        options: Mapping[str, object] | None,
        device: Any,
        library: str | None = None,
    ):
        # Another pipeline may not write to the memory of arguments.
        self._donates = "relax_pipeline" not in (options or {})
        options = {"relax_pipeline": _scheduled(target), **(options or {})}
        super().__init__(target, options)
        self.device, self._library = device, library
        self._true = tvm.runtime.tensor(np.array(True), device)

    def step(self, step: Any) -> tvm.runtime.Executable:
        with shown(f"compiling the training step for {self.device}"):
            module = donating(step, is_chained=True) if self._donates else step.module
            return self.module(module, roots_of(step))

    def module(self, module: tvm.IRModule, roots: list[str] | None = None) -> Any:
        if tvm.transform.PassContext.current().config.get("relax.backend.use_cuda_graph", False):
            raise ValueError(
                "relax.backend.use_cuda_graph must be off: TVM launches a captured graph with the "
                "memory of its first arguments, whatever it is called with. Make the trainer "
                "outside of this PassContext"
            )
        module = prepared(module, roots, self._library)
        return tvm.compile(module, self.target, **(self.options or {}))

    def machine(self, executable: tvm.runtime.Executable) -> Mapping[str, Callable]:
        return _Machine(relax.VirtualMachine(executable, self.device), self._moved)

    def feed(self, ahead: int) -> Feed | None:
        # Other steps would change tensors after a step that is not finite.
        return Feed(self.device, ahead) if ahead and self._donates else None

    def goes_on(self, calls: Sequence[Call]) -> Sequence[tvm.runtime.Tensor]:
        if not self._donates:
            return ()
        return calls[-1].further if calls else [self._true]

    def call(
        self, machine: Mapping[str, Callable], name: str, arguments: list, feed: Feed | None
    ) -> tuple[Callable, list]:
        function = machine.function(name) if isinstance(machine, _Machine) else machine[name]
        if feed is not None:
            arguments = feed.staged(arguments)
        return function, list(map(self._moved, arguments))

    def groups(self, groups: Mapping[str, list]) -> dict[str, list]:
        return {name: list(map(self._moved, tensors)) for name, tensors in groups.items()}

    def for_export(self, target: Any) -> Any:
        """Return this processor by default: folders are for CPUs."""
        return _export.target_of(None) if target is None else target

    def _moved(self, value: Any) -> Any:
        """Return a tensor, or nested tensors, on the device."""
        if isinstance(value, tvm.runtime.Tensor):
            is_there = value.device == self.device
            return value if is_there else value.copyto(self.device)
        if isinstance(value, list | tuple | tvm_ffi.Array):
            return [self._moved(each) for each in value]
        return value


class _Machine(Mapping):
    """The functions of a virtual machine, which also take tensors of the host."""

    def __init__(self, machine: relax.VirtualMachine, moved: Callable):
        self._machine, self._moved = machine, moved

    def function(self, name: str) -> Callable:
        """Return a function that takes tensors of the device only."""
        return self._machine[name]

    def __getitem__(self, name: str) -> Callable:
        function = self._machine[name]
        return lambda *arguments: function(*map(self._moved, arguments))

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a virtual machine does not list its functions")

    def __len__(self) -> int:
        raise TypeError("a virtual machine does not count its functions")


def place_of(
    device: str | None,
    library: str | None,
    target: tvm.target.Target | str | Mapping | None,
    options: Mapping[str, object] | None,
) -> Place:
    """Return the place for the arguments of a trainer.

    Raises
    ------
    TypeError, ValueError
        If the device or the library is unknown, or the arguments do not go together.
    RuntimeError
        If TVM has no support for the device, or there is no such device.
    """
    if device is None or device == "cpu":
        if library is not None:
            raise ValueError(
                f'library is for a device, such as device="cuda", but it is {library!r} without '
                "one: on a CPU, the kernels of this package are faster"
            )
        made = _export.target_of(target)
        _export.check_runs_here(made)
        return Place(made, options)
    kind, number = _parts_of(device)
    if library is not None:
        from ..backend import DispatchLibrary

        DispatchLibrary(library)
    made = _present(kind, number)
    chosen = tvm.target.Target.from_device(made) if target is None else tvm.target.Target(target)
    if chosen.kind.name != _KINDS[kind]:
        raise ValueError(
            f'target must be of the kind {_KINDS[kind]} for device="{device}", but it is of the '
            f"kind {chosen.kind.name}; leave it out"
        )
    return DevicePlace(chosen.with_host("llvm"), options, made, library)


def _parts_of(device: object) -> tuple[str, int]:
    """Return the kind and the number of a device."""
    if not isinstance(device, str):
        raise TypeError(f'device must be "cpu", "cuda" or "cuda:1", but it is {described(device)}')
    kind, _, number = device.partition(":")
    if kind not in _KINDS or not (number.isdecimal() or device == kind):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:1", but it is {device!r}')
    return kind, int(number or 0)


def target_of(device: object) -> tvm.target.Target:
    """Return the target of a device to plan for: the plan of memory is the same for all devices of
    a kind, and needs none.

    Raises
    ------
    TypeError, ValueError
        If the device is unknown.
    """
    kind, _ = _parts_of(device)
    return tvm.target.Target({"kind": _KINDS[kind], "arch": _ANY_ARCH}, host="llvm")


def _present(kind: str, number: int) -> Any:
    """Return a device, or raise RuntimeError if TVM cannot use it."""
    if not tvm.runtime.enabled(kind):
        raise RuntimeError(
            f'device="{kind}" needs a TVM with support for {kind}, but this one has none or finds '
            "no driver: check that nvidia-smi lists a GPU, and that the libraries of CUDA that "
            "TVM was built with are installed; without a GPU, leave device out"
        )
    device = tvm.device(kind, number)
    if not device.exist:
        count = next(i for i in range(number + 1) if not tvm.device(kind, i).exist)
        raise RuntimeError(
            f'device="{kind}:{number}" does not exist: there are {count} such devices, from '
            f"{kind}:0; without a GPU, leave device out"
        )
    return device


def roots_of(step: Any) -> list[str]:
    """Return the names of the functions that a trainer calls."""
    names = ["step", "accumulate", *([] if step.forward is None else [step.forward.name])]
    known = {variable.name_hint for variable in step.module.get_global_vars()}
    return [name for name in names if name in known]


def prepared(
    module: tvm.IRModule, roots: list[str] | None = None, library: str | None = None
) -> tvm.IRModule:
    """Return a module for a device: with these functions and plain names, and with the calls of a
    library."""
    if roots is not None:
        module = with_only(module, roots)
    if library is not None:
        from ..backend import DispatchLibrary

        module = DispatchLibrary(library)(module)
    return PlainNames()(module)


def _scheduled(target: tvm.target.Target) -> tvm.transform.Pass:
    """Return the pipeline for a target, which refuses functions that would run on the host."""
    return tvm.transform.Sequential([pipeline(target), check_scheduled])


@tvm.transform.module_pass(opt_level=0, name="relax_grad.check_scheduled")
def check_scheduled(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
    """Raise ValueError if a tensor function has no threads of a device."""
    names = [
        variable.name_hint
        for variable, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and _runs_on_host(function)
    ]
    if names:
        raise ValueError(
            f"the device has no schedule for {', '.join(sorted(names))}: these functions would run "
            "on the host, which cannot read the device's memory. Train without device, or write "
            "the model without these operators"
        )
    return mod


def _runs_on_host(function: tirx.PrimFunc) -> bool:
    """Tell whether a function writes to tensors without threads of a device.

    Functions that compute extents run on the host, and have an attribute that says so.
    """
    if function.attrs is not None and bool(function.attrs.get("tirx.is_host_func", False)):
        return False
    threads: list[object] = []

    def see_loop(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            threads.append(loop)

    def see_attribute(statement: tirx.AttrStmt) -> None:
        if statement.attr_key == "thread_extent":
            threads.append(statement)

    rules = [(tirx.For, see_loop), (tirx.AttrStmt, see_attribute)]
    tvm_ffi.structural_walk(function.body, rules, order="pre")
    return not threads
