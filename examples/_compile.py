"""Compile for a target and load on its device."""

from __future__ import annotations

import tvm
from tvm import relax

import relax_grad  # noqa: F401  (registers the pipeline)


def compile_module(module: tvm.IRModule, target: tvm.target.Target) -> relax.VirtualMachine:
    """Compile a module with relax_grad's pipeline and load it on the target's device."""
    device = tvm.runtime.Device(target.get_target_device_type(), 0)
    executable = tvm.compile(module, target=target, relax_pipeline="relax_grad")
    return relax.VirtualMachine(executable, device)
