"""Training steps without a runtime: the static plan of a ``TrainStep``, and its folder with C."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import tvm

from .._validation import check_integer
from ..cpu.target import check_convention
from ..ir.compat import dtype_of
from ..ir.index_ranges import IndexRange
from ..ir.signature import GROUPS, MODEL_GROUPS
from ..static import c_source, webassembly
from ..static.kernels import object_file
from ..static.plan import Plan
from ..static.planner import Entry, bound, plan
from . import _export, _files
from ._donation import donating
from ._inputs import checks_of, forward_ranges_of, input_types, ranges_of
from ._packing import packed
from ._slots import EMA, Slot
from .history import History
from .step import TrainStep

#: The extents of an export: the value of each symbolic extent by its name, or several such.
Extents = Mapping[str, int] | Sequence[Mapping[str, int]]


def static_plan(
    step: TrainStep,
    target: tvm.target.Target | str | Mapping | None = None,
    extents: Extents = (),
    memory: int | None = None,
) -> Plan:
    """Return the static plan of a step: the places of its tensors and its calls of kernels.

    A plan is what ``Trainer.export(folder, runtime="none")`` writes as C. ``print`` shows it.

    Parameters
    ----------
    step : TrainStep
        The step.
    target : tvm.target.Target or str or Mapping, optional
        A CPU; by default :func:`relax_grad.target.host`.
    extents : Mapping[str, int] or Sequence[Mapping[str, int]]
        The values of symbolic extents by their names: ``{"batch": 32}``. Several mappings, such as
        ``[{"batch": 32}, {"batch": 5}]``, give functions for several sizes, which share one state.
    memory : int, optional
        The bytes that the trainer may take at most: state, arena, workspace and tables.

    Returns
    -------
    plan : Plan
        The plan. Its tensors of the state have the names ``GROUP/NAME``.

    Raises
    ------
    TypeError
        If the step is no ``TrainStep``, extents are no integers by names, or memory is no integer.
    ValueError
        If the step cannot run without a runtime: it has symbolic extents without values, a branch
        or a loop at run time, or calls a function of TVM's library. Also if the triple of an ARM
        microcontroller is incomplete, or the trainer needs more memory. The message names the
        obstacle and the way out.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad.training import SGD, static_plan, train_step
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.matmul(x, w))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sum(relax.op.square(y))))
    >>> plan = static_plan(train_step(bb.get(), SGD(), wrt="w"))
    >>> [name for name, _ in plan.state], plan.state_bytes
    (['params/w', 'optimizer_state/step'], 128)
    """
    if not isinstance(step, TrainStep):
        raise TypeError(f"step must be a result of train_step, but it is {step!r}")
    return planned(step, _export.target_of(target), extents, memory)


def planned(
    step: TrainStep,
    target: tvm.target.Target,
    extents: Extents,
    memory: int | None = None,
    prefix: str = "",
) -> Plan:
    """Return the static plan of a step in some bytes of memory, whose kernels' names begin with a
    prefix."""
    if memory is not None:
        memory = check_integer("memory", memory, 1, of="bytes")
    check_convention(target)
    sizes = _sizes(extents)
    entries, module = _entries(step), donating(step)
    names = [entry.name for entry in entries]
    for size in sizes:
        for check in checks_of(step):
            check.check(size)
    _check_known(module, names, sizes)
    modules = [bound(module, names, size) for size in sizes]
    state = {f"{group}/{name}": ty for group in GROUPS for name, ty in getattr(step, group).items()}
    made = plan(modules, entries, state, target, prefix)
    if memory is not None:
        _check_memory(made, c_source.memory_bytes(made, _facts(step, sizes)), memory)
    return made


def _check_memory(made: Plan, needed: int, memory: int) -> None:
    """Raise an error if a trainer needs more bytes than there are."""
    if needed <= memory:
        return
    areas = made.state_bytes, made.arena_bytes, made.workspace_bytes
    state, arena, workspace = areas
    fixed = needed - arena
    least = (
        f"the arena has at least {arena} bytes, but {memory - fixed} are left for it"
        if fixed < memory
        else f"the arena has at least {arena} bytes, and nothing is left for it"
    )
    raise ValueError(
        f"memory is {memory} bytes, but a trainer needs {needed}: {least} besides the state "
        f"({state}), the workspace ({workspace}) and tables ({needed - sum(areas)}); take a "
        "smaller batch, train_step(..., remat=True), a smaller model, or an optimizer with less "
        "state"
    )


def _sizes(extents: object) -> list[dict[str, int]]:
    """Return the values of extents for each size."""
    several = [extents] if isinstance(extents, Mapping) else extents
    if isinstance(several, str) or not isinstance(several, Sequence):
        raise TypeError(f"extents must be a mapping or a list of mappings, but it is {extents!r}")
    for size in several:
        if not isinstance(size, Mapping) or not all(isinstance(name, str) for name in size):
            raise TypeError(
                f"extents must map names of symbolic extents to integers, but one is {size!r}"
            )
    sizes = [
        {
            name: check_integer(f"extents: the value of {name}", value, 1, of="elements")
            for name, value in size.items()
        }
        for size in several
    ]
    for i, size in enumerate(sizes):
        if size in sizes[:i]:
            raise ValueError(f"extents must differ, but {size} stands twice")
    return sizes or [{}]


def _check_known(
    module: tvm.IRModule, names: Sequence[str], sizes: Sequence[Mapping[str, int]]
) -> None:
    """Raise an error if extents have a name that no function has."""
    known = {
        symbol.name
        for name in names
        for parameter in module[name].params
        for symbol in tvm.relax.analysis.definable_tir_vars_in_type(parameter.ty)
    }
    for size in sizes:
        for name in size:
            if name not in known:
                has = f"it has {', '.join(sorted(known))}" if known else "it has none"
                raise ValueError(f"extents: the step has no symbolic extent {name!r}; {has}")


def _entries(step: TrainStep) -> list[Entry]:
    """Return the functions of a step with the names of their arguments and results."""
    groups = {group: tuple(f"{group}/{name}" for name in getattr(step, group)) for group in GROUPS}
    arguments: tuple[str | tuple[str, ...], ...] = (
        *(f"batch/{name}" for name in step.batch),
        *(f"hyperparameters/{name}" for name in step.hyperparameters),
        "seed",
        *(groups[group] for group in GROUPS),
    )
    updates = (groups["params"], groups["states"], groups["optimizer_state"])
    names = ["step", "accumulate"] if step.accumulate > 1 else ["step"]
    entries = [Entry(name, arguments, updates) for name in names]
    if step.forward is not None:
        known = {name: f"{group}/{name}" for group in MODEL_GROUPS for name in getattr(step, group)}
        inputs = [f"inputs/{name}" for name in input_types(step)]
        values = [known[name] for name in step.forward.values]
        entries.append(Entry(step.forward.name, (*inputs, *values), ()))
    return entries


#: The files of a step without a runtime besides the sources in :data:`SOURCES`.
KERNELS, TABLES, HEADER = "kernels.o", "step.c", "step.h"
SOURCES = Path(c_source.__file__).parent / "c"

#: The files of a step for pages besides the state and the manifest.
MODULE, SCRIPTS = "step.wasm", ("trainer.mjs", "trainer.d.mts")

#: The names of the formats in the manifest, which the C++ library does not read.
_FORMAT, _WEB_FORMAT = "relax_grad.static", "relax_grad.web"


def writer(target: tvm.target.Target, compiler: str | os.PathLike | None) -> Callable[..., None]:
    """Return the function that writes a step for a target to a folder: :func:`write_folder`, or
    :func:`write_web_folder` with the compiler's commands, which must be installed."""
    if _export.is_for_pages(target):
        return partial(write_web_folder, tools=webassembly.tools(compiler))
    return write_folder


