"""Compile for CUDA without a device: inspect the kernels, compile them, and run them on the CPU.

:func:`compile_for_cuda` uses TVM's default pipeline for GPUs. It keeps the source of the kernels.
The host code that launches them looks them up among the functions registered in Python.
:meth:`Compiled.emulate` compiles the source with a C++ compiler and ``cuda_emulator.h``, and
registers the kernels there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import tvm
import tvm_ffi
from ptx import stale_loads
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline

from relax_grad.ir.compat import Analyzer

#: The compilation target, which can be created without a device.
TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")

_HOST = tvm.target.Target("llvm", host="llvm")
_HEADER = Path(__file__).with_name("cuda_emulator.h")
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\) {')
_AXES = [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "xyz"]


@dataclass
class Compiled:
    """A module compiled for CUDA.

    Attributes
    ----------
    source : str
        The CUDA source of all kernels.
    launches : dict[str, tuple[str]]
        The kernels, with the axes of each launch.
    on_host : list[str]
        Findings: functions that work on the host instead of launching kernels.
    serial : list[str]
        The kernels in which one thread runs a loop while the others do nothing.
    executable : tvm.runtime.Executable
        The compiled module; it calls kernels that are registered by their names.
    """

    source: str = ""
    launches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    on_host: list[str] = field(default_factory=list)
    serial: list[str] = field(default_factory=list)
    executable: object = None

    def compile(self) -> None:
        """Compile the kernels to machine code with nvcc, which is possible without a device."""
        self._run_nvcc("-cubin", "kernels.cubin")

    def stale_loads(self) -> dict[str, list[str]]:
        """Return the parameters that kernels write, and load as memory that no one writes."""
        return stale_loads(self._run_nvcc("-ptx", "kernels.ptx").decode())

    def _run_nvcc(self, form: str, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            source, made = Path(directory) / "kernels.cu", Path(directory) / name
            source.write_text(self.source)
            _call(["nvcc", "-arch", str(TARGET.attrs["arch"]), form, "-w", source, "-o", made])
            return made.read_bytes()

    @contextlib.contextmanager
    def emulate(self) -> Iterator[Emulation]:
        """Compile the kernels for the CPU, and yield an emulation that runs the module."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "kernels.cpp"
            path.write_text(_for_cpu(self.source))
            library = path.with_suffix(".so")
            flags = ["-std=c++17", "-O0", "-fno-strict-aliasing", "-ffp-contract=off", "-w"]
            _call(["g++", *flags, "-shared", "-fPIC", "-include", _HEADER, path, "-o", library])
            emulation = Emulation(ctypes.CDLL(str(library)), self)
        try:
            for kernel in self.launches:
                launch = functools.partial(emulation.launch, kernel)
                tvm_ffi.register_global_func(kernel, launch, override=True)
            yield emulation
        finally:
            for kernel in self.launches:
                tvm_ffi.registry.remove_global_func(kernel)


class Emulation:
    """A runner for the functions of a module whose kernels are in a shared library."""

    def __init__(self, library: ctypes.CDLL, compiled: Compiled):
        self._library, self._launches = library, compiled.launches
        self._machine = relax.VirtualMachine(compiled.executable, tvm.cpu())
        self._descending = False
        self.launched: set[str] = set()

    def run(self, name: str, values: Sequence[np.ndarray]):
        """Run a function with ascending and with descending thread order.

        Raises
        ------
        AssertionError
            If the results differ in any bit.
        """
        results = []
        for self._descending in (False, True):
            tensors = [tvm.runtime.tensor(value) for value in values]
            results.append(list(leaves(self._machine[name](*tensors))))
        for ascending, descending in zip(*results, strict=True):
            assert ascending.tobytes() == descending.tobytes(), (
                f"{name} depends on the order of its threads"
            )
        return results[0]

    def launch(self, kernel: str, *arguments) -> None:
        """Run a kernel; the arguments are its own, followed by the launch extents."""
        self.launched.add(kernel)
        axes = self._launches[kernel]
        known = dict(zip(axes, arguments[len(arguments) - len(axes) :], strict=True))
        extents = (ctypes.c_int64 * 6)(*(int(known.get(axis, 1)) for axis in _AXES))
        values = [_number(argument) for argument in arguments[: len(arguments) - len(axes)]]
        run = self._library[f"run_{kernel}"]
        run.restype = ctypes.c_char_p
        message = run((ctypes.c_int64 * len(values))(*values), extents, self._descending)
        if message:
            raise AssertionError(f"{kernel}: {message.decode()}")


def leaves(value) -> Iterator[np.ndarray]:
    """Yield the arrays of a result, which may be nested."""
    if hasattr(value, "numpy"):
        yield value.numpy()
    else:
        for item in value:
            yield from leaves(item)


def missing(tool: str) -> str | None:
    """Return the reason why a tool is unavailable, or None."""
    return None if shutil.which(tool) else f"{tool} is not installed"


