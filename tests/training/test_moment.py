"""A step of a trainer happens as a whole or not at all, whatever interrupts it."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from interrupts import Interrupt, interrupted, state_of
from training_models import START, batches, module_of

from relax_grad.errors import BrokenTrainerError
from relax_grad.training import (
    Adam,
    Trainer,
    _loop,
    _moment,
    _outcome,
    _steps,
    history,
    train_step,
    trainer,
)

#: The files whose bytecodes are interrupted.
FILES = {module.__file__ for module in (_loop, _moment, _outcome, _steps, history, trainer)}


@pytest.fixture(scope="module")
def step():
    return train_step(
        module_of("float32", seed=True, states=True),
        Adam(0.05),
        wrt=["w", "b"],
        states=["mean"],
        accumulate=2,
        loss_scale="dynamic",
    )


@pytest.fixture
def make(step):
    def make(**options) -> Trainer:
        values = {**START, "mean": np.zeros(3)}
        values = {name: np.float32(value) for name, value in values.items()}
        return Trainer(step, values=values, **options)

    return make


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_each_bytecode_of_a_step_is_interrupted(make, on_nan, tmp_path):
    """The state is that before or after the step, and training goes on to the same bits."""
    infinite = np.full((6, 3), np.inf, "float32"), np.zeros(6, "float32")
    loader = [*batches(4, "float32"), infinite]

    def run(trained: Trainer) -> None:
        with contextlib.suppress(FloatingPointError):
            trained.step(*loader[trained.steps % 5 if on_nan == "skip" else trained.steps % 4])
        if on_nan == "raise":  # as a batch that does not count
            with contextlib.suppress(FloatingPointError):
                trained.step(*infinite)

    reference, trained = make(on_nan=on_nan), make(on_nan=on_nan)
    trained.save(tmp_path / "start")
    states = [state_of(reference)]
    for _ in range(11):
        run(reference)
        states.append(state_of(reference))
    number, befores, afters, place = 0, 0, 0, True
    while place:
        if trained.steps == 11:
            trained.load(tmp_path / "start")
        steps = trained.steps
        with interrupted(number, FILES) as place:
            run(trained)
        assert state_of(trained) == states[trained.steps], place
        befores += trained.steps == steps
        afters += trained.steps > steps
        number += 2 if on_nan == "raise" else 1  # two steps take long
    assert befores > 100
    assert afters > 100


def test_a_fit_that_is_interrupted_goes_on(make):
    """An epoch has each batch once, and one evaluation."""
    loader, epochs = batches(3, "float32"), 4
    reference = make()
    reference.fit(loader, epochs, evaluate=lambda _: {"number": 1.0}, progress=False)
    trained = make()
    for number in range(0, 10_000, 83):
        with interrupted(number, FILES):
            trained.fit(loader, epochs, evaluate=lambda _: {"number": 1.0}, progress=False)
        assert trained.steps == 3 * trained.epoch + trained.batch
        if trained.epoch == epochs:
            break
    assert state_of(trained) == state_of(reference)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="only POSIX has timers")
def test_signals_at_drawn_times(make, tmp_path):
    """Handlers run between bytecodes, and after the compiled function."""
    loader, rng = batches(4, "float32"), np.random.default_rng(0)
    reference, trained = make(), make()
    states = [state_of(reference)]
    for _ in range(60):
        reference.step(*loader[reference.steps % 4])
        states.append(state_of(reference))

    def end(*_):
        raise Interrupt

    previous = signal.signal(signal.SIGALRM, end)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, 2e-3)))
                trained.step(*loader[trained.steps % 4])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                trained.save(tmp_path / "state")
            assert state_of(trained) == states[trained.steps]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_step_that_does_not_end(make, tmp_path, monkeypatch):
    """Every call but ``load`` is an error, and says so."""
    trained, (batch,) = make(), batches(1, "float32")
    trained.save(tmp_path / "state")
    before = state_of(trained)

    def fails(*_):
        raise MemoryError("in the middle of the step")

    main = trained._variants.main
    machine = main.machine
    monkeypatch.setattr(main, "machine", {"accumulate": fails})
    with pytest.raises(MemoryError, match="in the middle") as raised:
        trained.step(*batch)
    if hasattr(raised.value, "__notes__"):  # Python 3.11
        assert "load a saved state" in raised.value.__notes__[0]
    calls = {
        "step": batch,
        "fit": ([batch],),
        "evaluate": ([batch],),
        "predict": batch[:1],
        "save": (tmp_path / "half",),
        "export": (tmp_path / "folder",),
    }
    names = {name for name, _ in inspect.getmembers(Trainer) if not name.startswith("_")}
    for name in names - {"load"}:
        with pytest.raises(BrokenTrainerError, match=r"load a saved state with Trainer\.load"):
            getattr(trained, name)(*calls.get(name, ()))
    assert sorted(os.listdir(tmp_path)) == ["state"]
    monkeypatch.setattr(main, "machine", machine)
    trained.load(tmp_path / "state")
    assert state_of(trained) == before
    trained.step(*batch)
    reference = make()
    reference.step(*batch)
    assert state_of(trained) == state_of(reference)


def test_a_step_without_memory(make, monkeypatch):
    """The memory of tensors is taken before the step, which leaves the trainer as it is."""
    trained, (batch,) = make(), batches(1, "float32")
    before, main = state_of(trained), trained._variants.main
    machine = main.machine

    def fails(*_):
        raise MemoryError

    machines = {name: machine[name] for name in ("accumulate", "step")}
    monkeypatch.setattr(main, "machine", {**machines, "accumulate_memory": fails})
    for _ in range(2):
        with pytest.raises(MemoryError):
            trained.step(*batch)
        assert state_of(trained) == before
    calls = []
    taken = machine["accumulate_memory"]
    machines["accumulate_memory"] = lambda *given: (calls.append(len(given)), taken(*given))
    monkeypatch.setattr(main, "machine", machines)
    for _ in range(2):
        trained.step(*batch)
    assert len(calls) == 1  # the allocator keeps it
    reference = make()
    for _ in range(2):
        reference.step(*batch)
    assert state_of(trained) == state_of(reference)


def test_a_load_that_is_interrupted(make, tmp_path):
    """The state is the old one or the new one."""
    first, second = make(), make(seed=3)
    for batch in batches(3, "float32"):
        second.step(*batch)
    second.save(tmp_path / "state")
    old, new = state_of(first), state_of(second)
    found, place, number = [], True, 0
    while place:
        first = make() if found[-1:] == [new] else first
        with interrupted(number, FILES) as place:
            first.load(tmp_path / "state")
        found.append(state_of(first))
        assert found[-1] in (old, new)
        number += 1
    assert old in found
    assert new in found
    assert Path(tmp_path / "state").exists()
