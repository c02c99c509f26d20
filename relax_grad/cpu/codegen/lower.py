"""The compilation of tensor functions to object files by TVM's passes and LLVM."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import tvm
from tvm import s_tir, tirx
from tvm.ir import GlobalVar
from tvm.target import codegen

from ...ir.compat import constant_bits, installed_version, script_of, structural_hash
from ...ir.floats import guard_floats
from ...ir.loops import canonicalize_loops
from ...ir.module import IS_KERNEL, is_buffer
from .arguments import without_checks
from .builds import build
from .generic import from_tables

#: The revision of the compilation. It changes with each change of the compiled code, also within a
#: release.
_REVISION = 13

#: LLVM's name for the preference of half of the vectors of AVX-512.
_SHORT = "prefer-256-bit"

#: TVM's prefix for the symbols of functions that it calls.
SYMBOL = "__tvm_ffi_"

#: The option of TVM that omits assertions.
_NO_ASSERTIONS = "tirx.disable_assert"


def is_generated(function: tirx.PrimFunc) -> bool:
    """Tell whether a function is a kernel, whose statements are executed as written."""
    return bool(function.attrs.get(IS_KERNEL, False))


def canonical_name(name: str) -> str:
    """Return a name without the numbers that distinguish functions of one module."""
    return re.sub(r"\d+(?=_|$)", "", name) or "function"


def optimizing(target: tvm.target.Target) -> tvm.target.Target:
    """Return a target with an optimization level, and with itself as its host."""
    options = {name: value for name, value in target.export().items() if name != "host"}
    target = tvm.target.Target({"opt-level": 2, **options})
    return target.with_host(target)


def prefers_short(target: tvm.target.Target) -> bool:
    """Tell whether LLVM fills half of the vectors of a target in loops that it vectorizes itself.

    It does so for Intel's processors with AVX-512, the first of which lower their frequency for
    whole vectors. Kernels of products use them anyway.
    """
    return bool(codegen.target_has_features(_SHORT, target))


def with_whole_vectors(target: tvm.target.Target) -> tvm.target.Target:
    """Return a target for whose loops LLVM fills whole vectors.

    Only the generation of code knows it: the properties of a CPU depend on the preference.
    """
    if not prefers_short(target):
        return target
    options = {name: value for name, value in target.export().items() if name != "host"}
    options["mattr"] = [*options.get("mattr", []), f"-{_SHORT}"]
    target = tvm.target.Target(options)
    return target.with_host(target)


def library(
    functions: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    checked: Collection[str] = (),
    tensors: Mapping[str, int] | None = None,
) -> tvm.runtime.Module:
    """Compile functions together to a module of LLVM.

    Parameters
    ----------
    functions : Mapping[str, tirx.PrimFunc]
        The functions by name: all of them are kernels, or no function is one. They do not call
        other functions of their module. The symbol of a function is :data:`SYMBOL` and its name.
        Errors at run time refer to the function by its name.
    target : tvm.target.Target
        A target of LLVM, which is its own host.
    checked : Collection[str]
        The names of the functions whose arguments are checked before the call.
    tensors : Mapping[str, int], optional
        The number of tensors of each function whose last parameters are numbers that it reads from
        a table: see :class:`~.generic.Shared`.
    """
    mod = lowered(functions, target, checked)
    if tensors:
        mod = from_tables(mod, tensors)
    return generated(mod, target)


def lowered(
    functions: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    checked: Collection[str] = (),
) -> tvm.IRModule:
    """Return functions lowered for LLVM's code generator; the parameters are the same as for
    :func:`library`."""
    mod = tvm.IRModule(
        {GlobalVar(name): f.with_attr("global_symbol", name) for name, f in functions.items()}
    )
    all_generated = all(map(is_generated, functions.values()))
    return _lowered(mod, all_generated, checked, with_whole_vectors(target))


def generated(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Return the module of LLVM of lowered functions, for a target that is its own host."""
    return tvm.get_global_func("target.build.llvm")(mod, with_whole_vectors(target))


def object_file(
    functions: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    checked: Collection[str] = (),
    tensors: Mapping[str, int] | None = None,
) -> bytes:
    """Compile functions together to an object file; the parameters as for :func:`library`."""
    return written(library(functions, target, checked, tensors))


