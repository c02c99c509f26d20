"""The place where a trainer's functions are compiled for and run: the CPU, or a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from .._progress import shown
from .._validation import described
from ..cpu import programs
from ..gpu import devices
from ..gpu.graphs import CAPTURED
from ..ir.module import with_functions, with_only
from ..transform import PlainNames
from . import _export
from ._donation import donating, kept_results
from ._feed import Feed
from ._functions import StepFunctions
from ._graph import Graphs
from ._moment import Call

#: The kinds of devices that a trainer takes, each with TVM's name of its target.
_KINDS = {"cuda": "cuda"}

#: An architecture of CUDA with the operations of half precision.
_ANY_ARCH = "sm_80"


#: The targets of an exported folder: one, several levels of x86-64, or None for the default.
Targets: TypeAlias = "tvm.target.Target | str | Mapping | Sequence | None"


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

    def step(self, step: StepFunctions) -> tvm.runtime.Executable:
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

    def outputs(self, outputs: Sequence[tvm.runtime.Tensor]) -> Sequence[tvm.runtime.Tensor]:
        """Return the outputs of a step in memory that later steps do not write."""
        return outputs

    def for_export(self, target: Targets) -> Targets:
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
    graph : bool
        Whether steps are captured in CUDA graphs.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        options: Mapping[str, object] | None,
        device: tvm.runtime.Device,
        library: str | None = None,
        graph: bool = False,
    ):
        # Another pipeline may not write to the memory of arguments.
        self._donates = "relax_pipeline" not in (options or {})
        options = {"relax_pipeline": devices.scheduled(target), **(options or {})}
        super().__init__(target, options)
        self.device, self._library, self._has_graphs = device, library, graph
        self._true = tvm.runtime.tensor(np.array(True), device)

    def step(self, step: StepFunctions) -> tvm.runtime.Executable:
        with shown(f"compiling the training step for {self.device}"):
            module = donating(step, is_chained=True) if self._donates else step.module
            if self._has_graphs:
                module = _captured(step, module)
            return self.module(module, roots_of(step))

    def module(
        self, module: tvm.IRModule, roots: list[str] | None = None
    ) -> tvm.runtime.Executable:
        module = prepared(module, roots, self._library)
        return devices.compiled(module, self.target, self.options or {})

    def machine(self, executable: tvm.runtime.Executable) -> Mapping[str, Callable]:
        machine = relax.VirtualMachine(executable, self.device)
        graphs = Graphs(machine, self.device) if self._has_graphs else None
        return _Machine(machine, self._moved, graphs)

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
        if isinstance(machine, _Machine) and machine.graphs is not None:
            launch = machine.graphs.launch(name, arguments)
            if launch is not None:
                return launch, []
        return function, list(map(self._moved, arguments))

    def groups(self, groups: Mapping[str, list]) -> dict[str, list]:
        return {name: list(map(self._moved, tensors)) for name, tensors in groups.items()}

    def outputs(self, outputs: Sequence[tvm.runtime.Tensor]) -> Sequence[tvm.runtime.Tensor]:
        return [each.copyto(self.device) for each in outputs] if self._has_graphs else outputs

    def for_export(self, target: Targets) -> Targets:
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

    def __init__(self, machine: relax.VirtualMachine, moved: Callable, graphs: Graphs | None):
        self._machine, self._moved, self.graphs = machine, moved, graphs

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
    graph: bool = False,
) -> Place:
    """Return the place for the arguments of a trainer.

    Raises
    ------
    TypeError, ValueError
        If the device or the library is unknown, or the arguments do not go together.
    RuntimeError
        If TVM has no support for the device, or there is no such device.
    """
    if not isinstance(graph, bool):
        raise TypeError(f"graph must be True or False, but it is {described(graph)}")
    if device is None or device == "cpu":
        if graph:
            raise ValueError('graph is for a device, such as device="cuda"; leave graph out')
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
    if graph and (library is not None or "relax_pipeline" in (options or {})):
        raise ValueError(
            "a CUDA graph takes the functions of this package's own pipeline: leave graph out, or "
            "library and relax_pipeline"
        )
    made = devices.present(kind, number)
    chosen = tvm.target.Target.from_device(made) if target is None else tvm.target.Target(target)
    if chosen.kind.name != _KINDS[kind]:
        raise ValueError(
            f'target must be of the kind {_KINDS[kind]} for device="{device}", but it is of the '
            f"kind {chosen.kind.name}; leave it out"
        )
    return DevicePlace(chosen.with_host("llvm"), options, made, library, graph)


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


def _captured(step: StepFunctions, module: tvm.IRModule) -> tvm.IRModule:
    """Return the module of a step whose functions have others for graphs."""
    if kept_results(step)[0]:
        raise ValueError(
            "a CUDA graph cannot have a step with dynamic loss scaling, which returns the scale in "
            'separate memory: leave graph out, or train with precision="bf16"'
        )
    names = [name for name in roots_of(step) if name in ("step", "accumulate")]
    return with_functions(module, {name: module[name].with_attr(CAPTURED, True) for name in names})


def roots_of(step: StepFunctions) -> list[str]:
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
