"""Devices of TVM: their presence, and compilation for them."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import tirx

from ..cpu.pipeline import pipeline


def present(
    kind: str,
    number: int,
    subject: str | None = None,
    remedy: str = "without a GPU, leave device out",
) -> tvm.runtime.Device:
    """Return a device.

    Parameters
    ----------
    kind : str
        TVM's name of the kind of the device.
    number : int
        The number of the device, from 0.
    subject, remedy : str, optional
        Parts of the error: who needs the device, and the way without it.

    Raises
    ------
    RuntimeError
        If TVM cannot use the device.
    """
    if not tvm.runtime.enabled(kind):
        raise RuntimeError(
            f"{subject or _argument(kind)} needs a TVM with support for {kind}, but this one has "
            "none or finds no driver: check that nvidia-smi lists a GPU, and that the libraries of "
            f"CUDA that TVM was built with are installed; {remedy}"
        )
    device = tvm.device(kind, number)
    if not device.exist:
        count = next(i for i in range(number + 1) if not tvm.device(kind, i).exist)
        raise RuntimeError(
            f"{subject or _argument(f'{kind}:{number}')} does not exist: there are {count} such "
            f"devices, from {kind}:0; {remedy}"
        )
    return device


def _argument(device: str) -> str:
    return f'device="{device}"'


def compiled(
    module: tvm.IRModule,
    target: tvm.target.Target,
    options: Mapping[str, object],
    remedy: str = "Make the trainer outside of this PassContext",
) -> tvm.runtime.Executable:
    """Return the executable of a module for a device.

    Raises
    ------
    ValueError
        If TVM would capture graphs.
    """
    if tvm.transform.PassContext.current().config.get("relax.backend.use_cuda_graph", False):
        raise ValueError(
            "relax.backend.use_cuda_graph must be off: TVM launches a captured graph with the "
            f"memory of its first arguments, whatever it is called with. {remedy}"
        )
    return tvm.compile(module, target, **options)


def scheduled(
    target: tvm.target.Target, remedy: str = "Train without device"
) -> tvm.transform.Pass:
    """Return the pipeline for a target, which refuses functions that would run on the host.

    Parameters
    ----------
    target : tvm.target.Target
        The target.
    remedy : str
        The way without the device, for the error.
    """

    @tvm.transform.module_pass(opt_level=0, name="relax_grad.check_scheduled")
    def check(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        names = [
            variable.name_hint
            for variable, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc) and _runs_on_host(function)
        ]
        if names:
            raise ValueError(
                f"the device has no schedule for {', '.join(sorted(names))}: these functions would "
                f"run on the host, which cannot read the device's memory. {remedy}, or write the "
                "model without these operators"
            )
        return mod

    return tvm.transform.Sequential([pipeline(target), check])


def _runs_on_host(function: tirx.PrimFunc) -> bool:
    """Tell whether a function writes to tensors without threads of a device.

    Functions that compute extents run on the host, and have an attribute that says so.
    """
    if function.attrs is not None and bool(function.attrs.get("tirx.is_host_func", False)):
        return False
    threads: list[object] = []

    def see_loop(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            threads.append(loop)

    def see_attribute(statement: tirx.AttrStmt) -> None:
        if statement.attr_key == "thread_extent":
            threads.append(statement)

    rules = [(tirx.For, see_loop), (tirx.AttrStmt, see_attribute)]
    tvm_ffi.structural_walk(function.body, rules, order="pre")
    return not threads