def written(library: tvm.runtime.Module) -> bytes:
    """Return the object file of a module of LLVM."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "functions.o")
        library.write_to_file(str(path))
        return path.read_bytes()


def loaded(text: str) -> tvm.runtime.Module:
    """Return the module of LLVM with a text, which TVM reads from a file only."""
    handle, path = tempfile.mkstemp(suffix=".ll")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        return tvm.runtime.load_module(path)
    finally:
        Path(path).unlink()


def key(contents: Mapping[str, str], environment: Sequence[str]) -> str:
    """Return the key of the object file of functions.

    Parameters
    ----------
    contents : Mapping[str, str]
        The :func:`content` or another unique text of each function, by its name.
    environment : Sequence[str]
        The :func:`environment`.
    """
    parts = [list(environment), list(contents.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def content(function: tirx.PrimFunc) -> str:
    """Return a digest of a function: of its script, the bits of its constants, and its structural
    hash.

    The script and the constants tell functions apart without collisions. The script leaves fields
    out that the hash of 64 bits has.
    """
    function = function.without_attr("global_symbol")
    parts = [script_of(function).encode(), str(structural_hash(function)).encode()]
    digest = hashlib.sha256(b"\0".join(parts))
    for bits in constant_bits(function):
        digest.update(bits)
    return digest.hexdigest()


def environment(target: tvm.target.Target) -> list[str]:
    """Return the inputs of the machine code of a function besides the function itself."""
    config = tvm.transform.PassContext.current().config
    return [
        f"{installed_version('relax-grad')}, {_REVISION}",
        tvm.__version__,
        build(),
        str(installed_version("apache-tvm-ffi")),
        str(tvm.get_global_func("target.llvm_version_major")()),
        str(target),
        json.dumps({str(name): str(value) for name, value in config.items()}, sort_keys=True),
    ]


def _lowered(
    mod: tvm.IRModule, generated: bool, checked: Collection[str], target: tvm.target.Target
) -> tvm.IRModule:
    """Return a module lowered for LLVM's code generator, without argument checks in the functions
    of ``checked``."""
    mod = canonicalize_loops(tirx.transform.BindTarget(target)(mod))
    context = tvm.transform.PassContext.current()
    if not generated or set(context.config) - {_NO_ASSERTIONS}:  # options change the list of passes
        pipeline, finalize, _ = tirx.get_tir_pipeline("default")
        mod = finalize()(pipeline(guard_floats(mod)))
    else:
        mod = tvm.transform.Sequential(_passes(any(map(_takes_booleans, mod.functions.values()))))(
            mod
        )
    mod = without_checks(mod, checked)
    if context.config.get(_NO_ASSERTIONS, False):
        mod = tirx.transform.SkipAssert()(mod)
    return mod


def _takes_booleans(function: tirx.PrimFunc) -> bool:
    return any(is_buffer(param) and str(param.dtype) == "bool" for param in function.params)


def _passes(with_booleans: bool) -> list[tvm.transform.Pass]:
    """Return the passes of TVM's default pipeline that change kernels.

    The other passes are for GPUs, have nothing to do, or do work that LLVM does faster. They take
    four fifths of the time.

    Parameters
    ----------
    with_booleans : bool
        Whether a kernel takes a tensor of booleans. FlattenBuffer stores them as bytes; the buffers
        of kernels are flat.
    """
    loops, expressions = s_tir.transform, tirx.transform
    return [
        loops.ConvertBlocksToOpaque(),
        loops.LowerOpaqueBlock(),
        *([expressions.FlattenBuffer()] if with_booleans else []),
        expressions.BF16ComputeLegalize(),
        expressions.NarrowDataType(32),
        expressions.VectorizeLoop(True),
        expressions.StorageRewrite(),
        expressions.UnrollLoop(),
        expressions.StmtSimplify(),
        loops.RewriteUnsafeSelect(),
        expressions.FP8ComputeLegalize(),
        expressions.VerifyMemory(),
        expressions.SplitHostDevice(),
        expressions.MakePackedAPI(),
        expressions.FP8StorageLegalize(),
        expressions.BF16StorageLegalize(),
        expressions.LowerTVMBuiltin(),
        expressions.LowerIntrin(),
    ]
