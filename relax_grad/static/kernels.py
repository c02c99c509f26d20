"""The kernels of a plan: lowered functions, their workspace, and their machine code."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx

from ..cpu.codegen import arguments
from ..cpu.codegen.lower import generated, is_generated, lowered, optimizing
from .plan import aligned

_ALLOCATE, _FREE = "TVMBackendAllocWorkspace", "TVMBackendFreeWorkspace"

#: The functions of lowered kernels that call a packed function by its name.
_PACKED = ("tirx.tvm_call_packed_lowered", "tirx.tvm_call_cpacked_lowered")


def lowered_kernels(
    kernels: Mapping[str, tirx.PrimFunc], target: tvm.target.Target
) -> tvm.IRModule:
    """Return kernels lowered for LLVM's code generator, without checks of their arguments: a plan
    has the tensors that they are compiled for."""
    target = optimizing(target)
    functions: dict = {}
    for are_generated in (True, False):
        own = {n: f for n, f in kernels.items() if is_generated(f) == are_generated}
        if own:
            checked = [n for n, f in own.items() if arguments.parameters(f) is not None]
            functions.update(lowered(own, target, checked).functions_items())
    return tvm.IRModule(functions)


def workspaces(kernels: tvm.IRModule) -> dict[str, int]:
    """Return the bytes of workspace that each lowered kernel takes at most, in one thread.

    Raises
    ------
    ValueError
        If a kernel calls a packed function, or takes a workspace of unknown size.
    """
    return {
        variable.name_hint: _workspace(variable.name_hint, function.body)
        for variable, function in kernels.functions_items()
    }


def object_file(kernels: tvm.IRModule, target: tvm.target.Target) -> bytes:
    """Return the machine code of lowered kernels: an object file in the format of the target."""
    library = generated(kernels, optimizing(target))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernels.o")
        library.write_to_file(str(path))
        return path.read_bytes()


def _workspace(kernel: str, body: tirx.Stmt) -> int:
    """Return the bytes of the largest stack of workspaces.

    A kernel takes and gives back workspaces in the order of its statements. What a parallel loop
    takes in its body is given back at the end of the body.
    """
    taken: list[int] = []
    most = 0
    for name, call in _calls(body):
        if name == _ALLOCATE:
            size = call.args[2]
            if not isinstance(size, tirx.IntImm):
                raise ValueError(
                    f'runtime="none": the kernel {kernel} takes a workspace of {size} bytes, which '
                    "is not known before a step; give symbolic extents values by extents="
                )
            taken.append(aligned(int(size)))
            most = max(most, sum(taken))
        elif name == _FREE:
            taken.pop()
        else:
            raise ValueError(
                f'runtime="none": the kernel {kernel} calls the packed function {name} of TVM\'s '
                "library, which a plan has not; replace the operator, or export with TVM's runtime "
                'by leaving out runtime="none"'
            )
    return most


def _calls(body: tirx.Stmt) -> Iterator[tuple[str, tvm.ir.Call]]:
    """Yield the calls of workspaces and packed functions in the order of execution."""
    found: list[tvm.ir.Call] = []
    tvm_ffi.structural_walk(body, (tvm.ir.Call, found.append), order="pre")
    for call in found:
        operator = str(getattr(call.op, "name", ""))
        first = str(getattr(call.args[0], "value", "")) if len(call.args) else ""
        if operator in _PACKED:
            yield first, call
        elif operator.rpartition(".")[2] in (_ALLOCATE, _FREE):
            yield operator.rpartition(".")[2], call
        elif first in (_ALLOCATE, _FREE):  # a call of an external function
            yield first, call
