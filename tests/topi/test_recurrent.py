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
        t, n = (tirx.Var(each, "int64") for each in "tn")
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
    found = machine[name](*map(tvm.runtime.tensor, arrays))
    found = [found] if isinstance(found, tvm.runtime.Tensor) else list(found)
    return arrays, [each.numpy() for each in found]


@pytest.mark.parametrize("name", LAYERS)
def test_values(machine, name):
    for steps, batch in ((1, 1), (4, 1), (1, 3), (7, 5)):
        arrays, found = run(machine, name, steps, batch)
        for one, other in zip(found, LAYERS[name](*arrays), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_no_steps_and_no_sequences(machine, name):
    for steps, batch in ((0, 2), (3, 0)):
        found = run(machine, name, steps, batch)[1]
        assert all(each.shape[:2] == (steps, batch) for each in found)


@pytest.mark.parametrize("name", ["lstm", "gru", "gru_reset"])
def test_saturated_gates(machine, name):
    """Sums beyond the range of exp give gates of 0 and 1, and slopes that are numbers."""
    arrays, found = run(machine, name, 4, 3, scale=1e4)
    assert all(np.isfinite(each).all() for each in found)
    with np.errstate(over="ignore"):
        expected = LAYERS[name](*arrays)[0]
    np.testing.assert_allclose(found[0], expected, atol=1e-12)
