"""The loop over batches with schedulers of PyTorch, cut anywhere and continued from a file."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest
from training_models import START, batches, module_of

from relax_grad.training import SGD, Trainer, train_step

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

S = torch.optim.lr_scheduler

#: Schedulers by the names of their classes. The rate of each changes within eight updates.
KINDS = {
    "StepLR": lambda o: S.StepLR(o, 3, 0.1),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 5, 5], 0.1),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 7, 1.5),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda k: 1 / (1 + k)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda k: 0.9 + k / 50),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=12, three_phase=True),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, factor=0.5, patience=0, cooldown=1),
    "SequentialLR": lambda o: S.SequentialLR(
        o,
        [S.LinearLR(o, 0.2, 1.0, 3), S.MultiStepLR(o, [2, 3], 0.3), S.ExponentialLR(o, 0.7)],
        [3, 6],
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.ConstantLR(o, 0.1, 3), S.ExponentialLR(o, 0.9), S.MultiStepLR(o, [4], 0.5)]
    ),
    "SequentialLR of chains": lambda o: S.SequentialLR(
        o,
        [S.ChainedScheduler([S.ExponentialLR(o, 0.9), S.StepLR(o, 2)]), S.PolynomialLR(o, 5)],
        [4],
    ),
    "SequentialLR of sequences": lambda o: S.SequentialLR(
        o,
        [
            S.SequentialLR(o, [S.ConstantLR(o, 0.5, 2), S.ExponentialLR(o, 0.9)], [2]),
            S.LinearLR(o, 0.3),
        ],
        [4],
    ),
    "ChainedScheduler of sequences": lambda o: S.ChainedScheduler(
        [S.SequentialLR(o, [S.StepLR(o, 2), S.ExponentialLR(o, 0.9)], [3]), S.LinearLR(o, 0.3)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.02, 4),
}


@pytest.fixture(scope="module")
def trainers():
    step = train_step(module_of(), SGD(0.1), wrt=["w", "b"])
    return [Trainer(step, values=START) for _ in range(2)]


def scheduler(kind, rate=0.1):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rate, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KINDS[kind](optimizer)


def reset(trainer):
    trainer.steps = trainer.updates = trainer.epoch = trainer.batch = 0
    trainer.history = type(trainer.history)()


def state_of(schedule):
    """Leave out the function that older versions of SWALR have in their state."""
    return {key: value for key, value in schedule.state_dict().items() if not callable(value)}


def test_every_scheduler_is_cut():
    classes = {
        name
        for name, value in inspect.getmembers(S, inspect.isclass)
        if issubclass(value, S.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_scheduler_goes_on_to_the_bit(trainers, tmp_path, kind):
    """Cut after each step, within epochs and between them."""
    trainer, again = trainers
    start, path = tmp_path / "start", tmp_path / "state"
    reset(trainer)
    trainer.save(start)
    errors = [2.0, 3.0, 1.0, 4.0]

    def fit(trainer, schedule, **settings):
        trainer.fit(
            batches(2),
            4,
            schedule=schedule,
            evaluate=lambda trainer: {"error": errors[trainer.epoch]},
            monitor="error",
            progress=False,
            **settings,
        )

    trainer.load(start)
    fit(trainer, scheduler(kind))
    whole = list(trainer.history.lr)
    assert len(whole) == 8
    assert len(set(whole)) > 1
    for stop in range(1, 8):
        trainer.load(start)
        schedule = scheduler(kind)
        fit(trainer, schedule, callbacks=[lambda t, stop=stop: t.steps == stop])
        trainer.save(path, {"schedule": state_of(schedule)})
        schedule = scheduler(kind)
        schedule.load_state_dict(again.load(path)["schedule"])
        fit(again, schedule)
        assert list(again.history.lr) == whole, stop


@pytest.mark.parametrize("kind", ["SequentialLR", "ChainedScheduler"])
def test_a_later_scheduler_of_schedulers_is_refused(trainers, kind):
    """PyTorch's own error is a NotImplementedError without a message, at the milestone."""

    def sequence(optimizer):
        return S.SequentialLR(optimizer, [S.ConstantLR(optimizer), KINDS[kind](optimizer)], [2])

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    for make in (sequence, lambda o: S.ChainedScheduler([S.ConstantLR(o), sequence(o)])):
        with pytest.raises(ValueError, match=rf"has a {kind} as scheduler 1.*\[3, 5\]"):
            trainers[0].fit(batches(2), schedule=make(optimizer), progress=False)
    schedule = sequence(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step()
        with pytest.raises((NotImplementedError, TypeError)):
            schedule.step()


def test_a_rate_in_a_tensor_is_restored(trainers):
    trainer = trainers[0]
    reset(trainer)
    schedule = scheduler("ExponentialLR", torch.tensor(0.1, dtype=torch.float64))
    tensor = schedule.optimizer.param_groups[0]["lr"]
    schedule.load_state_dict({"last_epoch": 3, "_last_lr": [0.05]})
    trainer.fit(batches(2), schedule=schedule, progress=False)
    np.testing.assert_allclose(trainer.history.lr, [0.05, 0.04], 1e-12)
    assert schedule.optimizer.param_groups[0]["lr"] is tensor
