"""From a tensor function to an object file: TVM's passes and LLVM."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import GlobalVar

from .._compat import installed_version
from .._module import IS_KERNEL

#: Another one for each change of how functions are compiled, within a release too.
_REVISION = 1

#: What TVM puts before the names of functions that it calls.
SYMBOL = "__tvm_ffi_"


def is_generated(function: tirx.PrimFunc) -> bool:
    """Tell whether a function is a kernel: its statements are those that are to be executed."""
    return bool(function.attrs.get(IS_KERNEL, False))


def canonical_name(name: str) -> str:
    """Return a name without the numbers that tell functions of one module apart."""
    return re.sub(r"\d+(?=_|$)", "", name) or "function"


def object_file(function: tirx.PrimFunc, name: str, target: tvm.target.Target) -> bytes:
    """Compile a function.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function; it calls no other function of its module.
    name : str
        What errors at run time call it. The symbol is this with :data:`SYMBOL` before it.
    target : tvm.target.Target
        A target of LLVM, which is its own host.
    """
    mod = tvm.IRModule({GlobalVar(name): function.with_attr("global_symbol", name)})
    mod = _lowered(mod, is_generated(function), target)
    library = tvm.get_global_func("target.build.llvm")(mod, target)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "function.o")
        library.write_to_file(str(path))
        return path.read_bytes()


def key(function: tirx.PrimFunc, name: str, target: tvm.target.Target) -> str:
    """Return what identifies the object file of a function.

    It is made of TVM's structural hash, which knows no names of variables, of the function and of its body alone.
    """
    content = [
        tvm_ffi.structural_hash(function.without_attr("global_symbol")),
        tvm_ffi.structural_hash(function.body, map_free_vars=True),
        len(function.params),
        name,
    ]
    return hashlib.sha256(json.dumps([environment(target), content]).encode()).hexdigest()


def environment(target: tvm.target.Target) -> list[str]:
    """Return what besides a function decides its machine code."""
    config = tvm.transform.PassContext.current().config
    return [
        f"{installed_version('relax-grad')}, {_REVISION}",
        tvm.__version__,
        str(installed_version("apache-tvm-ffi")),
        str(tvm.get_global_func("target.llvm_version_major")()),
        str(target),
        json.dumps({str(name): str(value) for name, value in config.items()}, sort_keys=True),
    ]


def _lowered(mod: tvm.IRModule, generated: bool, target: tvm.target.Target) -> tvm.IRModule:
    """Return a module as LLVM's code generator takes it."""
    mod = tirx.transform.BindTarget(target)(mod)
    context = tvm.transform.PassContext.current()
    if not generated or context.config:  # options change which passes there are
        pipeline, finalize, _ = tirx.get_tir_pipeline("default")
        mod = finalize()(pipeline(mod))
    else:
        mod = tvm.transform.Sequential(_passes())(mod)
    if context.config.get("tirx.disable_assert", False):
        mod = tirx.transform.SkipAssert()(mod)
    return mod


def _passes() -> list[tvm.transform.Pass]:
    """Return the passes of TVM's default pipeline that change kernels.

    The others are for GPUs, or find that there is nothing to do, or do what LLVM does faster: they take four fifths
    of the time.
    """
    loops, expressions = s_tir.transform, tirx.transform
    return [
        loops.CanonicalizeLoop(),
        loops.ConvertBlocksToOpaque(),
        loops.LowerOpaqueBlock(),
        expressions.FlattenBuffer(),
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
