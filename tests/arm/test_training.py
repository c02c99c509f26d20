"""Exported steps train on AArch64 with the losses and the parameters of x86."""

from __future__ import annotations

import re

import arm
import numpy as np
import pytest
from trainer_programs import write_data
from training_models import START, batches, digits_of_torch, module_of

import relax_grad
from relax_grad.training import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    RMSprop,
    Trainer,
    _files,
    train_step,
)

OPTIMIZERS = {
    optimizer.__class__.__name__: optimizer
    for optimizer in (
        SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        Adam(0.05, amsgrad=True),
        AdamW(0.05, weight_decay=0.1),
        Adagrad(0.1),
        RMSprop(0.02, momentum=0.5, centered=True),
        Lion(0.02),
        LAMB(0.02),
    )
}


def train(programs, folder, data, *options) -> list[float]:
    """Train on AArch64; return the mean losses of the epochs."""
    printed = arm.emulate(programs / "train", folder, data, *options)
    return [float(text) for text in re.findall(r"mean loss ([^,]+),", printed)]


def compare(first_file, other, tolerance: float) -> None:
    """Assert that two files of the state of training differ by little."""
    (a, first), (b, second) = _files.read(first_file), _files.read(other)
    assert set(a) == set(b)
    errors = {name: arm.difference(a[name], b[name]) for name in a}
    assert {name: error for name, error in errors.items() if error > tolerance} == {}
    assert first["counters"] == second["counters"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, programs, tmp_path):
    """Fifteen updates of each optimizer, with all other parts of a step for one of them."""
    options = {"clip_norm": 1.0, "ema": 0.9, "loss_scale": "dynamic"} if name == "Adam" else {}
    module = module_of("float32", seed=True, states=True)
    step = train_step(
        module, OPTIMIZERS[name], wrt=["w", "b"], states=["mean"], outputs=True, **options
    )
    values = {**START, "mean": np.zeros(3)}
    values = {key: np.asarray(value, "float32") for key, value in values.items()}
    step.export(tmp_path / "model", target=relax_grad.target.arm("cortex-a53"), values=values)
    loader = batches(5, "float32")
    x, y = (np.concatenate(arrays) for arrays in zip(*loader, strict=True))
    write_data(tmp_path / "data", x=x, y=y)
    trainer = Trainer(step, values=values)
    trainer.fit(loader, 3, progress=False)
    trainer.save(tmp_path / "here")
    options = ["--epochs", 3, "--batch", 6, "--save", tmp_path / "there"]
    losses = train(programs, tmp_path / "model", tmp_path / "data", *options)
    wanted = np.reshape(trainer.history.loss, (3, 5)).mean(1)
    np.testing.assert_allclose(losses, wanted, 1e-4)
    compare(tmp_path / "here", tmp_path / "there", 1e-4)


def test_digits_from_torch(programs, tmp_path):
    """A network with batch normalisation and dropout learns digits; it is saved and resumed on
    AArch64."""
    imported, images, labels = digits_of_torch()
    trainer = Trainer(train_step(imported, AdamW(0.01)), seed=7)
    trainer.export(tmp_path / "model", target=relax_grad.target.arm("cortex-a76"))
    count = 1472
    data = tmp_path / "data"
    write_data(data, input=images[:count], target=labels[:count])
    loader = [(images[i : i + 64], labels[i : i + 64]) for i in range(0, count, 64)]
    wanted = []
    for epoch in (1, 2, 3):
        trainer.fit(loader, epoch, progress=False)
        wanted.append(np.mean(trainer.history.loss[-len(loader) :]))
        trainer.save(tmp_path / f"here{epoch}")
    options = ["--batch", 64, "--epochs"]
    first = train(programs, tmp_path / "model", data, *options, 1, "--save", tmp_path / "there1")
    compare(tmp_path / "here1", tmp_path / "there1", 1e-3)
    options += [3, "--resume", tmp_path / "there1", "--save", tmp_path / "there3"]
    rest = train(programs, tmp_path / "model", data, *options, "--predict", tmp_path / "outputs")
    np.testing.assert_allclose([*first, *rest], wanted, 1e-3)
    compare(tmp_path / "here3", tmp_path / "there3", 2e-2)
    from safetensors.numpy import load_file

    outputs = load_file(tmp_path / "outputs")["output0"]
    assert np.mean(outputs.argmax(1) == labels[:count]) > 0.9
    # Either machine goes on with the state of the other one.
    trainer.load(tmp_path / "there3")
    np.testing.assert_allclose(trainer.predict(images[:count]).numpy(), outputs, 1e-3, 1e-3)
