"""The folder with an exported training step, a ``TrainStep``, which is not imported here: it
imports this module."""

from __future__ import annotations

import inspect
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.support import cc

from .._progress import shown
from .._validation import alternatives, described
from ..cpu import programs
from ..cpu.target import CPU, WASM32, X86_64_LEVELS, architecture, host, level_of
from ..ir.extent_checks import ExtentCheck
from ..ir.index_ranges import IndexRange
from ..ir.signature import GROUPS
from . import _atomic, _files
from ._donation import donating, kept_results
from ._functions import StepFunctions
from ._inputs import (
    checks_of,
    forward_checks_of,
    forward_ranges_of,
    input_types,
    ranges_of,
)
from ._tensors import listed

LIBRARY, STATE, MANIFEST = "step.so", "state.safetensors", "manifest.json"


def target_of(target: tvm.target.Target | str | Mapping | None) -> tvm.target.Target:
    """Return the target of a step, a CPU; by default the processor of this machine."""
    try:
        made = host() if target is None else tvm.target.Target(target)
    except ValueError as error:  # TVM's, for an unknown kind
        raise _no_target(target, error) from error
    if CPU.of(made) is None:
        raise ValueError(
            f"target must be a CPU, but it is of the kind {made.kind.name}; leave it out for this "
            "processor. The page on GPUs compiles a module for one"
        )
    return made


def targets_of(
    target: tvm.target.Target | str | Mapping | Sequence | None,
) -> list[tvm.target.Target]:
    """Return the targets of an exported step: one, or several levels of x86-64 from the lowest."""
    if isinstance(target, (str, Mapping, tvm.target.Target)) or not isinstance(target, Sequence):
        return [target_of(target)]
    targets = [target_of(level) for level in target]
    if len(targets) == 1:
        return targets
    known = [(level, target) for target in targets if (level := level_of(target)) is not None]
    wrong = [target for target in targets if level_of(target) is None]
    if wrong or not targets:
        fault = f"one is {wrong[0]}" if wrong else "there is none"
        raise ValueError(
            "several targets must be levels of x86-64, as relax_grad.target.x86_64 returns them, "
            f"but {fault}"
        )
    levels = [level for level, _ in known]
    if len(set(levels)) < len(levels):
        raise ValueError(f"the levels of targets must differ, but they are {', '.join(levels)}")
    return [target for _, target in sorted(known, key=lambda pair: X86_64_LEVELS.index(pair[0]))]


def is_for_pages(target: tvm.target.Target | str | Mapping | Sequence | None) -> bool:
    """Return whether a target is WebAssembly, for which a step never has a runtime."""
    if target is None or (isinstance(target, Sequence) and not isinstance(target, str)):
        return False
    try:
        return architecture(tvm.target.Target(target)) == WASM32
    except ValueError as error:
        raise _no_target(target, error) from error


def _no_target(target: object, error: ValueError) -> ValueError:
    """Return TVM's error for a target that it does not know, with the functions that make one."""
    known = 'relax_grad.target.host(), x86_64("v3"), arm("cortex-a72") or wasm()'
    called = f"; call it: {target.__name__}()" if inspect.isfunction(target) else ""
    return ValueError(
        f"target is {described(target)}, which is no target of TVM: {error}{called}; leave it out "
        f"for this processor, or give one such as {known}"
    )


#: The arguments that only exports without a runtime take, and the reasons.
_ONLY_STATIC = {
    "extents": "TVM's runtime takes any extents",
    "memory": "TVM's runtime allocates memory; relax_grad.training.memory_of tells how much",
}


def is_without_runtime(
    runtime: object,
    target: tvm.target.Target | str | Mapping | Sequence | None,
    compiler: object,
    sizes: Mapping[str, object],
    options: Mapping[str, object] | None,
) -> bool:
    """Return whether a step is exported without a runtime, or raise an error for arguments that do
    not go together."""
    if runtime not in ("tvm", "none"):
        raise ValueError(f'runtime must be "tvm" or "none", but it is {runtime!r}')
    if runtime == "tvm" and not is_for_pages(target):
        for name, reason in _ONLY_STATIC.items():
            if sizes[name] is not None:
                raise ValueError(f'{name} is for runtime="none": {reason}')
        return False
    if compiler is not None and not is_for_pages(target):
        raise ValueError(
            'compiler is for runtime="tvm": without a runtime, the C compiler of the program '
            "compiles the sources in the folder"
        )
    if options:
        raise ValueError(
            'runtime="none" needs the pipeline "relax_grad" and its defaults, but the trainer has '
            f"compile_options {dict(options)}"
        )
    if isinstance(target, Sequence) and not isinstance(target, str):
        raise ValueError(
            'runtime="none" takes one target, but there is a list: export a folder for each'
        )
    return True


