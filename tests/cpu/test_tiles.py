"""Tiles (AMX) in a process: each task configures and releases them, signals and other libraries may
interrupt it, and exported steps ask for permission."""

from __future__ import annotations

import ctypes
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
import tvm
from kernel_cases.case import kernel_of
from machines import compile_kernels, of_halves
from tvm import relax

import relax_grad.target
from relax_grad.cpu.codegen import lower
from relax_grad.cpu.kernel.language import amx
from relax_grad.cpu.kernel.language._amx_code import LLVM
from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tiles import Permission, permission
from relax_grad.training import SGD, TrainStep, train_step

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: The operators whose kernels have tiles, and the batch of their cases.
OPERATORS = (
    *("relax.matmul", "relax.nn.conv2d", "relax.grad.conv2d_backward_weight"),
    *("relax.nn.attention", "relax.grad.attention_backward", "relax.grad.gru"),
    *("relax.grad.recurrent_backward", "relax.grad.quantized_matmul"),
)
BATCH = 3

#: Counts of threads with tiles, of configurations, and of uses and releases without one.
_NOTED = """
@relax_grad_open = linkonce_odr global i32 0
@relax_grad_begun = linkonce_odr global i32 0
@relax_grad_faults = linkonce_odr global i32 0
@relax_grad_own = linkonce_odr thread_local global i32 0
define linkonce_odr hidden void @relax_grad_tiles_note(i32 %change) alwaysinline nounwind {
entry:
  %own = load i32, ptr @relax_grad_own
  %begins = icmp eq i32 %change, 1
  br i1 %begins, label %begin, label %other
begin:
  %new = sub i32 1, %own
  store i32 1, ptr @relax_grad_own
  %a = atomicrmw add ptr @relax_grad_open, i32 %new monotonic
  %b = atomicrmw add ptr @relax_grad_begun, i32 1 monotonic
  ret void
other:
  %fault = sub i32 1, %own
  %c = atomicrmw add ptr @relax_grad_faults, i32 %fault monotonic
  %d = atomicrmw add ptr @relax_grad_open, i32 %change monotonic
  %left = add i32 %own, %change
  store i32 %left, ptr @relax_grad_own
  ret void
}
"""


def noting() -> str:
    """Return the functions of tiles with a count of their calls."""

    def noted(found: re.Match) -> str:
        change = {"begin": 1, "end": -1}.get(found[2], 0)
        return f"{found[1]}\n  call void @relax_grad_tiles_note(i32 {change})"

    names = "begin|end|clear|load|add|store"
    pattern = rf"(define linkonce_odr hidden i32 @relax_grad_tiles_({names})\([^{{]*{{\s*entry:)"
    text, count = re.subn(pattern, noted, LLVM)
    assert count == 6
    return _NOTED + text


class Library:
    """Compiled functions in a file, and the counts of the threads' calls."""

    def __init__(self, module: tvm.runtime.Module, path: Path):
        module.export_library(str(path))
        self.functions, self._counts = tvm.runtime.load_module(str(path)), ctypes.CDLL(str(path))

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._counts, f"relax_grad_{name}").value


def drawn(inputs) -> list:
    rng = np.random.default_rng(0)
    return [
        tvm.runtime.tensor(
            (rng.integers(0, 3, shape) if "int" in dtype else rng.normal(size=shape)).astype(dtype)
        )
        for shape, dtype in inputs
    ]


def test_every_task_configures_and_releases_its_tiles(monkeypatch, tmp_path):
    """No thread uses tiles that it has not configured, or has tiles after a kernel."""
    monkeypatch.setattr(amx, "LLVM", noting())
    target, calls = of_halves("amx"), {}
    for case in kernel_cases.cases():
        if case.op in OPERATORS and case.op not in calls and case.takes("bfloat16"):
            call = kernel_of(case, target, BATCH, "bfloat16")
            if "relax_grad_tiles_begin" in str(call.function):
                calls[case.op] = call
    assert set(calls) == set(OPERATORS)
    module = compile_kernels({f"f{i}": x.function for i, x in enumerate(calls.values())}, target)
    library, begun = Library(module, tmp_path / "kernels.so"), 0
    for i, (op, call) in enumerate(calls.items()):
        inputs, outputs = call.at(BATCH)
        results = [tvm.runtime.empty(*output) for output in outputs]
        library.functions[f"f{i}"](*drawn(inputs), *results)
        assert library.count("begun") > begun, op
        assert (library.count("open"), library.count("faults")) == (0, 0), op
        begun = library.count("begun")


def product(rows: int = 40) -> tvm.tirx.PrimFunc:
    """Return the kernel of a product of [rows, 96] and [96, 64], for two threads."""
    cpu = CPU.of(of_halves("amx"))
    make = lambda: matmul(Matmul(rows, 64, 96), cpu, way="packed")  # noqa: E731
    return stored_as(["bfloat16", "bfloat16", "float32"], 1, make)


