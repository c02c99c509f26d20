"""Steps of the trainer write to the memory of the parameters, and have the results of a step that
does not."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from training_models import START, batches, module_of
from tvm import relax

from relax_grad.target import host
from relax_grad.training import LAMB, SGD, Adam, Lion, Trainer, train_step

GROUPS = ("params", "states", "optimizer_state")


def made(optimizer, dtype="float32", **settings):
    step = train_step(
        module_of(dtype, seed=True, states=True),
        optimizer,
        wrt=["w", "b"],
        states=["mean"],
        **settings,
    )
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    values = {name: array.astype(dtype) for name, array in START.items()}
    return step, {**values, "mean": np.zeros(3, dtype)}


def places(trainer):
    return {
        f"{group}/{name}": np.from_dlpack(tensor).__array_interface__["data"][0]
        for group in GROUPS
        for name, tensor in trainer._group(group).items()
    }


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (SGD(0.1, momentum=0.9, nesterov=True), {}),
        (Adam(0.05, weight_decay=0.1), {"accumulate": 2, "clip_norm": 1.0}),
        (LAMB(0.01), {"ema": 0.9, "skip_nonfinite": True}),
        ({"w": Lion(0.01), "*": SGD(0.1)}, {"loss_scale": "dynamic", "clip_value": 0.1}),
    ],
    ids=["sgd", "adam", "lamb", "groups"],
)
def test_same_results_in_the_same_memory(optimizer, settings):
    step, values = made(optimizer, **settings)
    trainer = Trainer(step, values=values, seed=0)
    before = places(trainer)
    built = tvm.compile(step.module, host(), relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(built, tvm.cpu())
    params, frozen, states, slots = (list(tensors.values()) for tensors in step.initial(values))
    scalars = [tvm.runtime.tensor(np.array(number)) for number in step.hyperparameters.values()]
    for i, batch in enumerate(batches(5, "float32")):
        function = machine["step" if (i + 1) % step.accumulate == 0 else "accumulate"]
        inputs = [*map(tvm.runtime.tensor, batch), *scalars, tvm.runtime.tensor(np.array(i))]
        loss, _, _, params, states, slots = function(*inputs, params, frozen, states, slots)
        assert trainer.step(*batch).loss == float(loss.numpy())
    for group, wanted in zip(GROUPS, (params, states, slots), strict=True):
        for (name, tensor), value in zip(trainer._group(group).items(), wanted, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), value.numpy(), name)
    moved = {name for name, place in places(trainer).items() if place != before[name]}
    # Gradients that were summed become 0 by a copy of a constant, which the next step may
    # overwrite.
    assert {name for name in moved if not name.startswith("optimizer_state/gradient/")} <= {
        "optimizer_state/loss_scale",
        "optimizer_state/good_steps",
    }


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "float32"),
        ({"accumulate": 2}, "bfloat16"),
        ({"skip_nonfinite": True, "accumulate": 2}, "float32"),
        ({"loss_scale": "dynamic"}, "bfloat16"),
        ({"loss_scale": "dynamic", "accumulate": 3, "ema": 0.5}, "float32"),
    ],
    ids=["plain", "accumulate", "skip", "dynamic", "all"],
)
def test_a_step_that_raises_changes_nothing(settings, dtype):
    """At every place in an accumulated gradient, and when the scale of the loss has counted
    steps."""
    step, values = made(SGD(0.001, momentum=0.9), dtype=dtype, **settings)
    trainer = Trainer(step, values=values)
    for x, y in batches(7, values["w"].dtype):
        before = {group: trainer._group(group) for group in GROUPS}
        copies = {
            group: {k: v.numpy() for k, v in tensors.items()} for group, tensors in before.items()
        }
        with pytest.raises(FloatingPointError):
            trainer.step(np.full_like(x, np.nan), y)
        for group, arrays in copies.items():
            for name, value in arrays.items():
                np.testing.assert_array_equal(trainer._group(group)[name].numpy(), value, name)
        assert np.isfinite(trainer.step(x, y).loss)
    assert (trainer.steps, trainer.skipped) == (7, 0)
    assert trainer.updates == 7 // step.accumulate


def test_tensors_of_the_trainer_are_copies():
    step, values = made(SGD(0.1))
    trainer = Trainer(step, values=values)
    kept = trainer.params["w"]
    trainer.step(*batches(1, "float32")[0])
    np.testing.assert_array_equal(kept.numpy(), values["w"])
    assert not np.array_equal(trainer.params["w"].numpy(), values["w"])
