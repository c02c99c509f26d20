"""The gradients of programs before and after the fusion of attentions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from sweep import TARGET
from tvm import relax

import relax_grad
from relax_grad.testing import _program
from relax_grad.transform import FuseAttention


def before_and_after(programs: Mapping[str, tuple[tvm.IRModule, Sequence[str]]]) -> dict:
    """Return the functions of the values and the gradients, by ``("before", name)`` and
    ``("after", name)``, compiled as one module.

    Parameters
    ----------
    programs : Mapping
        By name, a module with a function ``main``, and the names of the parameters whose gradients
        are taken.
    """
    adjoints, names = [], []
    for name, (module, wrt) in programs.items():
        for when, mod in (("before", module), ("after", FuseAttention()(module))):
            program = relax_grad.value_and_grad(mod, "main", wrt)
            del program["main"]
            adjoints.append(program)
            names.append((when, name))
    executable = tvm.compile(_program.merge(adjoints), TARGET, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return {name: machine[f"main_{i}_adjoint"] for i, name in enumerate(names, start=1)}
