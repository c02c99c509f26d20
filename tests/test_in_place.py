"""Programs whose calls write to their arguments: each operator reads the values that it was given."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from in_place import random_function, with_helper
from programs import to_numpy
from tvm import relax

import relax_grad


def check(seeds, pipeline="relax_grad", steps=24):
    """Compile random functions in one module, and compare each with NumPy."""
    bb = relax.BlockBuilder()
    helper = with_helper(bb)
    cases = {
        f"program{seed}": random_function(
            bb, f"program{seed}", helper, np.random.default_rng(seed), steps
        )
        for seed in seeds
    }
    executable = tvm.compile(bb.get(), relax_grad.target.host(), relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    wrong = []
    for name, (inputs, wanted) in cases.items():
        found = to_numpy(machine[name](*map(tvm.runtime.tensor, inputs)))
        close = [
            np.allclose(each, other, rtol=1e-3, atol=1e-3 * max(1, np.abs(other).max()))
            for each, other in zip(found, wanted, strict=True)
        ]
        if not all(close):
            wrong.append(name)
    return wrong


def test_random_programs():
    assert check(range(12)) == []


@pytest.mark.slow
def test_more_random_programs():
    for first in range(0, 400, 20):
        assert check(range(first, first + 20), steps=40) == []
