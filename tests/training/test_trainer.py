"""The trainer: its loop, its files, and its errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checksums import flipped, signed
from training_models import START, batches, close, gradients, module_of, tensors

from relax_grad.training import SGD, Adam, Trainer, train_step
from relax_grad.training._packing import unpacked

safetensors = pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def step():
    return train_step(
        module_of(seed=True, states=True), Adam(0.05), wrt=["w", "b"], states=["mean"], accumulate=2
    )


@pytest.fixture(scope="module")
def plain():
    return Trainer(train_step(module_of(), SGD(), wrt=["w", "b"]), values=START)


def trainer_of(step, **settings):
    return Trainer(step, values={**START, "mean": np.zeros(3)}, **settings)


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_training_resumes_to_the_bit(step, tmp_path, stop):
    """Also in the middle of an epoch, and of an accumulated gradient."""
    loader = batches(5)
    whole = trainer_of(step, seed=3)
    whole.fit(loader, 2, schedule=lambda i: 0.1 / (1 + i), progress=False)
    first = trainer_of(step, seed=3)
    first.fit(
        loader,
        2,
        schedule=lambda i: 0.1 / (1 + i),
        progress=False,
        callbacks=[lambda trainer: trainer.steps == stop],
    )
    assert first.steps == stop
    first.save(tmp_path / "state.safetensors", {"note": "here"})
    second = trainer_of(step, seed=9)
    assert second.load(tmp_path / "state.safetensors") == {"note": "here"}
    second.fit(loader, 2, schedule=lambda i: 0.1 / (1 + i), progress=False)
    assert tensors(second) == tensors(whole)
    assert second.history.loss == whole.history.loss
    assert second.history.epoch == [0] * 5 + [1] * 5
    assert len(second.history.evaluations) == 2


def test_fit_follows_a_scheduler_of_torch():
    torch = pytest.importorskip("torch")
    step = train_step(module_of(), SGD(0.1), wrt=["w", "b"])
    trainer = Trainer(step, values=START)
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(dummy, 0.5)
    data = batches(4)
    loader = [tuple(map(torch.from_numpy, batch)) for batch in data]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = trainer.fit(loader, schedule=schedule, progress=False)
    np.testing.assert_allclose(history.lr, [0.1, 0.05, 0.025, 0.0125])
    values = dict(START)
    for i, batch in enumerate(data):
        loss, grads = gradients(values, batch)
        np.testing.assert_allclose(history.loss[i], loss, 1e-12)
        values = {k: v - 0.1 * 0.5**i * grads[k] for k, v in values.items()}
    close(trainer.params, values)


def test_fit_ends_early_and_draws(tmp_path, capsys):
    step = train_step(module_of(), SGD(0.0), wrt=["w", "b"])
    trainer = Trainer(step, values=START)
    loader = [{"y": y, "x": x} for x, y in batches(3)]
    history = trainer.fit(loader, 50, patience=2, evaluate=lambda t: {"steps": t.steps})
    assert trainer.epoch == 3
    assert [entry["steps"] for entry in history.evaluations] == [3, 6, 9]
    assert "epoch" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    history.plot(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="monitor: 'accuracy' needs evaluate"):
        trainer.fit(loader, 9, patience=1, monitor="accuracy", progress=False)


def _save_for_ever(trainer, path, ready):
    while True:
        trainer.save(path)
        ready.set()


def test_a_kill_while_saving_leaves_a_whole_file(step, tmp_path):
    path = tmp_path / "state.safetensors"
    trainer = trainer_of(step)
    trainer.step(*batches(1)[0])
    wanted = tensors(trainer)
    context = multiprocessing.get_context("fork")
    other = trainer_of(step)
    for i in range(5):
        ready = context.Event()
        process = context.Process(target=_save_for_ever, args=(trainer, path, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(0.003 * (i + 1))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        other.load(path)
        assert tensors(other) == wanted
    trainer.save(path)
    assert os.listdir(tmp_path) == [path.name]


def test_files_that_do_not_fit(step, tmp_path):
    path = tmp_path / "state.safetensors"
    trainer = trainer_of(step)
    trainer.step(*batches(1)[0])
    trainer.save(path)
    before = tensors(trainer)
    data = path.read_bytes()

    def refuses(changed: bytes, message: str) -> None:
        other = tmp_path / "other.safetensors"
        other.write_bytes(changed)
        with pytest.raises(ValueError, match=message):
            trainer.load(other)
        assert tensors(trainer) == before
        assert trainer.steps == 1

    for cut in (0, 4, 100, len(data) // 2, len(data) - 1):
        refuses(data[:cut], "is damaged")
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def with_header(change) -> bytes:
        new = json.loads(json.dumps(header))
        change(new)
        text = json.dumps(new).encode()
        return signed(len(text).to_bytes(8, "little") + text + data[8 + length :])

    refuses(with_header(lambda new: new.pop("__metadata__")), "has no state of training")
    refuses(
        with_header(lambda new: new.update({"params/v": new.pop("params/w")})),
        "lacks params/w; it was written by a trainer of another step",
    )
    refuses(
        with_header(lambda new: new["params/w"].update(shape=[3, 1])),
        r"params/w has shape \(3, 1\) and dtype float64, but the step needs \(3,\) and float64",
    )

    def described(change):
        def changed(new):
            more = json.loads(new["__metadata__"]["relax_grad.training"])
            new["__metadata__"]["relax_grad.training"] = json.dumps(change(more))

        return with_header(changed)

    for version in (0, 3, True, "2", None, 2.0):
        refuses(
            described(lambda more, version=version: {**more, "version": version}),
            f"has version {version!r} of the format, but this relax_grad reads versions 1 and 2",
        )
    refuses(described(lambda more: [more]), "has no state of training")
    refuses(described(lambda more: {**more, "more": 1}), "has no state of training")
    refuses(
        described(lambda more: {**more, "counters": {}}),
        "its counter seed must be from 0 to 2147483647, but it is None",
    )
    for counter, value in (
        *(("seed", 2**31), ("steps", 2**53 + 1), ("updates", -1), ("epoch", True)),
        *(("batch", 1.0), ("batch", "1"), ("epoch", float("nan"))),
    ):
        refuses(
            described(lambda more: {**more, "counters": {**more["counters"], counter: value}}),  # noqa: B023
            f"its counter {counter} must be from 0 to .*, but it is {value!r}",
        )
    refuses(
        described(lambda more: {**more, "counters": {**more["counters"], "skipped": 2}}),
        "is damaged: 2 of 1 steps were skipped",
    )
    lists = unpacked(json.loads(header["__metadata__"]["relax_grad.training"])["history"])
    for name, value, message in (
        ("other", [], "other is unknown"),
        ("loss", ["x"], "loss is no list of numbers"),
        ("loss", [True], "loss is no list of numbers"),
        ("loss", {"0": 1.0}, "loss is no list of numbers"),
        ("loss", [], "loss has 0 values for 1 steps"),
        ("step", [0.0], "step is no list of integers"),
        ("step", [-1], "step has numbers that are negative or NaN"),
        ("seconds", [float("nan")], "seconds has numbers that are negative or NaN"),
        ("metrics", [], r"metrics is \[\]"),
        ("metrics", {"norm": [1.0, 2.0]}, "norm has 2 values for 1 steps"),
        ("evaluations", [1], "evaluations is no list of numbers by their names"),
        ("evaluations", [{"loss": "x"}], "evaluations is no list of numbers by their names"),
    ):
        refuses(
            described(lambda more: {**more, "history": {**lists, name: value}}),  # noqa: B023
            f"its history is of another form: {message}",
        )
    columns = {"columns": {}, "metrics": {}, "evaluations": []}
    refuses(described(lambda more: {**more, "history": columns}), "its columns are not epoch")
    refuses(described(lambda more: {**more, "history": {}}), "history is .* epoch is missing")
    text = json.dumps(header["__metadata__"]["relax_grad.training"])
    twice = json.dumps(header).replace(text, json.dumps('{"version": 2, "version": 2}')).encode()
    twice = signed(len(twice).to_bytes(8, "little") + twice + data[8 + length :])
    refuses(twice, "one of the keys version stands twice")
    deep = with_header(
        lambda new: new["__metadata__"].update({"relax_grad.training": "[" * 100_000})
    )
    refuses(deep, "is damaged: its JSON is nested too deep")
    refuses(
        with_header(lambda new: new["__metadata__"].update({"relax_grad.training": "{"})),
        "is damaged, or no file of safetensors",
    )
    refuses(
        with_header(lambda new: new.update({"other/v": new["params/w"]})),
        "is damaged|has an unknown other/v",
    )
    name = "params/w"
    as_booleans = {"dtype": "BOOL", "shape": [8 * 3], "data_offsets": header[name]["data_offsets"]}
    refuses(
        with_header(lambda new: new.update({name: as_booleans})),
        "params/w has booleans that are neither 0 nor 1",
    )
    with pytest.raises(FileNotFoundError):
        trainer.load(tmp_path / "none")


def test_losses_that_are_not_finite_load(step, tmp_path):
    """The history has the losses of skipped steps."""
    trainer = trainer_of(step, on_nan="skip")
    x, y = batches(1)[0]
    trainer.step(np.full_like(x, np.nan), y)
    trainer.save(tmp_path / "state")
    other = trainer_of(step)
    other.load(tmp_path / "state")
    assert np.isnan(other.history.loss).tolist() == [True]


def test_checksums(step, tmp_path):
    """A flipped bit is found, wherever it is. Files of version 1 have no checksum, those of version
    2 must have one."""
    path, other = tmp_path / "state.safetensors", tmp_path / "other.safetensors"
    trainer = trainer_of(step)
    trainer.step(*batches(1)[0])
    trainer.save(path)
    wanted, data = tensors(trainer), path.read_bytes()
    assert data == signed(data)
    rng = np.random.default_rng(35)
    for bit in rng.integers(0, 8 * len(data), 1000):
        other.write_bytes(flipped(data, int(bit)))
        with pytest.raises(ValueError, match="^" + re.escape(str(other))):
            trainer.load(other)
    for bit in range(8 * 8):  # the length of the header
        other.write_bytes(flipped(data, bit))
        with pytest.raises(ValueError, match="^" + re.escape(f"{other} is damaged")):
            trainer.load(other)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]["crc32"]

    def without(version: int) -> bytes:
        text = header["__metadata__"]["relax_grad.training"]
        text = json.dumps({**json.loads(text), "version": version})
        new = {**header, "__metadata__": {"relax_grad.training": text}}
        packed = json.dumps(new).encode()
        return len(packed).to_bytes(8, "little") + packed + data[8 + length :]

    other.write_bytes(without(2))
    with pytest.raises(ValueError, match="is damaged: it has no checksum"):
        trainer.load(other)
    other.write_bytes(without(1))
    trainer.load(other)
    assert tensors(trainer) == wanted


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.step(np.ones((6, 3))), TypeError, "the step needs y too"),
        (lambda t: t.step(1, 2, 3), TypeError, r"takes 2 tensors \(x, y\), but 3 were given"),
        (lambda t: t.step(np.ones((6, 3)), x=1), TypeError, "x was given twice"),
        (lambda t: t.step(z=1), TypeError, "has no input or hyperparameter 'z'; it has x, y, lr"),
        (
            lambda t: t.step(np.ones((6, 4)), np.ones(6)),
            ValueError,
            r"x must have shape \(6, 3\) and dtype float64, but it has \(6, 4\) and float64",
        ),
        (
            lambda t: t.step(np.ones((6, 3), "float32"), np.ones(6)),
            ValueError,
            "but it has .* and float32",
        ),
        (lambda t: t.step(*batches(1)[0], lr="x"), TypeError, "lr must be a number, but it is 'x'"),
        (lambda t: t.step(*batches(1)[0], lr=float("nan")), ValueError, "lr must be finite"),
        (lambda t: t.fit([]), ValueError, "the loader gave no batch"),
        (lambda t: t.fit(5), TypeError, "loader must give batches by iteration, but it is 5"),
        (lambda t: t.fit(batches(1), -1), ValueError, "epochs must be a number of epochs"),
        (lambda t: t.fit(iter(batches(1)), 2), ValueError, "loader gives its batches only once"),
        (lambda t: t.fit(batches(1), 2, patience=0), ValueError, "patience must be a positive"),
        (lambda t: t.fit(batches(1), 2, monitor="accuracy"), ValueError, "needs evaluate"),
        (lambda t: t.fit(batches(1), schedule="cosine"), TypeError, "schedule must be a function"),
        (lambda t: t.fit(batches(1), callbacks=print), TypeError, "callbacks must be a list of"),
        (lambda t: t.fit(batches(1), evaluate=3), TypeError, "evaluate must be a function"),
        (lambda t: t.evaluate(batches(1), {"a": np.mean}), ValueError, "no function for pred"),
        (lambda t: t.step([[1.0], [1.0, 2.0]], np.ones(6)), TypeError, "x must be an array"),
        (lambda t: t.step("x", np.ones(6)), TypeError, "x must be an array"),
        (lambda t: t.predict(1), ValueError, "the model has no function for prediction"),
        (lambda t: Trainer(3), TypeError, "step must be a result of train_step"),
        (lambda t: Trainer(t.train_step), ValueError, "values: w is missing"),
        (lambda t: Trainer(t.train_step, values=START | {"q": 1}), ValueError, "no tensor 'q'"),
        (
            lambda t: Trainer(t.train_step, values=START | {"w": np.ones(4)}),
            ValueError,
            r"w must have shape \(3,\) and dtype float64, but it has \(4,\)",
        ),
        (lambda t: Trainer(t.train_step, values=START, on_nan="x"), ValueError, "on_nan must be"),
        (
            lambda t: Trainer(t.train_step, values=START, seed=-1),
            ValueError,
            "seed must be an integer from 0",
        ),
        (
            lambda t: Trainer(t.train_step, values=START, target="cuda"),
            ValueError,
            "target must be a CPU",
        ),
    ],
)
def test_bad_calls(call, error, message, plain):
    with pytest.raises(error, match=message):
        call(plain)
    assert plain.steps == 0


def test_early_stopping_resumes(step, tmp_path):
    """The epochs without a lower value before the file count, and an epoch is complete after its
    evaluation."""
    values = [3.0, 2.0, 2.5, 2.25, 2.125, 1.0]

    def evaluate(trainer):
        return {"error": np.float32(values[trainer.epoch])}

    settings = {"patience": 3, "monitor": "error", "progress": False}
    whole = trainer_of(step)
    whole.fit(batches(2), 9, evaluate=evaluate, **settings)
    assert whole.epoch == 5
    first = trainer_of(step)

    def fails(trainer):
        if trainer.epoch == 3:
            trainer.save(tmp_path / "state")
            raise RuntimeError("the disk is full")
        return evaluate(trainer)

    with pytest.raises(RuntimeError, match="the disk is full"):
        first.fit(batches(2), 9, evaluate=fails, **settings)
    second = trainer_of(step)
    second.load(tmp_path / "state")
    assert (second.epoch, second.batch) == (3, 2)
    second.fit(batches(2), 9, evaluate=evaluate, **settings)
    assert tensors(second) == tensors(whole)
    assert second.history.evaluations == whole.history.evaluations
    second.fit(batches(2), 9, evaluate=lambda trainer: {"error": 9.0}, **settings)
    assert second.epoch == 8


def test_a_further_fit_trains_on(plain):
    """By default one more epoch; a number of epochs that an earlier call has reached is an
    error."""
    trainer = Trainer(plain.train_step, values=START)
    loader = batches(3)
    for count in (1, 2):
        assert len(trainer.fit(loader, progress=False).loss) == 3 * count
    trainer.fit(loader, callbacks=[lambda trainer: trainer.batch == 1], progress=False)
    trainer.fit(loader, progress=False)  # the rest of the epoch
    assert (trainer.epoch, trainer.steps) == (3, 9)
    for epochs in (0, 2, 3):
        message = f"and 3 are complete, but epochs is {epochs}: pass a larger number, or leave it"
        with pytest.raises(ValueError, match=message):
            trainer.fit(loader, epochs, progress=False)
    trainer.fit(loader, 4, progress=False)
    assert trainer.steps == 12


@pytest.mark.parametrize("kind", ["patience", "plateau"])
def test_the_monitor_before_a_file_counts(plain, tmp_path, kind):
    """A file of any epoch goes on as without it: early stopping, and a new scheduler of
    plateaus."""
    torch = pytest.importorskip("torch")
    values = [3.0, 1.0, 2.0, 1.5, 1.25, 0.5, 0.75, 0.75]

    def run(trainer, epochs):
        settings = {"patience": 3}
        if kind == "plateau":
            dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
            make = torch.optim.lr_scheduler.ReduceLROnPlateau
            settings = {"schedule": make(dummy, factor=0.5, patience=1)}
        trainer.fit(
            batches(2),
            epochs,
            evaluate=lambda trainer: {"error": values[trainer.epoch]},
            monitor="error",
            progress=False,
            **settings,
        )
        return trainer

    whole = run(Trainer(plain.train_step, values=START), 8)
    assert whole.epoch == (5 if kind == "patience" else 8)
    assert len(set(whole.history.lr)) == (1 if kind == "patience" else 2)
    for epochs in range(1, whole.epoch + 1):
        run(Trainer(plain.train_step, values=START), epochs).save(tmp_path / "state")
        second = Trainer(plain.train_step, values=START)
        second.load(tmp_path / "state")
        run(second, 8)
        assert tensors(second) == tensors(whole)
        assert second.history.lr == whole.history.lr
        assert second.history.evaluations == whole.history.evaluations


def test_a_scheduler_of_plateaus_follows_the_monitor():
    torch = pytest.importorskip("torch")
    trainer = Trainer(train_step(module_of(), SGD(0.5), wrt=["w", "b"]), values=START)
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(dummy, factor=0.1, patience=0)
    values = [2.0, 1.0, 1.0, 0.5]
    history = trainer.fit(
        batches(2),
        4,
        schedule=schedule,
        evaluate=lambda trainer: {"error": torch.tensor(values[trainer.epoch])},
        monitor="error",
        progress=False,
    )
    np.testing.assert_allclose(history.lr, [0.5] * 6 + [0.05] * 2)


def test_schedules_return_numbers_of_any_kind(plain):
    trainer = Trainer(plain.train_step, values=START)
    kinds = [np.float32(0.5), np.array(0.25), 1]
    trainer.fit(batches(3), schedule=lambda i: kinds[i], progress=False)
    assert trainer.history.lr == [0.5, 0.25, 1.0]


def test_a_shorter_loader_is_refused(plain):
    trainer = Trainer(plain.train_step, values=START)
    trainer.fit(batches(4), callbacks=[lambda trainer: trainer.batch == 3], progress=False)
    with pytest.raises(ValueError, match="the loader gave 2 batches, but 3 of the epoch are done"):
        trainer.fit(batches(2), progress=False)
    assert (trainer.steps, trainer.epoch) == (3, 0)


def test_the_mean_loss_leaves_skipped_steps_out(plain):
    trainer = Trainer(plain.train_step, values=START, on_nan="skip")
    x, y = batches(1)[0]
    history = trainer.fit([(x, y), (x * np.nan, y)], progress=False)
    assert history.evaluations[0]["mean_loss"] == history.loss[0]


def test_many_epochs_have_one_bar(plain, capsys):
    trainer = Trainer(plain.train_step, values=START)
    trainer.fit(batches(1), 3, evaluate=lambda trainer: {"error": 0.5})
    # On a slow machine, the bar itself is drawn between the lines of the epochs.
    lines = [line for line in capsys.readouterr().out.splitlines() if "mean_loss" in line]
    assert [line.count("mean_loss") for line in lines] == [1, 1, 1]
    assert all("error 0.5" in line for line in lines)


def test_predictions_and_steps_of_several_threads():
    """The virtual machine has one stack of frames for all threads."""
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module

    model, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
    targets = {"loss": torch.nn.functional.mse_loss, "targets": (torch.zeros(16, 4),)}
    trainer = Trainer(train_step(from_module(model, (x,), **targets), SGD(0.0)))
    wanted = model(x).detach().numpy()

    def run(i):
        for _ in range(100):
            if i:
                np.testing.assert_allclose(trainer.predict(x).numpy(), wanted, rtol=1e-4, atol=1e-5)
            else:
                trainer.step(x, torch.zeros(16, 4))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert trainer.steps == 100
