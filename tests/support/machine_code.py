"""A plugin of pytest by which tests of numbers compile machine code once, without optimizations.

TVM's modules of LLVM hold LLVM IR. When a module is loaded to run, TVM compiles it with all
optimizations of the code generator, at every level of the target. At level 0, that is half of the
time of a compilation. Here, tests get the machine code of that level instead, as
:func:`relax_grad.testing.check_gradients` does. Before LLVM, TVM's passes over loops that only save
time or memory are left out.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import contextmanager

import tvm

from relax_grad.cpu.codegen import compile as _compile
from relax_grad.cpu.codegen.compile import assembled
from relax_grad.testing import _program

#: The module of TVM that calls LLVM.
_BUILD = sys.modules["tvm.tirx.build"]

_generate = _BUILD.codegen_build
_assemble = _program.assemble
_optimizing = _compile.optimizing

#: Passes that only make code faster or smaller; they take a fifth of the time of a compilation.
OPTIMIZING = [
    "s_tir.CompactBufferAllocation",
    "s_tir.HoistIfThenElse",
    "s_tir.LoopPartition",
    "s_tir.RenormalizeSplitPattern",
    "s_tir.StmtSimplify",
    "tirx.CommonSubexprElim",
    "tirx.RemoveNoOp",
    "tirx.StmtSimplify",
    "tirx.StorageRewrite",
]

_build = tvm.tirx.build

#: Whether targets without a level of optimization have the level 0.
_unoptimized = [False]

#: Whether that holds for relax_grad's pipeline too.
_pipelines = [False]

#: Whether all of TVM's passes run nevertheless.
_whole = [False]


@contextmanager
def unoptimized(*, pipelines: bool = False):
    """Compile for LLVM without optimizations, unless the target has a level.

    Parameters
    ----------
    pipelines : bool
        Whether relax_grad's pipeline, which otherwise compiles at its own level, does so too.
    """
    before = _unoptimized[0], _pipelines[0]
    _unoptimized[0], _pipelines[0] = True, pipelines
    try:
        yield
    finally:
        _unoptimized[0], _pipelines[0] = before


@contextmanager
def all_passes():
    """Run all of TVM's passes over loops, within :func:`unoptimized`."""
    before, _whole[0] = _whole[0], True
    try:
        yield
    finally:
        _whole[0] = before


def _build_unoptimized(mod, target=None, pipeline="default"):
    options = tvm.target.Target(target).export() if target is not None else {}
    is_short = _unoptimized[0] and not _whole[0] and options.get("kind") == "llvm"
    if not is_short or options.get("opt-level", 0) != 0:
        return _build(mod, target, pipeline)
    context = tvm.transform.PassContext.current()
    short = tvm.transform.PassContext(
        opt_level=context.opt_level,
        config=dict(context.config),
        instruments=context.instruments,
        disabled_pass=[*context.disabled_pass, *OPTIMIZING],
    )
    # A division by 0 in a branch that is never taken is an error unless passes remove it.
    with contextlib.suppress(tvm.error.InternalError), short:
        return _build(mod, target, pipeline)
    return _build(mod, target, pipeline)


def _level_of_pipelines(target: tvm.target.Target) -> tvm.target.Target:
    """Return a target for the functions of relax_grad's pipeline."""
    if _pipelines[0] and "opt-level" not in target.export():
        target = tvm.target.Target({**target.export(), "opt-level": 0})
    return _optimizing(target)


def _codegen_build(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    if target.kind.name != "llvm":
        return _generate(mod, target)
    options = target.export()
    if _unoptimized[0] and "opt-level" not in options:
        target = tvm.target.Target({**options, "opt-level": 0})
        options = target.export()
    library = _generate(mod, target)
    if options.get("opt-level") != 0 or mod.get_attr("system_lib_prefix") is not None:
        return library
    return assembled(library, target)


@contextmanager
def as_tvm_compiles():
    """Compile as TVM and relax_grad do outside of the tests."""
    ours = _BUILD.codegen_build, _program.assemble, _compile.optimizing, tvm.tirx.build
    pytest_unconfigure()
    try:
        yield
    finally:
        _BUILD.codegen_build, _program.assemble, _compile.optimizing, tvm.tirx.build = ours


def pytest_configure() -> None:
    _BUILD.codegen_build = _codegen_build
    _program.assemble = lambda module, target: None  # it is done already
    _compile.optimizing = _level_of_pipelines
    tvm.tirx.build = _build_unoptimized


def pytest_unconfigure() -> None:
    _BUILD.codegen_build = _generate
    _program.assemble = _assemble
    _compile.optimizing = _optimizing
    tvm.tirx.build = _build
