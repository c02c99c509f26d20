"""A function that writes to its arguments has another one that takes its memory before."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from training_models import START, batches, module_of, symbolic

from relax_grad.training import SGD, Adam, Trainer, train_step


def allocations_of(executable: tvm.runtime.Executable, name: str) -> list[str]:
    """Return the calls that allocate storages, in order, and the sizes that are constants."""
    text = executable.as_text().partition(f"@{name}:\n")[2].partition("\n@")[0]
    return re.findall(r"vm\.builtin\.alloc_storage +in: %vm, (c\[\d+\]|%)", text)


@pytest.mark.parametrize("kind", ["constant", "symbolic"])
def test_the_same_memory_is_taken(kind):
    if kind == "constant":
        step = train_step(module_of("float32"), Adam(0.1), wrt=["w", "b"], accumulate=2)
        values = {name: np.float32(value) for name, value in START.items()}
        names, batch = ("step", "accumulate"), batches(1, "float32")[0]
    else:
        step = train_step(symbolic(), SGD(0.01), wrt="w")
        values = {"w": np.eye(256, dtype="float32")}
        names, batch = ("step",), (np.ones((5, 256), "float32"),)
    trainer = Trainer(step, values=values)
    for name in names:
        taken = allocations_of(trainer._executable, f"{name}_memory")
        assert taken == allocations_of(trainer._executable, name)
        assert taken
    before = [tensor.numpy().tobytes() for tensor in trainer.params.values()]
    machine, groups = trainer._machine, trainer._moment.groups
    numbers = [np.array(value, "float64") for value in step.hyperparameters.values()]
    arguments = map(tvm.runtime.tensor, (*batch, *numbers, np.array(0)))
    machine["step_memory"](*arguments, *groups.values())
    assert [tensor.numpy().tobytes() for tensor in trainer.params.values()] == before
