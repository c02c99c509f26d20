"""The properties of a CPU target: vector width, registers, cores."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.target import codegen

from .threads import default_threads


@dataclass(frozen=True)
class CPU:
    """The properties of a target that kernels are generated for.

    Attributes
    ----------
    lanes : int
        The number of float32 elements in a vector register: 16 with AVX-512, 8 with AVX2, 4 otherwise.
    registers : int
        The number of vector registers: 32 with AVX-512 and on ARM, 16 with AVX2 and SSE.
    cores : int
        The number of threads that share the work. More threads at run time do no harm. The results do not depend on
        the number of threads at run time.
    """

    lanes: int
    registers: int
    cores: int

    @staticmethod
    def current(target: tvm.target.Target | str | dict | None = None) -> CPU | None:
        """Return the properties of a target, by default of the current one; None if LLVM does not compile for it."""
        target = tvm.target.Target.current() if target is None else target
        return None if target is None else CPU.of(target)

    @staticmethod
    def of(target: tvm.target.Target | str | dict) -> CPU | None:
        """Return the properties of a target; None if LLVM does not compile for it.

        Raises
        ------
        ValueError
            If TVM has no such target, or its number of cores is negative.

        Examples
        --------
        >>> from relax_grad.target import CPU
        >>> CPU.of({"kind": "llvm", "mcpu": "haswell", "num-cores": 4})
        CPU(lanes=8, registers=16, cores=4)
        """
        target = tvm.target.Target(target)
        if target.kind.name != "llvm":
            return None
        cores = int(target.attrs.get("num-cores", 0)) or default_threads()
        if cores < 0:
            raise ValueError(f"num-cores of the target must be positive, but it is {cores}")
        if codegen.target_has_features("avx512f", target):
            return CPU(16, 32, cores)
        if codegen.target_has_features(["avx2", "fma"], target):
            return CPU(8, 16, cores)
        return CPU(4, 32 if codegen.target_has_features("neon", target) else 16, cores)


def host() -> tvm.target.Target:
    """Return the target of this machine, with the name of its processor and its number of cores.

    The plain target ``"llvm"`` means the baseline processor of the architecture, with vectors of 4 elements and without
    fused multiply-add. Code for it is many times slower.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.host().kind.name
    'llvm'
    """
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": default_threads()}
    )
