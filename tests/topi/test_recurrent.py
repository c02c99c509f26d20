"""The recurrences against loops in NumPy: symbolic steps and batch, from no step to several."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from recurrent_layers import LAYERS
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax.op import grad as backward

SIZE = 3


#: The numbers of gates and of initial states.
SIZES = {"lstm": (4, 2), "gru": (3, 1), "gru_reset": (3, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}


@pytest.fixture(scope="module")
def machine():
    """Return a machine with a function of symbolic steps and batch for each layer."""
    bb = relax.BlockBuilder()
    for name, (gates, states) in SIZES.items():
        t, n = (tirx.Var(letter, "int64") for letter in "tn")
        shapes = [[t, n, gates * SIZE], *[[n, SIZE]] * states, [gates * SIZE, SIZE]]
        shapes += [[SIZE]] if name == "gru" else []
        params = [relax.Var(f"x{i}", relax.TensorType(s, "float64")) for i, s in enumerate(shapes)]
        with bb.function(name, params):
            bb.emit_func_output(bb.emit(getattr(backward, name.removesuffix("_reset"))(*params)))
    return relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())


def run(machine, name, steps, batch, scale=1.0):
    gates, states = SIZES[name]
    rng = np.random.default_rng(steps)
    shapes = [(steps, batch, gates * SIZE), *[(batch, SIZE)] * states, (gates * SIZE, SIZE)]
    shapes += [(SIZE,)] if name == "gru" else []
    arrays = [rng.normal(size=shape) * scale for shape in shapes]
    results = machine[name](*map(tvm.runtime.tensor, arrays))
    results = [results] if isinstance(results, tvm.runtime.Tensor) else list(results)
    return arrays, [result.numpy() for result in results]


@pytest.mark.parametrize("name", LAYERS)
def test_values(machine, name):
    for steps, batch in ((1, 1), (4, 1), (1, 3), (7, 5)):
        arrays, results = run(machine, name, steps, batch)
        for result, other in zip(results, LAYERS[name](*arrays), strict=True):
            np.testing.assert_allclose(result, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_no_steps_and_no_sequences(machine, name):
    for steps, batch in ((0, 2), (3, 0)):
        results = run(machine, name, steps, batch)[1]
        assert all(result.shape[:2] == (steps, batch) for result in results)


@pytest.mark.parametrize("name", ["lstm", "gru", "gru_reset"])
def test_saturated_gates(machine, name):
    """Sums beyond the range of exp give gates of 0 and 1, and slopes that are numbers."""
    arrays, results = run(machine, name, 4, 3, scale=1e4)
    assert all(np.isfinite(result).all() for result in results)
    with np.errstate(over="ignore"):
        expected = LAYERS[name](*arrays)[0]
    np.testing.assert_allclose(results[0], expected, atol=1e-12)
