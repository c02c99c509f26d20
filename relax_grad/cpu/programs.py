"""Whole compiled programs, which are loaded from the directory of :func:`relax_grad.cache`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax

from ..ir.compat import constants_of
from ..ir.legalizations import are_unchanged
from ..ir.remat import REMAT, is_portable
from .codegen.cache import current
from .codegen.directory import PROGRAM
from .codegen.lower import environment, loaded
from .codegen.sources import sources
from .target import CPU

#: The option of ``tvm.compile`` and its value with which programs are kept.
_OPTION, _PIPELINE = "relax_pipeline", "relax_grad"

#: The attributes of a module that only compilation adds.
_COMPILED = ("external_mods", "const_name_to_constant")

_EXECUTABLE, _LIBRARY = "relax.VMExecutable", "llvm"


def compiled(
    module: tvm.IRModule,
    target: tvm.target.Target,
    options: Mapping[str, object] | None = None,
    lower: Callable[[], tvm.IRModule] | None = None,
    means: str = "",
) -> tvm.runtime.Executable:
    """Return the executable of a module, by the pipeline ``"relax_grad"`` unless the options name
    another one.

    Parameters
    ----------
    module : tvm.IRModule
        The module.
    target : tvm.target.Target
        The target.
    options : Mapping[str, object], optional
        Further arguments of ``tvm.compile``.
    lower : Callable, optional
        Returns the module that is compiled, which depends only on ``module`` and ``means``. By
        default it is ``module``.
    means : str
        A description of the other inputs of ``lower``.
    """
    options = {_OPTION: _PIPELINE, **(options or {})}
    directory = current() if options == {_OPTION: _PIPELINE} else None
    key = None if directory is None else _key(module, target, means)
    if directory is not None and key is not None:
        stored = directory.load(key, PROGRAM)
        executable = None if stored is None else _loaded(stored)
        if executable is not None:
            return executable
    executable = tvm.compile(module if lower is None else lower(), target, **options)
    if directory is not None and key is not None:
        data = _stored(executable)
        if data is not None:
            names = sorted(variable.name_hint for variable in module.get_global_vars())
            processor = target.attrs.get("mcpu") or target.kind.name
            directory.store(key, data, PROGRAM, f"{', '.join(names)} for {processor}")
            directory.trim()
    return executable


def _key(module: tvm.IRModule, target: tvm.target.Target, means: str) -> str | None:
    """Return the key of a program, None if the program depends on more than a key can hold."""
    context = tvm.transform.PassContext.current()
    if context.instruments or sources() is None or not are_unchanged() or not _is_plain(module):
        return None
    cpu = CPU.of(target)
    if cpu is None:
        return None
    try:
        described = description(module)
    except TypeError:  # an attribute is a packed function
        return None
    parts = [
        means,
        *described,
        str(sources()),
        environment(target),
        dataclasses.astuple(cpu),
        context.opt_level,
        [list(map(str, context.required_pass)), list(map(str, context.disabled_pass))],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def description(module: tvm.IRModule) -> list:
    """Return a value for JSON that differs for modules that differ, and is the same in every
    process.

    Raises
    ------
    TypeError
        If an attribute is a packed function, which means nothing elsewhere.
    """
    # The text has the names, which the hash ignores; the hash has the attributes and the elements
    # of constants, which the text may lack. Its 64 bits are few for large constants.
    return [
        module.script(show_meta=False),
        tvm_ffi.structural_hash(module),
        [_digest(constant) for constant in constants_of(module)],
    ]


def _digest(constant: tvm.runtime.Tensor) -> str:
    value = constant.numpy()
    return hashlib.sha256(f"{value.shape} {constant.dtype}".encode() + value.tobytes()).hexdigest()


def _is_plain(module: tvm.IRModule) -> bool:
    """Tell whether a module means the same in another process."""
    attributes = module.attrs
    if attributes is not None and any(name in attributes for name in _COMPILED):
        return False
    return all(
        is_portable(function.attrs[REMAT])
        for function in module.functions.values()
        if function.attrs is not None and REMAT in function.attrs
    )


def _stored(executable: tvm.runtime.Executable) -> bytes | None:
    """Return an executable as bytes, None if it has other parts than the bytecode of the virtual
    machine and modules of LLVM."""
    bytecode = executable.mod
    libraries = list(bytecode.imports)
    if bytecode.kind != _EXECUTABLE or any(
        library.kind != _LIBRARY or len(library.imports) for library in libraries
    ):
        return None
    parts = [_bytes_of(bytecode), *(lib.inspect_source("ll").encode() for lib in libraries)]
    sizes = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    return zlib.compress(sizes + b"".join(parts), 1)  # a fifth of the size, in little time


def _loaded(data: bytes) -> tvm.runtime.Executable | None:
    """Return the executable of an entry, None if this build of TVM cannot load it."""
    load = tvm.get_global_func(f"ffi.Module.load_from_bytes.{_EXECUTABLE}", allow_missing=True)
    if load is None:
        return None
    try:
        bytecode, *libraries = _parts(zlib.decompress(data))
        made = load(bytecode)
        for library in libraries:
            made.import_module(loaded(library.decode()))
    except (zlib.error, struct.error, RuntimeError, ValueError, OSError):
        return None
    return relax.VMExecutable(made)


def _parts(data: bytes) -> Sequence[bytes]:
    (count,) = struct.unpack_from("<Q", data)
    sizes, start, parts = struct.unpack_from(f"<{count}Q", data, 8), 8 + 8 * count, []
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts


def _bytes_of(bytecode: tvm.runtime.Module) -> bytes:
    """Return the bytes of an executable."""
    with tempfile.TemporaryDirectory() as folder, _without_notes(folder):
        path = Path(folder, "bytecode")
        bytecode.write_to_file(str(path))
        return path.read_bytes()


@contextlib.contextmanager
def _without_notes(folder: str) -> Iterator[None]:
    """Drop the lines that TVM writes to standard error for each constant of an executable.

    Lines of other threads in the meantime are written afterwards.
    """
    try:
        original = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    path = Path(folder, "errors")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 2)
    os.close(handle)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        others = [
            line for line in path.read_bytes().splitlines(True) if b"Scope Saving" not in line
        ]
        if others:
            os.write(2, b"".join(others))
