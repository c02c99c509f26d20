"""The history in files: all numbers of a training of any length, in few bytes for each step."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from training_models import START, batches, module_of

from relax_grad.training import SGD, History, Trainer, train_step
from relax_grad.training._packing import packed, unpacked
from relax_grad.training.history import MOST_STEPS

pytest.importorskip("safetensors")

RNG = np.random.default_rng(0)


def history_of(count: int, lr, dtype="float32") -> History:
    draw = lambda scale: (scale * RNG.normal(size=count)).astype(dtype).tolist()  # noqa: E731
    return History(
        list(range(count)),
        [i // 100 for i in range(count)],
        draw(2.0),
        [float(lr(i)) for i in range(count)],
        (0.001 * RNG.random(count)).tolist(),
        {"grad_norm": draw(1.0), "applied": [1.0] * count},
        [{"epoch": 0, "mean_loss": 0.5}],
    )


LR = {
    "constant": lambda i: 0.01,
    "warm up": lambda i: min(i / 1000, 1) * 3e-4,
    "cosine": lambda i: 1e-3 * (1 + math.cos(i / 50000)) / 2,
    "power": lambda i: 0.1 / (1 + i) ** 0.5,
}


@pytest.mark.parametrize("lr", LR)
def test_few_bytes_for_each_step(lr):
    history = history_of(20_000, LR[lr])
    shorter = len(json.dumps(packed(history_of(10_000, LR[lr]))))
    text = json.dumps(packed(history))
    assert len(text) - shorter < 16 * 10_000
    restored = History(**unpacked(json.loads(text)))
    seconds = np.array(restored.seconds)
    np.testing.assert_allclose(seconds, history.seconds, 6e-4)
    restored.seconds = history.seconds
    assert restored == history
    assert type(restored.step[0]) is int
    assert type(restored.loss[0]) is float


def test_all_bits_of_numbers():
    values = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-310, 1e300, 0.1, float(np.float32(0.1))]
    for some in (values, values[:5], [], [2**53 + 0.0]):
        count = len(some)
        history = History([*range(5, 5 + count)], [0] * count, some, some, [0.0] * count)
        restored = History(**unpacked(json.loads(json.dumps(packed(history)))))
        for key in ("loss", "lr"):
            assert np.array(getattr(restored, key)).tobytes() == np.array(some).tobytes()
        assert restored.step == history.step
    old = {"step": [3], "epoch": [0], "loss": [0.5], "lr": [0.1], "seconds": [1.0]}
    assert unpacked(old) == old  # a file of an earlier version


def changed(**columns) -> dict:
    described = packed(history_of(3, LR["constant"]))
    return {**described, "columns": {**described["columns"], **columns}}


COLUMN = changed()["columns"]["loss"]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"columns": {}}, "it has columns"),
        ({**changed(), "columns": {"loss": COLUMN}}, "its columns are not epoch, loss, lr"),
        ({**changed(), "metrics": []}, "metrics must be an object"),
        ({**changed(), "evaluations": {}}, "evaluations a list"),
        (changed(loss=[1, 2]), "loss is no column"),
        (changed(loss=["int64", *COLUMN[1:]]), "loss is no column of float32 or float64"),
        (changed(step=COLUMN), "step is no column of int64, but of 'float32'"),
        (changed(loss=["float32", 4, COLUMN[2]]), "loss has not 4 numbers"),
        (changed(loss=["float32", -1, COLUMN[2]]), "loss is no column of"),
        (changed(loss=["float32", 2, COLUMN[2]]), "loss has not 2 numbers"),
        (changed(loss=["float32", 3, "AAAA"]), "loss cannot be decompressed"),
        (changed(loss=["float32", 3, "?"]), "base64"),
    ],
)
def test_damaged_columns(described, message):
    with pytest.raises(ValueError, match=message):
        unpacked(described)


def test_a_long_training_is_thinned(tmp_path):
    """Its file has a bounded size, the newest quarter of the records and others, and training goes
    on."""
    step = train_step(module_of(), SGD(0.01), wrt=["w", "b"], clip_norm=1.0)
    trainer = Trainer(step, values=START)
    trainer.step(*batches(1)[0])
    history, count = trainer.history, 10_000_000
    history.step[:], history.epoch[:] = range(count), [0] * count
    for numbers in (history.loss, history.lr, history.seconds, history.metrics["grad_norm"]):
        numbers[:] = [0.25, 0.5] * (count // 2)
    history.loss[-1], trainer.steps = 7.0, count
    trainer.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 16 * MOST_STEPS
    other = Trainer(step, values=START)
    other.load(tmp_path / "state")
    thinned = other.history
    lengths = map(len, (thinned.step, thinned.epoch, thinned.loss, thinned.metrics["grad_norm"]))
    (length,) = set(lengths)
    assert MOST_STEPS // 4 < length <= MOST_STEPS
    recent = MOST_STEPS // 4
    assert thinned.step[-recent:] == list(range(count - recent, count))
    assert thinned.step[0] == 0
    assert thinned.loss[-1] == 7.0
    other.step(*batches(1)[0])
    assert other.history.step[-1] == count


def test_records_are_thinned_while_they_grow(monkeypatch):
    from relax_grad.training import history as module

    monkeypatch.setattr(module, "MOST_STEPS", 8)
    trainer = Trainer(train_step(module_of(), SGD(0.01), wrt=["w", "b"]), values=START)
    kept = trainer.history
    for _ in range(12):
        trainer.step(*batches(1)[0])
    assert trainer.history is kept
    assert kept.step == [0, 4, 7, 9, 10, 11]
    assert len(kept.loss) == len(kept.seconds) == 6