def compile_for_cuda(module: tvm.IRModule, pipeline: str = "default") -> Compiled:
    """Compile a module through a pipeline of Relax, by default TVM's own for GPUs."""
    compiled = Compiled()
    make_packed_api = tirx.transform.MakePackedAPI

    @tvm.transform.module_pass(opt_level=0)
    def take_kernels(module, _):
        kernels, rest = {}, {}
        for variable, function in module.functions_items():
            launched = function.attrs.get("tirx.kernel_launch_params")
            if launched is None:
                _look_at_host(variable.name_hint, function, compiled)
                rest[variable] = function.with_attr("target", _HOST)
            else:
                name = str(function.attrs.get("global_symbol", variable.name_hint))
                compiled.launches[name] = tuple(map(str, launched))
                _look_at_kernel(name, function, compiled)
                kernels[variable] = function
        compiled.source = _source(tvm.IRModule(kernels, attrs=module.attrs)) if kernels else ""
        return tvm.IRModule(rest, attrs=module.attrs)

    def of_tensors(**_):
        stages, host, device = tvm.tirx.get_default_tir_pipeline(TARGET)

        @tvm.transform.module_pass(opt_level=0)
        def run(module, _):
            def after_the_split():
                return tvm.transform.Sequential([take_kernels, make_packed_api()])

            with mock.patch.object(tirx.transform, "MakePackedAPI", after_the_split):
                return stages(module)

        return run, host, device

    with mock.patch.dict(compilation_pipeline.PIPELINE_MAP, {"without_kernels": of_tensors}):
        compiled.executable = tvm.compile(
            module, TARGET, relax_pipeline=pipeline, tir_pipeline="without_kernels"
        )
    return compiled


def _source(kernels: tvm.IRModule) -> str:
    """Return the CUDA source of kernels."""
    _, _, device_passes = tvm.tirx.get_default_tir_pipeline(TARGET)
    kernels = tirx.transform.FP8StorageLegalize()(kernels)
    kernels = device_passes()(tirx.transform.BF16StorageLegalize()(kernels))
    target = next(iter(kernels.functions.values())).attrs["target"]
    return tvm.get_global_func("target.build.cuda")(kernels, target).inspect_source()


def _look_at_host(name: str, function: tirx.PrimFunc, compiled: Compiled) -> None:
    """Record a host function that stores to memory instead of only launching kernels."""
    stores: list = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append), order="post")
    if stores:
        compiled.on_host.append(f"{name} writes to memory of the device from the host")


def _look_at_kernel(name: str, kernel: tirx.PrimFunc, compiled: Compiled) -> None:
    """Record loops of a kernel that only one thread runs."""
    extents, values = {}, {}

    def see(node) -> None:
        if isinstance(node, tirx.Bind):
            values[node.var] = node.value
        elif node.attr_key == "thread_extent":
            extents[node.node.var] = node.value

    tvm_ffi.structural_walk(kernel.body, [(tirx.AttrStmt, see), (tirx.Bind, see)], order="pre")
    # The second thread or block along each axis with more than one.
    others = []
    for other, extent in extents.items():
        if isinstance(extent, tirx.IntImm) and int(extent) == 1:
            continue
        analyzer = Analyzer()
        for var in extents:
            analyzer.bind(var, tirx.const(int(var.same_as(other)), str(var.ty.dtype)))
        for var, value in values.items():
            analyzer.bind(var, value)
        others.append(analyzer)

    def visit(stmt, conditions) -> None:
        if isinstance(stmt, tirx.IfThenElse):
            visit(stmt.then_case, [*conditions, stmt.condition])
            if stmt.else_case is not None:
                visit(stmt.else_case, conditions)
        elif isinstance(stmt, tirx.For):
            many = not (isinstance(stmt.extent, tirx.IntImm) and int(stmt.extent) <= 1)
            if many and all(
                any(other.can_prove(tirx.Not(condition)) for condition in conditions)
                for other in others
            ):
                compiled.serial.append(f"{name} runs a loop of {stmt.extent} steps in one thread")
            visit(stmt.body, conditions)
        elif isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                visit(part, conditions)
        elif hasattr(stmt, "body"):
            visit(stmt.body, conditions)

    visit(kernel.body, [])


def _for_cpu(source: str) -> str:
    """Turn CUDA source into C++ for ``cuda_emulator.h``, with a function that runs each kernel."""
    source = re.sub(r"#include <(cuda|mma|math_constants|cuda_\w+)\.h>", "", source)
    source = re.sub(r"extern __shared__ (.*)\[\];", r"static \1[1 << 18];", source)
    pieces = [source]
    starts = list(_KERNEL.finditer(source))
    for match, after in zip(starts, [*starts[1:], None], strict=True):
        name, parameters = match.groups()
        body = source[match.end() : after.start() if after else None]
        waits = any(word in body for word in ("__sync", "__shfl"))
        arguments = ", ".join(
            f"({parameter.replace('__restrict__', '').rpartition(' ')[0]})arguments[{i}]"
            for i, parameter in enumerate(parameters.split(","))
        )
        pieces.append(
            f'extern "C" const char* run_{name}(const int64_t* arguments, const int64_t* extents, '
            f"bool descending) {{\n"
            f"  return emulator::launch([&] {{ {name}({arguments}); }}, extents, "
            f"{str(waits).lower()}, descending);\n}}\n"
        )
    return "\n".join(pieces)


def _number(argument) -> int:
    """Return a kernel argument as an integer: the address of a buffer, or a value."""
    if isinstance(argument, ctypes.c_void_p):
        return argument.value or 0
    return int(argument)


def _call(command: Sequence) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command[0]} fails: {result.stderr[-3000:]}"
