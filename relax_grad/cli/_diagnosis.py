"""Findings of ``relax-grad doctor``: the installed versions, the processor, and a few checks."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import tvm
from tvm.target import codegen

from .. import _packages, registry
from ..cpu import threads
from ..cpu.codegen.cache import VARIABLE, of_environment
from ..cpu.target import CPU, host
from ..cpu.tiles import Permission, permission
from ..ir import compat
from ._text import count_of, last_line

#: LLVM's names of processor features that make vectors wider or arithmetic faster.
_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512vl", "avx512bf16", "amx-bf16", "neon", "sve")

#: Operators with checked gradients: a convolution, a pool, a loss, a norm and a matrix product.
_CHECKED = (
    "relax.nn.conv2d",
    "relax.nn.max_pool2d",
    "relax.nn.nll_loss",
    "relax.nn.layer_norm",
    "relax.matmul",
)


#: The compilation for the processor of this machine.
_FAST = 'tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")'


@dataclass(frozen=True)
class Problem:
    """A problem, or a setting that wastes time, and its remedy."""

    symptom: str
    remedy: str


@dataclass(frozen=True)
class Check:
    """A check that ran: its name, its time, and its problem if it failed."""

    name: str
    seconds: float
    problem: Problem | None


def facts() -> Iterator[tuple[str, str]]:
    """Yield names and values of the installation: versions, processor, threads, GPUs, operators."""
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    yield "NumPy", np.__version__
    yield "PyTorch", _torch()
    yield "TVM", os.path.dirname(tvm.__file__)
    yield "LLVM", str(codegen.llvm_version_major())
    yield "processor", _processor()
    yield "tiles", _tiles()
    yield "threads", _threads()
    devices = [
        f"{kind} ({'a device' if tvm.runtime.Device(code, 0).exist else 'no device'})"
        for kind, code in _device_types()
        if tvm.runtime.enabled(kind)
    ]
    yield "GPUs", ", ".join(devices) or "not in this build of TVM"
    yield "operators", _operators()
    yield "cache", _cache()
    yield "fast path", _FAST


def find_problems() -> Iterator[Problem]:
    """Yield the known problems of the installation, without compiling or running programs."""
    ffi = compat.installed_version("apache-tvm-ffi")
    yield from _of_ffi(ffi)
    yield from _of_packages()
    if not tvm.runtime.enabled("llvm"):
        yield Problem(
            "this build of TVM has no LLVM, so it cannot compile for CPUs",
            "install apache-tvm from PyPI, or build it with USE_LLVM=ON",
        )
    directory, fault = of_environment()
    reason = fault if directory is None else directory.refusal()
    if reason is not None:
        yield Problem(
            f"compiled programs are not kept: {reason}",
            f"set {VARIABLE} to a directory that only you may write to, or to 0 for no cache",
        )
    running, cores = threads.get_num_threads(), threads.cores()
    if running > cores:
        yield Problem(
            f"TVM uses {running} threads, but this process has {count_of(cores, 'core')}",
            f"unset TVM_NUM_THREADS and OMP_NUM_THREADS, or set the first to {cores}",
        )


def find_waste(target: tvm.target.Target) -> Iterator[Problem]:
    """Yield the settings of the environment and of a target that leave cores or vector extensions
    unused."""
    running, cores = threads.get_num_threads(), threads.cores()
    if running < cores:
        names = [name for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS") if name in os.environ]
        reason = f" ({names[0]}={os.environ[names[0]]})" if names else ", TVM's default"
        first = f"unset {' and '.join(names)}, and call" if names else "call"
        yield Problem(
            f"TVM uses {count_of(running, 'thread')}{reason}, and leaves "
            f"{count_of(cores - running, 'core')} of {cores} idle",
            f"{first} relax_grad.set_num_threads() before the first program runs",
        )
    own, named = _host(), CPU.of(target)
    if named is None:
        return
    if named.lanes < own.lanes:
        yield Problem(
            f"the target {_named(target)} uses vectors of {named.lanes} float32, and this "
            f"processor has vectors of {own.lanes}",
            f"fast path: {_FAST}",
        )
    if named.cores < cores:
        yield Problem(
            f"the target {_named(target)} divides work for {count_of(named.cores, 'core')} of "
            f"{cores}",
            f"fast path: {_FAST}",
        )


def _cache() -> str:
    """Return the directory of compiled programs with its size."""
    directory, _ = of_environment()
    if directory is None:
        return "off"
    used = sum(entry.size for entry in directory.entries())
    return f"{directory.path} ({used / 2**20:.1f} MiB)"


def _named(target: tvm.target.Target) -> str:
    """Return the kind of a target, and its processor if it names one."""
    processor = target.attrs.get("mcpu")
    return f"{target.kind.name} for {processor}" if processor else target.kind.name


def _of_ffi(ffi: str | None) -> Iterator[Problem]:
    """Yield the known problems of a version of apache-tvm-ffi; None if it is unknown."""
    if ffi is not None and compat.parse_version(ffi) >= compat.FFI_END:
        yield Problem(
            f"apache-tvm-ffi {ffi} was not tested with this TVM, and may end the process",
            f"pip install '{compat.FFI_REQUIREMENT}'",
        )


def _of_packages() -> Iterator[Problem]:
    """Yield the problems of installed optional packages: they are broken or too old."""
    for name in _packages.REQUIREMENTS:
        problem = _packages.fault(name) if _packages.is_installed(name) else None
        if problem is not None:
            yield Problem(*problem)


def _torch() -> str:
    if not _packages.is_installed("torch"):
        return "not installed (comparisons with it are left out)"
    if not _packages.is_usable("torch"):
        return "cannot be used"
    import torch

    cuda, version = torch.version.cuda, torch.__version__
    devices = "for CPUs"
    if cuda is not None:
        devices = f"CUDA {cuda}, {count_of(torch.cuda.device_count(), 'device')}"
    return ", ".join(filter(None, (version, devices, _packages.newer_torch(version))))


def _tiles() -> str:
    """Return whether products of bfloat16 use the processor's tiles."""
    return {
        Permission.ABSENT: "none (AMX)",
        Permission.GRANTED: "AMX, for products of bfloat16",
        Permission.REFUSED: "AMX, but the system refuses them; bfloat16 is multiplied as float32",
    }[permission()]


