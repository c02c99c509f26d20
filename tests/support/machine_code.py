"""A plugin of pytest by which tests of numbers compile machine code once, without optimizations.

TVM's modules of LLVM hold LLVM IR. When a module is loaded to run, TVM compiles it with all
optimizations of the code generator, at every level of the target. At level 0, that is half of the
time of a compilation. Here, tests get the machine code of that level instead, as
:func:`relax_grad.testing.check_gradients` does.
"""

from __future__ import annotations

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

#: Whether targets without a level of optimization have the level 0.
_unoptimized = [False]

#: Whether that holds for relax_grad's pipeline too.
_pipelines = [False]


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
    ours = _BUILD.codegen_build, _program.assemble, _compile.optimizing
    pytest_unconfigure()
    try:
        yield
    finally:
        _BUILD.codegen_build, _program.assemble, _compile.optimizing = ours


def pytest_configure() -> None:
    _BUILD.codegen_build = _codegen_build
    _program.assemble = lambda module, target: None  # it is done already
    _compile.optimizing = _level_of_pipelines


def pytest_unconfigure() -> None:
    _BUILD.codegen_build = _generate
    _program.assemble = _assemble
    _compile.optimizing = _optimizing