def test_a_call_that_fails_leaves_no_tiles(monkeypatch, tmp_path):
    """Kernels raise errors before they configure tiles: of arguments that do not fit."""
    monkeypatch.setattr(amx, "LLVM", noting())
    target = of_halves("amx")
    module = lower.library({"product": product()}, lower.optimizing(target))
    library = Library(module, tmp_path / "product.so")
    a, b, short = drawn([(shape, "bfloat16") for shape in ((40, 96), (96, 64), (39, 96))])
    result = tvm.runtime.empty((40, 64), "float32")
    for _ in range(2):
        with pytest.raises(ValueError, match="expected 40"):
            library.functions["product"](short, b, result)
        assert (library.count("open"), library.count("begun")) == (0, 0)
    library.functions["product"](a, b, result)
    wanted = a.numpy().astype("float64") @ b.numpy().astype("float64")
    np.testing.assert_allclose(result.numpy(), wanted, atol=1e-4)
    assert library.count("open") == 0
    assert library.count("begun") > 0


_PROCESS = """
import ctypes, faulthandler, os, signal, sys, threading, time
import numpy as np
with_torch = len(sys.argv) > 2
if with_torch:
    import torch
else:
    sys.modules["torch"] = None
import ml_dtypes, tvm
faulthandler.enable()
syscall = ctypes.CDLL(None).syscall

def granted():
    # ARCH_GET_XCOMP_PERM
    bits = ctypes.c_uint64()
    assert syscall(158, 0x1022, ctypes.byref(bits)) == 0
    return bits.value >> 18 & 1

rng = np.random.default_rng(0)
shapes = (40, 96), (96, 64)
arrays = [rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in shapes]
wanted = arrays[0].astype("float64") @ arrays[1].astype("float64")
tensors = [tvm.runtime.tensor(x) for x in arrays]
library = tvm.runtime.load_module(sys.argv[1])
had = granted() if "amx" in sys.argv else None

def compute():
    result = tvm.runtime.empty((40, 64), "float32")
    library["product"](*tensors, result)
    return result.numpy()

first = compute()
np.testing.assert_allclose(first, wanted, atol=1e-4)
if "amx" in sys.argv:
    assert granted()
    assert with_torch or not had

def check():
    assert compute().tobytes() == first.tobytes()

def during(seconds, *steps):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for step in steps:
            step()

# Signals, whose handlers compute too.
count = 0
def handler(*_):
    global count
    count += 1
    check()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
while count < 6:
    during(0.1, check)
signal.setitimer(signal.ITIMER_REAL, 0)

steps = [check]
if with_torch:
    left = torch.randn(192, 160, dtype=torch.bfloat16)
    right = torch.randn(160, 224, dtype=torch.bfloat16)
    alone = left @ right
    def beside():
        assert torch.equal(left @ right, alone)
    steps.append(beside)
    during(0.1, *steps)

# Threads that start later, at once.
errors = []
def run(step):
    try:
        during(0.1, step)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=run, args=(step,)) for step in [*steps, check]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors

child = os.fork()
if not child:
    check()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
check()
"""


@pytest.fixture(scope="module")
def exported_product(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("product") / "product.so"
    compile_kernels({"product": product()}, of_halves("amx")).export_library(str(path))
    return str(path)


def run_process(*arguments: str) -> None:
    command = [sys.executable, "-c", _PROCESS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_signals_threads_and_forks(exported_product):
    """With tiles where this processor has them, and with vectors elsewhere."""
    run_process(exported_product)


def test_another_library_that_multiplies_bfloat16(exported_product):
    """oneDNN within PyTorch configures tiles in the same threads, and in others at once."""
    pytest.importorskip("torch")
    run_process(exported_product, "torch")


@pytest.mark.skipif(
    permission() is Permission.ABSENT,
    reason="the processor has no tiles: amx_bf16 is not in /proc/cpuinfo",
)
@pytest.mark.parametrize("others", [(), ("torch",)])
def test_the_first_product_asks_for_permission(exported_product, others):
    """Not the import of the library. PyTorch may have asked before."""
    if others:
        pytest.importorskip("torch")
    run_process(exported_product, *others, "amx")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="levels are those of x86-64"
)
def test_exported_steps_have_a_version_with_tiles(tmp_path):
    """It asks Linux for the permission by itself."""
    level, step = relax_grad.target.x86_64, made_step()
    targets = [level("v3", 2), level("v4", 2, tiles=True)]
    step.export(tmp_path, target=targets, values={"w": np.ones((96, 64), "float32")})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["levels"] == ["x86-64-v3", "x86-64-v4"]
    code = (tmp_path / "step.so").read_bytes()
    # tilerelease, and the request of arch_prctl in a register.
    assert b"\xc4\xe2\x78\x49\xc0" in code
    assert b"\x23\x10\x00\x00" in code


def made_step() -> TrainStep:
    """Return the step of the mean of a product, in mixed precision."""
    x, w = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (40, 96)), ("w", (96, 64)))
    )
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            product = bb.emit(relax.op.matmul(x, w))
            loss = bb.emit_output(relax.op.mean(relax.op.multiply(product, product)))
        bb.emit_func_output(loss)
    return train_step(bb.get(), SGD(), wrt=["w"], precision="bf16")