def write_folder(
    step: TrainStep,
    folder: Path,
    target: tvm.target.Target,
    extents: Extents,
    memory: int | None,
    write_state: Callable[[Path], None],
) -> None:
    """Write a step without a runtime to a folder: sources of C, kernels, the state and the
    manifest."""
    described = _write_c(step, folder, target, extents, memory)
    kernels = (folder / KERNELS).read_bytes()
    write_state(folder / _export.STATE)
    _write_manifest(step, folder, target, kernels, described)


def write_web_folder(
    step: TrainStep,
    folder: Path,
    target: tvm.target.Target,
    extents: Extents,
    memory: int | None,
    write_state: Callable[[Path], None],
    tools: webassembly.Tools,
) -> None:
    """Write a step for pages to a folder: one WebAssembly module, the state, the manifest, and the
    trainer in JavaScript."""
    with tempfile.TemporaryDirectory() as directory:
        sources = Path(directory)
        described = _write_c(step, sources, target, extents, memory)
        module = webassembly.linked(tools, sorted(sources.glob("*.c")), sources, sources / KERNELS)
    (folder / MODULE).write_bytes(module)
    for name in SCRIPTS:
        shutil.copyfile(webassembly.SOURCES / name, folder / name)
    write_state(folder / _export.STATE)
    described |= {"format": _WEB_FORMAT, "library": MODULE}
    _write_manifest(step, folder, target, module, described)