def check_runs_here(target: tvm.target.Target) -> None:
    """Raise an error if a target has another architecture than this machine."""
    if _is_foreign(target):
        raise ValueError(
            f"target must be this machine's architecture, {_here()}, but it is "
            f"{architecture(target)}; TrainStep.export and Trainer.export compile for other "
            "machines"
        )


def compiler_for(target: tvm.target.Target, compiler: str | os.PathLike | None) -> str | None:
    """Return the C++ compiler that links a library for a target; None for TVM's choice.

    Raises
    ------
    ValueError
        If no compiler is known for the target.
    FileNotFoundError
        If the compiler is not installed.
    """
    if compiler is None and not _is_foreign(target):
        return None
    kind = architecture(target)
    if kind == WASM32:
        raise ValueError(
            "a library with TVM's runtime cannot be compiled for WebAssembly; "
            "Trainer.export(folder, target=relax_grad.target.wasm()) writes a step for pages"
        )
    if compiler is None:
        if "linux" not in str(target.attrs.get("mtriple", "")):
            raise ValueError(
                f"compiler must name a C++ compiler for {target.attrs['mtriple']}: the default "
                "compilers are for Linux"
            )
        compiler = f"{kind}-linux-gnu-g++"
    compiler = os.fspath(compiler)
    if shutil.which(compiler) is None:
        package = f"g++-{kind.replace('_', '-')}-linux-gnu"
        known = (
            f"; Debian and Ubuntu have it in the package {package}"
            if compiler == f"{kind}-linux-gnu-g++"
            else ""
        )
        raise FileNotFoundError(f"the compiler {compiler} is not installed{known}")
    return compiler


def _is_foreign(target: tvm.target.Target) -> bool:
    return architecture(target) != _here()


def _here() -> str:
    name = platform.machine().lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def compiled(
    step: StepFunctions,
    target: tvm.target.Target,
    options: Mapping[str, object] | None,
    prefix: str = "",
) -> tvm.runtime.Executable:
    """Return the executable of a step.

    Parameters
    ----------
    options : Mapping[str, object] or None
        Further arguments of ``tvm.compile``.
    prefix : str
        The prefix of the names of tensor functions.
    """
    # Without the module and the target.
    known = list(inspect.signature(tvm.compile).parameters)[2:] if options else []
    for name in options or ():
        if name not in known:
            raise TypeError(
                "compile_options must be arguments of tvm.compile, but one is "
                f"{name!r}; {alternatives(str(name), known)}"
            )
    options = {"relax_pipeline": "relax_grad", **(options or {})}
    if prefix:
        if options["relax_pipeline"] != "relax_grad":
            raise ValueError(
                'several targets need the pipeline "relax_grad", but compile_options has '
                "another relax_pipeline"
            )
        options["relax_pipeline"] = relax.get_pipeline("relax_grad", symbol_prefix=prefix)
    with shown("optimizing the training step"):
        return programs.compiled(
            step.module, target, options, partial(donating, step), f"donating {kept_results(step)}"
        )


def versions(
    step: StepFunctions, targets: Sequence[tvm.target.Target], options: Mapping[str, object] | None
) -> list[tuple[tvm.target.Target, tvm.runtime.Executable]]:
    """Return the executable of a step for each target."""
    prefixes = [_prefix(target) if len(targets) > 1 else "" for target in targets]
    return [
        (target, compiled(step, target, options, prefix))
        for target, prefix in zip(targets, prefixes, strict=True)
    ]


def _prefix(target: tvm.target.Target) -> str:
    return f"{level_of(target)}_".replace("-", "_")


def new_folder(path: str | os.PathLike) -> AbstractContextManager[Path]:
    """Give an empty folder for an exported step, and then replace another folder by it; see
    :func:`_atomic.new_folder`."""
    return _atomic.new_folder(path, MANIFEST)


def write_folder(
    step: StepFunctions,
    folder: Path,
    versions: Sequence[tuple[tvm.target.Target, tvm.runtime.Executable]],
    compiler: str | None,
    write_state: Callable[[Path], None],
) -> None:
    """Write the library, the state and the manifest of a step to a folder.

    The library of several versions holds the executables of all: each one imports the next one. The
    order of several imports of one executable would be lost.
    """
    targets = [target for target, _ in versions]
    executables = [executable for _, executable in versions]
    for executable, after in pairwise(executables):
        executable.mod.import_module(after.mod)
    executables[0].export_library(
        str(folder / LIBRARY),
        fcompile=partial(_link, list(map(_prefix, targets))) if len(versions) > 1 else None,
        **({"cc": compiler} if compiler else {}),
    )
    write_state(folder / STATE)
    state = _files.checksum_in(folder / STATE)
    description = manifest(step, targets, (folder / LIBRARY).read_bytes(), state)
    text = f"{json.dumps(description, indent=1)}\n".encode()
    (folder / MANIFEST).write_bytes(b"".join(_files.with_checksum(text, len(text))))


