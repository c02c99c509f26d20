"""Run a compiled training step that is stored in a folder, and print a digest of the results."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm import relax


def run_steps(
    machine: relax.VirtualMachine,
    first: Sequence[np.ndarray],
    groups: Sequence[Sequence[np.ndarray]],
    steps: int = 3,
) -> list[np.ndarray]:
    """Return the loss, the parameters and the optimizer's state after some steps.

    ``first`` are the batch and the hyperparameters, and ``groups`` the tensors of
    ``TrainStep.initial``.
    """
    params, frozen, states, slots = ([*map(tvm.runtime.tensor, group)] for group in groups)
    for i in range(steps):
        inputs = [*first, np.array(i)]  # the last one is the seed
        results = machine["step"](*map(tvm.runtime.tensor, inputs), params, frozen, states, slots)
        loss, params, slots = results[0], results[3], results[5]
    return [tensor.numpy() for tensor in (loss, *params, *slots)]


def main(folder: str) -> None:
    """Run ``step.so`` with the arguments in ``step.pickle``."""
    module = tvm.runtime.load_module(str(Path(folder, "step.so")))
    first, groups = pickle.loads(Path(folder, "step.pickle").read_bytes())
    results = run_steps(relax.VirtualMachine(module, tvm.cpu()), first, groups)
    print(hashlib.sha256(b"".join(array.tobytes() for array in results)).hexdigest())
