"""The base class of the passes that depend on the target."""

from __future__ import annotations

import tvm

from ..target import CPU


class TargetPass:
    """A pass that depends on the target.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        By default the target that is current when the pass runs. If LLVM does not compile for the
        target, the pass leaves the module unchanged.
    """

    def __init__(self, target: tvm.target.Target | str | dict | None = None):
        self._target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        cpu = CPU.current(self._target)
        return mod if cpu is None else self._transformed(mod, cpu)

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        raise NotImplementedError