def _link(prefixes: Sequence[str], output: str, objects: Sequence[str], **options: Any) -> None:
    """Link object files, the lowest level first.

    TVM defines some functions in all of them, such as conversions of float16, and the linker takes
    the first definition. It must run on all processors.
    """

    def level(path: str) -> int:
        data = Path(path).read_bytes()
        names = (f"__tvm_ffi_{prefix}".encode() for prefix in prefixes)
        return next((i for i, name in enumerate(names) if name in data), len(prefixes))

    cc.create_shared(output, sorted(objects, key=level), **options)


def manifest(
    step: StepFunctions, targets: Sequence[tvm.target.Target], library: bytes, state_checksum: str
) -> dict:
    """Return the description of a step that a program without Python reads, with a place for its
    checksum."""
    _check_names(step)
    levels = list(map(level_of, targets))
    return {
        "format": _files.FORMAT,
        "version": _files.VERSION,
        _files.CHECKSUM: _files.NO_CHECKSUM,
        "tvm": version("apache-tvm"),
        "target": ", ".join(map(str, targets)),
        # The levels of x86-64 that the versions in the library are for, in the order of its
        # executables.
        "levels": [level for level in levels if level],
        "library": LIBRARY,
        # A library that was cut short ends the process that loads it.
        "library_bytes": len(library),
        "library_crc32": _files.checksum_of(library),
        "state": STATE,
        # The state that was exported is that with this checksum; one that was saved later has the
        # digest of the step.
        "state_crc32": state_checksum,
        "step": step._digest,
        "batch": listed(step.batch),
        "index_ranges": _ranges(ranges_of(step)),
        "extent_checks": _checks(checks_of(step), step.batch),
        "hyperparameters": [
            {"name": name, "default": value} for name, value in step.hyperparameters.items()
        ],
        **{group: listed(getattr(step, group)) for group in GROUPS},
        "metrics": list(step.metrics),
        "outputs": list(step.outputs),
        "accumulate": step.accumulate,
        "forward": _forward(step),
    }


def _check_names(step: StepFunctions) -> None:
    """Raise an error if a name cannot stand in a manifest."""
    groups = ("batch", "hyperparameters", *GROUPS, "metrics", "outputs")
    for name in (name for group in groups for name in getattr(step, group)):
        _files.check_text("a name of the step", name)
        if not name or any(character < " " for character in name):
            raise ValueError(
                "the names of an exported step must be texts without control characters, but one "
                f"is {name!r}"
            )


def _forward(step: StepFunctions) -> dict | None:
    if step.forward is None:
        return None
    return {
        "name": step.forward.name,
        "inputs": listed(input_types(step)),
        "index_ranges": _ranges(forward_ranges_of(step)),
        "extent_checks": _checks(forward_checks_of(step), input_types(step)),
        "values": list(step.forward.values),
    }


def _ranges(ranges: Sequence[IndexRange]) -> list[dict]:
    return [
        {
            "input": index_range.input,
            "extent": index_range.extent,
            "from_end": int(index_range.from_end),
            "shift": index_range.shift,
            "ignored": list(index_range.ignored),
            "slices": [list(axis) for axis in index_range.slices],
        }
        for index_range in ranges
    ]


def _checks(checks: Sequence[ExtentCheck], types: Mapping[str, relax.TensorType]) -> list[dict]:
    """Return the conditions on extents that the shapes of the inputs give."""
    known = {str(extent) for ty in types.values() for extent in ty.shape.values}
    return [
        {"condition": list(check.condition), "reason": check.reason}
        for check in checks
        if known.issuperset(check.names)
    ]


def write_state(
    path: str | os.PathLike,
    step: StepFunctions,
    groups: Mapping[str, Mapping[str, tvm.runtime.Tensor]],
    described: Mapping[str, object],
) -> None:
    """Write the tensors of all groups, and counters, history and further values."""
    tensors = {
        f"{group}/{name}": tensor for group in GROUPS for name, tensor in groups[group].items()
    }
    _files.write(path, tensors, {"step": step._digest, **described})
