"""The same bits with any number of threads in every run; compiled programs also run in Python
threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import training_steps
import tvm
from dispatched import flat
from kernel_cases import cases
from kernel_cases.case import kernel_of
from machines import TARGETS, WIDEST, compile_kernels
from processes import run_python
from programs import to_numpy
from sweep import share
from tvm import relax

STEPS = {"convolutional": training_steps.convolutional, "transformer": training_steps.transformer}
TARGET = tvm.target.Target(TARGETS[WIDEST])

WEIGHT_GRADIENT = "relax.grad.conv2d_backward_weight"

#: The step between the kernel cases that the default suite runs.
SOME = 30


def compiled(step):
    module, values = STEPS[step]()
    return tvm.compile(module, TARGET, relax_pipeline="relax_grad"), values


def check_threads(folder, chosen, names, numbers=(1, 2, 3, 7)):
    """Compile kernels and steps once, and compare the results of processes with these numbers of
    threads."""
    functions, jobs = {}, []
    for i, case in enumerate(chosen):
        call = kernel_of(case, TARGET, None)
        functions[f"kernel{i}"] = call.function
        jobs.append([f"kernel{i}", *call.at(67)])
    library = compile_kernels(functions, TARGET)
    library.export_library(str(folder / "kernels.so"))
    for name in names:
        executable, values = compiled(name)
        executable.export_library(str(folder / f"{name}.so"))
        np.savez(folder / f"{name}.npz", *values)
    (folder / "jobs.json").write_text(json.dumps({"kernels": jobs, "steps": list(names)}))
    digests = []
    for threads in numbers:
        # The pool of TVM starts with its first use, so that each forked process has one of its own.
        printed = run_python(
            f"import os, sys\nos.environ['TVM_NUM_THREADS'] = '{threads}'\n"
            f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import thread_worker\nthread_worker.main(thread_worker.Path({str(folder)!r}))\n"
        )
        digests += map(json.loads, printed.splitlines())
    titles = {f"kernel{i}": case.name for i, case in enumerate(chosen)}
    differing = [
        titles.get(name, name)
        for name in digests[0]
        if len({digest_of[name] for digest_of in digests}) > 1
    ]
    assert len(digests) == 2 * len(numbers)
    assert differing == []


def test_same_bits_with_some_numbers_of_threads(tmp_path):
    # The sums of these cases are partial sums of several threads.
    of_parts = [case for case in cases() if case.op == WEIGHT_GRADIENT and "(35, 33" in case.detail]
    of_parts += [case for case in cases() if "in parts of k" in case.detail]
    assert len(of_parts) >= 3
    check_threads(tmp_path, cases()[::SOME] + of_parts, ["convolutional"], (1, 3))


@pytest.mark.slow
def test_same_bits_with_any_number_of_threads(tmp_path):
    check_threads(tmp_path, share(cases()[::-1]), STEPS)  # others than of the test above


def test_in_threads_of_python():
    """Two virtual machines of one executable run at the same time, neither in the main thread."""
    executable, values = compiled("convolutional")
    results, failures = [], []

    def run():
        try:
            machine = relax.VirtualMachine(executable, tvm.cpu())
            for _ in range(2):
                tensors = list(map(tvm.runtime.tensor, values))
                results.append(flat(to_numpy(machine["main_adjoint"](*tensors))))
        except Exception as error:  # pytest does not see exceptions of other threads
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert len(results) == 4
    for result in results[1:]:
        for own, wanted in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(own, wanted)
