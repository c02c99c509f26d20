"""The number of threads of TVM's runtime, tested in subprocesses because it cannot be reset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import Forks, run_python

from relax_grad import set_num_threads
from relax_grad.cpu import threads
from relax_grad.testing.fuzz.session import can_fork

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
more_than_one = pytest.mark.skipif(PROCESSORS < 2, reason="this machine has one processor")


def without_threads(**environment: str) -> dict[str, str]:
    """Return the environment of this process, with these numbers of threads and no others."""
    inherited = {k: v for k, v in os.environ.items() if "NUM_THREADS" not in k and "OMP" not in k}
    return inherited | environment


def run(script: str, **environment: str) -> list[str]:
    """Run a script, with relax_grad imported, and return the words that it prints."""
    script = f"import os, threading\nimport relax_grad\nfrom relax_grad import *\n{script}"
    return run_python(script, without_threads(**environment)).split()


def test_by_default_all_cores():
    numbers = run(
        """
print(set_num_threads(), relax_grad.cpu.threads.cores(), get_num_threads())
threading.Thread(target=lambda: print(get_num_threads(), os.environ["TVM_NUM_THREADS"])).start()
"""
    )
    assert len(numbers) == 5
    assert len(set(numbers)) == 1


@more_than_one
def test_a_number_up_and_down():
    numbers = run(
        """
for number in (1, 2, 1, 2):
    print(set_num_threads(number), get_num_threads())
"""
    )
    assert numbers == list("11221122")


@more_than_one
def test_threads_that_have_started_are_not_added_to():
    numbers = run(
        """
print(get_num_threads(), set_num_threads(), len(os.sched_getaffinity(0)))
try:
    set_num_threads(2)
except RuntimeError as error:
    print("with", str(error).split("with ")[1].split()[0], os.environ["TVM_NUM_THREADS"])
""",
        TVM_NUM_THREADS="1",
    )
    assert numbers == ["1", "1", str(PROCESSORS), "with", "1", "1"]


@pytest.mark.parametrize("number", [0, -1, PROCESSORS + 1])
def test_a_number_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=f"an integer from 1 to {PROCESSORS}, but it is {number}"):
        set_num_threads(number)


@pytest.mark.parametrize("number", [1.0, "2", True])
def test_a_number_that_is_not_an_int_is_refused(number):
    with pytest.raises(TypeError, match="number must be an int"):
        set_num_threads(number)


def test_threads_of_one_core_count_once(monkeypatch):
    monkeypatch.setattr(threads, "_PROCESSORS", [0, 1, 2, 3])
    monkeypatch.setattr(threads, "_siblings", lambda processor: str(processor % 2))
    assert threads.cores() == 2
    for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert threads.default_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.default_threads() == 3
    monkeypatch.setenv("TVM_NUM_THREADS", "none")
    assert threads.default_threads() == 2


#: Programs that run functions of TVM on tensors of PyTorch.
OF_TORCH = {
    "wrap": """
from relax_grad.frontend.torch import wrap
model = wrap(torch.nn.Linear(2, 1), (torch.ones(3, 2),))
def call():
    model(torch.ones(3, 2)).sum().backward()
""",
    "Trainer": """
from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, Trainer, train_step
model = from_module(torch.nn.Linear(2, 1), (torch.ones(3, 2),), loss=torch.sum)
trainer = Trainer(train_step(model, SGD()))
def call():
    trainer.step(torch.ones(3, 2))
""",
}

COUNT = """
before = threading.active_count()
for _ in range(2):
    call()
print(torch.get_num_threads(), threading.active_count() - before)
"""


@more_than_one
@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "active"}, {"OMP_NUM_THREADS": "1"}])
def test_threads_of_torch_sleep(chosen, tmp_path):
    """As many sleeping teams are started as OpenMP needs to have more threads than there are
    processors.

    PyTorch reads the environment when it is imported. Each program has a forked process, without
    threads at its start.
    """
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    if not list(Path(torch.__file__).parent.glob("lib/libgomp*")):
        pytest.skip("PyTorch's threads are not those of GNU's OpenMP")
    if not can_fork():
        pytest.skip("this system does not fork processes")
    imports = "import threading, torch, relax_grad.frontend.torch, relax_grad.training"
    forks = Forks(without_threads(**{"OMP_NUM_THREADS": "2", **chosen}), imports)
    try:
        for name, text in OF_TORCH.items():
            program = tmp_path / f"{name}.py"
            program.write_text(f"import threading, torch\n{text}{COUNT}")
            code, output, errors = forks.run_apart(program)
            assert code == 0, errors
            number, started = map(int, output.split())
            assert started == (0 if chosen else PROCESSORS // number), name
    finally:
        forks.close()
