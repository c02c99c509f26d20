"""Modules compiled with kernels and without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from programs import flat, run
from tvm import relax

import relax_grad
from relax_grad.testing._program import without_assertions
from relax_grad.transform import DispatchKernels

HOST = relax_grad.target.host()


def kernels_in(module: tvm.IRModule, target=HOST) -> list[str]:
    """Return the names of the kernels that replace a module's calls, one for each call.

    A number is appended to the names of different kernels of one operator.
    """
    dispatched = DispatchKernels(target)(module)
    return [
        binding.value.args[0].name_hint
        for variable, function in dispatched.functions_items()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
        and isinstance(binding.value.args[0] if binding.value.args else None, tvm.ir.GlobalVar)
    ]


def run_both(module: tvm.IRModule, name: str, values: Sequence[np.ndarray], target=HOST) -> tuple:
    """Return the results of a function under relax_grad's pipeline, and under TVM's without LLVM's
    optimizations."""
    ours = run(module, name, *values, target=target, pipeline="relax_grad")
    stock = tvm.target.Target({**target.export(), "opt-level": 0})
    with without_assertions():
        return ours, run(module, name, *values, target=stock)


def check_dispatch(
    module: tvm.IRModule,
    name: str,
    values: Sequence[np.ndarray],
    kernels: Sequence[str],
    rtol: float = 1e-5,
) -> None:
    """Assert which kernels replace a module's calls, and that the numbers do not change."""
    names = [name.rstrip("0123456789") for name in kernels_in(module)]
    assert sorted(names) == sorted(kernels)
    ours, stock = (flat(outputs) for outputs in run_both(module, name, values))
    for result, wanted in zip(ours, stock, strict=True):
        assert result.dtype == wanted.dtype
        scale = max(1.0, np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(result, wanted, rtol=rtol, atol=rtol * scale)