def _host() -> CPU:
    cpu = CPU.of(host())
    assert cpu is not None, "host() is a CPU"
    return cpu


def _processor() -> str:
    target, cpu = host(), _host()
    features = [name for name in _FEATURES if codegen.target_has_features(name, target)]
    return (
        f"{target.attrs['mcpu']} ({', '.join(features) or 'no supported vector extensions'}): "
        f"vectors of {cpu.lanes} float32, {cpu.registers} registers"
    )


def _threads() -> str:
    set_by = [name for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS") if name in os.environ]
    values = ", ".join(f"{name}={os.environ[name]}" for name in set_by)
    running, cores = threads.get_num_threads(), threads.cores()
    idle = "; relax_grad.set_num_threads() uses all of them" if running < cores else ""
    return f"{running} of TVM, {count_of(cores, 'core')}{idle}" + (f" ({values})" if values else "")


def _device_types() -> list[tuple[str, int]]:
    kinds = ("cuda", "rocm", "vulkan", "metal", "opencl")
    return [(kind, tvm.runtime.device(kind, 0).dlpack_device_type()) for kind in kinds]


def _operators() -> str:
    kinds = {name: registry.classify(name).kind for name in registry.operators()}
    parts = []
    for is_backward, noun in ((False, "of TVM"), (True, "backward operators")):
        found = [
            k for name, k in kinds.items() if registry.is_backward_operator(name) == is_backward
        ]
        parts.append(f"{found.count('differentiable')} of {len(found)} {noun}")
    unknown = [name for name, kind in kinds.items() if kind == "unclassified"]
    more = f"; unknown to relax_grad: {', '.join(unknown)}" if unknown else ""
    return f"differentiable: {', '.join(parts)}{more}"


def _check_gradient(name: str) -> None:
    from ..testing import samples

    samples.samples(name)[0].check(order=1)


def run_checks() -> Iterator[Check]:
    """Run the checks, and yield each after it ran."""
    checks: dict[str, Callable[[], object]] = {
        f"gradient of {name}": partial(_check_gradient, name) for name in _CHECKED
    }
    checks["a training step, compiled for this processor"] = _check_pipeline
    for name, check in checks.items():
        start, problem = time.perf_counter(), None
        try:
            check()
        except Exception as error:  # any error is a problem to report
            problem = Problem(
                f"{name}: {type(error).__name__}: {last_line(error)}",
                "report it with this output; relax-grad check tries all operators",
            )
        yield Check(name, time.perf_counter() - start, problem)


def _check_pipeline() -> None:
    """Compare a loss and its gradient, compiled by relax_grad's pipeline, with NumPy."""
    from tvm import relax

    from ..functional import value_and_grad

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype("float32") for shape in ((64, 40), (40, 10)))
    params = [
        relax.Var(name, relax.TensorType(array.shape, "float32"))
        for name, array in (("x", x), ("w", w))
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            scores = bb.emit(relax.op.tanh(bb.emit(relax.op.matmul(*params))))
            total = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(scores, scores))))
        bb.emit_func_output(total)
    executable = tvm.compile(value_and_grad(bb.get(), wrt="w"), host(), relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    loss, (gradient,) = machine["main_adjoint"](*map(tvm.runtime.tensor, (x, w)))
    tanh = np.tanh(x.astype("float64") @ w)
    np.testing.assert_allclose(loss.numpy(), (tanh**2).sum(), rtol=1e-4)
    wanted = x.T @ (2 * tanh * (1 - tanh**2))
    np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-3, atol=1e-3)
