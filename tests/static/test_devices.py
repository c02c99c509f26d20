"""Exported steps train on microcontrollers, AArch64 and RISC-V under emulators."""

from __future__ import annotations

import json

import numpy as np
import pytest
from static_models import ROWS, batches, digits_step
from static_trainer import tensors_in

import relax_grad
from relax_grad.training import Trainer

from ._devices import devices

STEPS = 8
DEVICES = devices()

#: Differences from x86-64-v2, relative to the largest number of a tensor: these processors fuse
#: multiplications and additions.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the trainer of Python, with its losses, a prediction and the state of each step."""
    pytest.importorskip("safetensors")
    trainer = Trainer(digits_step(), target=relax_grad.target.x86_64("v2", 1), seed=7)
    first = tmp_path_factory.mktemp("devices") / "first.safetensors"
    trainer.save(first)
    losses = [trainer.step(**batch).loss for batch in batches(STEPS)]
    last = first.with_name("last.safetensors")
    trainer.save(last)
    prediction = trainer.predict(batches(1)[0]["input"], ema=True).numpy()
    return trainer, first, losses, prediction, tensors_in(last.read_bytes())


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    """Return a function that trains on a device, and returns what it writes; once for each."""
    trainer, first, *_ = trained
    known: dict[str, bytes] = {}

    def train(name: str) -> bytes:
        if name not in known:
            folder = tmp_path_factory.mktemp(name) / "step"
            trainer.load(first)
            trainer.export(folder, runtime="none", target=DEVICES[name].target)
            data = [batch[key].tobytes() for batch in batches(STEPS) for key in batch]
            known[name] = DEVICES[name].train(folder, b"".join(data), ROWS, STEPS)
        return known[name]

    return train


def installed() -> list[str]:
    return [name for name, device in DEVICES.items() if device.missing() is None]


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-3))


@pytest.mark.parametrize("name", DEVICES)
def test_steps_follow_python(name, trained, written):
    """Losses, a prediction with moving averages, the saved state, and the text of an error."""
    if DEVICES[name].missing() is not None:
        pytest.skip(DEVICES[name].missing())
    _, _, losses, prediction, state = trained
    data = written(name)
    losses_end, prediction_end = 8 * STEPS, 8 * STEPS + prediction.nbytes
    assert difference(np.frombuffer(data[:losses_end], "f8"), np.array(losses)) < TOLERANCE
    found = np.frombuffer(data[losses_end:prediction_end], "f4").reshape(prediction.shape)
    assert difference(found, prediction) < TOLERANCE
    refused = data[prediction_end : prediction_end + 128].rstrip(b"\0").decode()
    assert refused.startswith("target is 10 at its element 1, but it selects one of 10 elements")
    saved = saved_in(data[prediction_end + 128 :])
    assert saved.keys() == state.keys()
    for key, wanted in state.items():
        dtype = "i8" if key == "optimizer_state/step" else "f4"
        assert difference(np.frombuffer(saved[key], dtype), np.frombuffer(wanted, dtype)) < 1e-3, (
            key
        )


def saved_in(room: bytes) -> dict[str, bytes]:
    """Return the tensors of a file that zeros follow."""
    length = int.from_bytes(room[:8], "little")
    header = json.loads(room[8 : 8 + length])
    end = max(e["data_offsets"][1] for name, e in header.items() if name != "__metadata__")
    return tensors_in(room[: 8 + length + end])


def test_all_devices_compute_the_same_bits(written):
    names = installed()
    if len(names) < 2:
        pytest.skip(f"needs two devices; make cross-tools installs their tools, and has {names}")
    assert len({written(name) for name in names}) == 1, names
