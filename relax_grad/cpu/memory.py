"""The memory that the pipeline plans for a function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tvm

from .pipeline import stages_of
from .storages import PLANS, Planned, storages_of
from .target import CPU


def planned(
    mod: tvm.IRModule, name: str, target: tvm.target.Target, extents: Mapping[str, int]
) -> Planned:
    """Return the bytes of the storages that the pipeline plans for a function and the functions
    that it calls.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    name : str
        The function.
    target : tvm.target.Target
        A CPU, or a device with passes of this package.
    extents : Mapping[str, int]
        The values of symbolic extents.

    Raises
    ------
    ValueError
        If the target has no such pipeline, or the value of an extent is missing.
    """
    if CPU.of(target) is None:
        steps = stages_of(target)
        if steps is None:
            raise ValueError(f"target must be a CPU or of the kind cuda, but it is {target}")
        with target:
            mod = _until_plan(mod, steps)
    else:
        mod = _lowered(mod, target)
    return storages_of(mod, name, extents)


def _lowered(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return the module after the passes that plan memory, with declarations instead of
    kernels."""
    from .codegen.declarations import Declarations
    from .passes.dispatch import DeclareKernels, DispatchKernels
    from .stages import passes

    declarations = Declarations.for_run()
    with target:
        if declarations is None:
            dispatch: tvm.transform.Pass = DispatchKernels(target)
        else:
            dispatch = DeclareKernels(target, 2, declarations.kernel)
        return _until_plan(mod, passes(target, dispatch, declarations is not None, declarations))


def _until_plan(mod: tvm.IRModule, steps: Iterable[tvm.transform.Pass]) -> tvm.IRModule:
    for step in steps:
        mod = step(mod)
        if step.info.name == PLANS:
            break
    return mod
