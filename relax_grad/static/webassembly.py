"""A static plan as one WebAssembly module, made by clang and wasm-ld, or by zig."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import tirx

#: The sources for WebAssembly besides the sources in C: a small library of C, and the trainer in
#: JavaScript.
SOURCES = Path(__file__).parent / "web"

#: The bytes of the stack. It lies before all data, so that an overflow ends the call.
_STACK = 1 << 20

#: The mathematical functions of C that the trainer in JavaScript gives a module, as trainer.mjs
#: does, for float64. Those for float32 have the suffix f.
_IMPORTED = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "exp"),
    *("exp2", "expm1", "fmod", "hypot", "log", "log10", "log1p", "log2", "sin", "sinh", "tan"),
    "tanh",
)
#: These are defined for float64 by pow.c.
_IMPORTS = [*_IMPORTED, *(f"{name}f" for name in (*_IMPORTED, "pow"))]

#: The functions of relax_grad_static.h that trainer.mjs calls, and the addresses that it reads.
_EXPORTS = (
    *("batch", "get_counters", "get_hyperparameter", "group_tensor", "hyperparameter_name"),
    *("input", "last_error", "load_state", "memory_bytes", "metric", "num_batch"),
    *("num_group_tensors", "num_hyperparameters", "num_inputs", "num_metrics", "num_outputs"),
    *("num_sizes", "open_static", "output", "predict", "predict_ema", "save_state"),
    *("set_counters", "set_hyperparameter", "state_bytes", "step"),
)
_ADDRESSES = ("relax_grad_exported", "__heap_base")

_HINT = (
    "step.wasm needs clang and wasm-ld of one version, 14 or later: Debian and Ubuntu have them in "
    "the packages clang and lld (apt-get install clang lld), conda-forge in clang and lld, and pip "
    "both in one package (pip install ziglang); compiler= names another clang, or zig"
)


class Tools(NamedTuple):
    """The commands that make a module of WebAssembly.

    Attributes
    ----------
    compile : tuple[str, ...]
        Compiles sources of C.
    link : tuple[str, ...]
        LLVM's linker ``wasm-ld``.
    """

    compile: tuple[str, ...]
    link: tuple[str, ...]


def tools(compiler: str | os.PathLike | None = None) -> Tools:
    """Return the commands of a clang with its linker, or of zig, which contains both.

    Parameters
    ----------
    compiler : str or os.PathLike, optional
        The name or path of a clang or of zig; by default ``clang``, or zig where clang or its
        linker is missing.

    Raises
    ------
    FileNotFoundError
        If the compiler or its linker is not installed. The message says how to get them.
    ValueError
        If the compiler is another one.
    """
    if compiler is None:
        try:
            return _clang("clang")
        except FileNotFoundError:
            if (zig := _zig("zig")) is None:
                raise
            return zig
    name = os.fspath(compiler)
    if Path(name).stem == "zig":
        if (zig := _zig(name)) is None:
            raise FileNotFoundError(f"{name} is not installed; {_HINT}")
        return zig
    return _clang(name)


def _clang(name: str) -> Tools:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed; {_HINT}")
    if "clang" not in _output(path, "--version"):
        raise ValueError(f"compiler must be a clang, but {path} is another compiler; {_HINT}")
    target = "--target=wasm32-unknown-unknown"
    linker = shutil.which(_output(path, target, "-print-prog-name=wasm-ld"))
    if linker is None:
        raise FileNotFoundError(f"the linker wasm-ld of {path} is not installed; {_HINT}")
    return Tools((path, target), (linker,))


def _zig(name: str) -> Tools | None:
    """Return the commands of zig, from the path or from the package ziglang; None without it."""
    path = shutil.which(name)
    if path is not None:
        zig: tuple[str, ...] = (path,)
    elif name == "zig" and importlib.util.find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang")
    else:
        return None
    # By default, zig checks undefined behaviour at run time.
    options = ("cc", "-target", "wasm32-freestanding", "-fno-sanitize=undefined")
    return Tools((*zig, *options), (*zig, "wasm-ld"))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def check_kernels(kernels: tvm.IRModule) -> None:
    """Raise an error if a lowered kernel computes in float16.

    LLVM's backend (version 22) does not end for some such loops with SIMD128, as of a sigmoid.
    """
    for variable, function in kernels.functions_items():
        casts: list[tirx.Cast] = []
        tvm_ffi.structural_walk(function.body, (tirx.Cast, casts.append), order="pre")
        if any(str(cast.ty.dtype) == "float16" for cast in casts):
            raise ValueError(
                f"the kernel {variable.name_hint} computes in float16, for which LLVM's compiler "
                "for WebAssembly may not end; use float32 or bfloat16"
            )


def linked(tools: Tools, sources: Sequence[Path], include: Path, kernels: Path) -> bytes:
    """Return a module of WebAssembly.

    Parameters
    ----------
    tools : Tools
        The compiler and the linker.
    sources : Sequence[Path]
        The sources of C: the trainer and the tables of the step.
    include : Path
        The folder of their headers.
    kernels : Path
        The object file with the kernels.

    Raises
    ------
    ValueError
        If a kernel calls a function that pages do not have.
    RuntimeError
        If the compiler or the linker fails.
    """
    output = kernels.with_suffix(".wasm")
    allowed = kernels.with_suffix(".imports")
    allowed.write_text("\n".join(_IMPORTS))
    exports = [*(f"relax_grad_{name}" for name in _EXPORTS), *_ADDRESSES]
    flags = [
        *("-std=c99", "-O2", "-mbulk-memory", "-ffreestanding", "-ffp-contract=off"),
        *(f"-I{SOURCES / 'include'}", f"-I{include}"),
    ]
    objects = []
    for source in (*sources, *sorted(SOURCES.glob("*.c"))):
        objects.append(kernels.with_name(f"{source.stem}.wasm.o"))
        _run(*tools.compile, *flags, "-c", str(source), "-o", str(objects[-1]))
    _run(
        *tools.link, "--no-entry", "--gc-sections", "--strip-all", "--stack-first", "-O2",
        *("-z", f"stack-size={_STACK}", f"--allow-undefined-file={allowed}"),
        *(f"--export={name}" for name in exports),
        *map(str, (*objects, kernels)), "-o", str(output),
    )  # fmt: skip
    return output.read_bytes()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    missing = re.findall(r"undefined symbol: (\w+)", done.stderr)
    if missing:
        raise ValueError(
            f"kernels call {', '.join(sorted(set(missing)))}, which a page does not have; replace "
            "the operator by others, or export for another target"
        )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} cannot make step.wasm: {done.stderr.strip()[:2000]}")