def _write_c(
    step: TrainStep,
    folder: Path,
    target: tvm.target.Target,
    extents: Extents,
    memory: int | None,
) -> dict[str, object]:
    """Write the sources of C and the kernels, and return what a manifest says of them."""
    made = planned(step, target, extents, memory, f"rg_{step._digest[:8]}_")
    if _export.is_for_pages(target):
        webassembly.check_kernels(made.kernels)
    facts = _facts(step, _sizes(extents))
    (folder / KERNELS).write_bytes(object_file(made.kernels, target))
    (folder / TABLES).write_text(c_source.source(made, facts))
    (folder / HEADER).write_text(c_source.header(made, facts))
    for path in sorted(SOURCES.iterdir()):
        shutil.copyfile(path, folder / path.name)
    return {
        "format": _FORMAT,
        "library": KERNELS,
        "extents": _sizes(extents),
        "memory": {
            "state": made.state_bytes,
            "arena": made.arena_bytes,
            "workspace": made.workspace_bytes,
            "constants": len(made.constants),
            "trainer": c_source.memory_bytes(made, facts),
        },
    }


def _write_manifest(
    step: TrainStep,
    folder: Path,
    target: tvm.target.Target,
    library: bytes,
    described: Mapping[str, object],
) -> None:
    state = _files.checksum_in(folder / _export.STATE)
    described = {**_export.manifest(step, [target], library, state), **described}
    text = f"{json.dumps(described, indent=1)}\n".encode()
    (folder / _export.MANIFEST).write_bytes(b"".join(_files.with_checksum(text, len(text))))


def _facts(step: TrainStep, sizes: Sequence[Mapping[str, int]]) -> c_source.Facts:
    """Return what the tables in C need besides the plan."""
    ranges = {name: _known_ranges(ranges_of(step), sizes) for name in ("step", "accumulate")}
    if step.forward is not None:
        ranges[step.forward.name] = _known_ranges(forward_ranges_of(step), sizes)
    return c_source.Facts(
        step._digest,
        GROUPS,
        step.hyperparameters,
        step.metrics,
        step.outputs,
        step.accumulate,
        json.dumps(packed(History())),
        _averages(step),
        ranges,
    )


def _known_ranges(
    ranges: Sequence[IndexRange], sizes: Sequence[Mapping[str, int]]
) -> list[list[IndexRange]]:
    """Return the ranges of indices for each size, with extents that are numbers."""
    return [
        [dataclasses.replace(own, extent=size.get(str(own.extent), own.extent)) for own in ranges]
        for size in sizes
    ]


def _averages(step: TrainStep) -> dict[str, str]:
    """Return the moving average of each parameter; none if one has another dtype."""
    averages = {}
    for name, ty in step.optimizer_state.items():
        slot = Slot.parse(name)
        if slot.kind == EMA and slot.param is not None:
            if dtype_of(ty) != dtype_of(step.params[slot.param]):
                return {}
            averages[f"params/{slot.param}"] = f"optimizer_state/{name}"
    return averages
