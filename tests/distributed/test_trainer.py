"""Data parallel training, against one worker with the whole batch."""

from __future__ import annotations

import numpy as np
import parallel_models
import pytest
from parallel_models import assert_close, assert_same_bits, linear, tensors
from sessions import new_session
from training_models import START, batches, digits_of_torch, module_of
from tvm import relax

from relax_grad.distributed import DataParallelTrainer, WorkerError, data_parallel
from relax_grad.errors import BrokenTrainerError
from relax_grad.training import LAMB, SGD, AdamW, Trainer, lora, train_step


def adapted():
    """Return a step of low-rank adapters of a small GPT, and batches of texts."""
    step, data = parallel_models.char_gpt(
        sizes=[4, 5, 6, 7] * 5,
        adapt=lambda model: lora(model, 2, ["*qkv.weight", "*out.weight", "*mlp.*.weight"]),
    )
    assert step.frozen
    return step, None, data


MODELS = {
    "CNN": parallel_models.convolutional,
    "LoRA": adapted,
    "imported CNN": parallel_models.imported,
    "GPT": parallel_models.transformer,
}


def compared_with_one_worker(session, model, start):
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    step, values, data = MODELS[model]()
    single = Trainer(step, values=values)
    losses = [single.step(*batch).loss for batch in data]
    runs = []
    trainer = data_parallel(step, session, values=values, check_every=5, bucket_bytes=2000)
    trainer.save(start)
    for _ in range(2):
        trainer.load(start)
        results = [trainer.step(*batch) for batch in data]
        runs.append(([result.loss for result in results], tensors(trainer)))
    np.testing.assert_allclose(runs[0][0], losses, 1e-5)
    assert_close(runs[0][1], tensors(single))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[1][1], runs[0][1])


@pytest.mark.slow
def test_local_batch_normalisation_is_another_function(pair):
    """The statistics are those of a share; the replicas stay equal."""
    step, values, data = parallel_models.convolutional()
    single, parallel = (
        Trainer(step, values=values),
        data_parallel(step, pair, values=values, batch_norm="local", check_every=1),
    )
    losses = [(single.step(*batch).loss, parallel.step(*batch).loss) for batch in data[:3]]
    assert abs(losses[0][0] - losses[0][1]) > 1e-4
    parallel.session.synchronize()


@pytest.mark.parametrize(
    "model",
    [
        "CNN",
        pytest.param("imported CNN", marks=pytest.mark.slow),
        pytest.param("GPT", marks=pytest.mark.slow),
        pytest.param("LoRA", marks=pytest.mark.slow),
    ],
)
def test_two_workers_are_as_one(pair, model, tmp_path):
    """20 steps with shares of different sizes. Two runs have the same bits."""
    compared_with_one_worker(pair, model, tmp_path / "start")


@pytest.mark.slow
def test_four_workers_are_as_one(tmp_path):
    with new_session(4) as session:
        for model in MODELS:
            compared_with_one_worker(session, model, tmp_path / "start")


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_divided_state_of_the_optimizer_has_the_same_bits(pair, tmp_path, kind):
    """AdamW's moments, moving averages and copies in float32 are divided. w has 3 elements, which 2
    does not divide.

    The file is that of one worker.
    """
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    dtype = np.dtype(kind)
    step = train_step(module_of(kind), AdamW(lr=0.1), wrt=["w", "b"], ema=0.9, clip_norm=1.0)
    values = {name: array.astype(dtype) for name, array in START.items()}
    options = {"values": values, "check_every": 1}
    whole = data_parallel(step, pair, **options)
    parallel = data_parallel(step, pair, shard_optimizer=True, **options)
    data = [[np.concatenate([e, -e]).astype(dtype) for e in batch] for batch in batches(6)]
    for batch in data[:3]:
        assert parallel.step(*batch).loss == whole.step(*batch).loss
    assert_same_bits(tensors(parallel), tensors(whole))
    parallel.save(tmp_path / "state")
    for trainer in (whole, parallel):
        trainer.load(tmp_path / "state")
    for batch in data[3:]:
        assert parallel.step(*batch).loss == whole.step(*batch).loss
    assert_same_bits(tensors(parallel), tensors(whole))


def test_optimizers_whose_state_cannot_be_divided(pair):
    step = train_step(module_of(), LAMB(), wrt=["w", "b"])
    with pytest.raises(ValueError, match="the state of LAMB cannot be divided"):
        data_parallel(step, pair, values=START, shard_optimizer=True)


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"clip_value": 0.01}, {"loss_scale": 1024.0}, {"loss_scale": "dynamic"}],
    ids=str,
)
def test_options_of_steps(pair, options):
    step = train_step(module_of("float32"), SGD(lr=0.1, momentum=0.9), wrt=["w", "b"], **options)
    values = {name: array.astype("float32") for name, array in START.items()}
    parallel = data_parallel(step, pair, values=values)
    for batch in batches(4, "float32"):
        # The module has batches of 6, which here are shares.
        whole = [np.concatenate([array, array[::-1] * 0.5]) for array in batch]
        result = parallel.step(*whole)
        assert set(result.metrics) == set(step.metrics)
        assert np.isfinite(result.loss)
    assert parallel.steps == 4
    assert parallel.updates == (2 if "accumulate" in options else 4)
    assert not np.array_equal(parallel.params["w"].numpy(), values["w"])


def test_constant_batches(pair):
    """Shares of constant size, in float64, against NumPy."""
    step = train_step(module_of(), SGD(lr=0.1), wrt=["w", "b"])
    parallel = data_parallel(step, pair, values=START)
    (x, y), (more_x, more_y) = batches(2)
    x, y = np.concatenate([x, more_x]), np.concatenate([y, more_y])
    difference = x @ START["w"] + START["b"] - y
    assert parallel.step(x, y).loss == pytest.approx(np.mean(difference**2), rel=1e-12)
    wanted = START["w"] - 0.1 * 2 * x.T @ difference / 12
    np.testing.assert_allclose(parallel.params["w"].numpy(), wanted, 1e-12)
    with pytest.raises(ValueError, match=r"x must have shape \(12, 3\)"):
        parallel.step(x[:6], y[:6])


def test_a_sum_as_the_loss(pair):
    """The loss and the gradient are sums over the shares."""
    x = relax.Var("x", relax.TensorType((3,), "float64"))
    w = relax.Var("w", relax.TensorType((), "float64"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        bb.emit_func_output(bb.emit(relax.op.sum(bb.emit(relax.op.multiply(x, w)))))
    step = train_step(bb.get(), SGD(lr=0.5), wrt="w")
    parallel = data_parallel(step, pair, values={"w": np.array(2.0)}, reduction="sum")
    assert parallel.step(np.arange(6.0)).loss == 30
    assert parallel.params["w"].numpy() == 2 - 0.5 * 15


def test_random_numbers_differ_by_worker(pair):
    step = train_step(module_of("float64", seed=True), SGD(lr=0.1), wrt=["w", "b"])
    parallel = data_parallel(step, pair, values=START, seed=0)
    batch = [np.concatenate([array, array]) for array in batches(1)[0]]
    parallel.step(*batch)
    first, second = parallel.own_losses
    assert first != second  # the seed is added to the predictions


def test_training_goes_on_from_a_file(pair, tmp_path):
    """With the same number of workers to the bit, and with one worker within rounding errors."""
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    step, values, data = linear(AdamW(lr=0.1))
    parallel = Trainer(step, distributed=pair, values=values, check_every=3)
    assert type(parallel) is DataParallelTrainer
    seen = []
    history = parallel.fit(
        data[:5],
        callbacks=[lambda trainer: seen.append(trainer.steps)],
        evaluate=lambda trainer: {"size": float(np.abs(trainer.params["w"].numpy()).sum())},
        progress=False,
    )
    assert seen == [1, 2, 3, 4, 5]
    assert history.evaluations[0]["size"] > 0
    parallel.save(tmp_path / "state")
    losses = [parallel.step(*batch).loss for batch in data[5:]]
    again = Trainer(step, distributed=pair, values=values)
    again.load(tmp_path / "state")
    assert (again.steps, again.epoch) == (5, 1)
    assert [again.step(*batch).loss for batch in data[5:]] == losses
    assert_same_bits(tensors(again), tensors(parallel))
    single = Trainer(step, values=values)
    single.load(tmp_path / "state")
    np.testing.assert_allclose([single.step(*batch).loss for batch in data[5:]], losses, 1e-5)


@pytest.mark.slow
def test_predictions_and_fit_of_an_imported_model(pair):
    imported, images, labels = digits_of_torch()
    step = train_step(imported, AdamW(lr=0.01))
    parallel = data_parallel(step, pair)
    loader = [(images[i : i + 64], labels[i : i + 64]) for i in range(0, 1280, 64)]

    def evaluate(trainer):
        scores = trainer.predict(images[1280:]).numpy()
        return {"accuracy": float(np.mean(scores.argmax(1) == labels[1280:]))}

    history = parallel.fit(loader, 3, evaluate=evaluate, progress=False)
    assert history.evaluations[-1]["accuracy"] > 0.8
    assert "own_loss" not in history.metrics


@pytest.mark.parametrize("options", [{}, {"loss_scale": "dynamic"}])
def test_a_loss_that_is_no_number_names_the_worker(pair, options):
    """The step changes nothing on any worker, and the session goes on."""
    step = train_step(module_of(), SGD(lr=0.1), wrt=["w", "b"], **options)
    parallel = data_parallel(step, pair, values=START, check_every=1)
    x, y = (np.concatenate([array, array]) for array in batches(1)[0])
    parallel.step(x, y)
    before = tensors(parallel)
    bad = x.copy()
    bad[7] = np.nan
    with pytest.raises(
        WorkerError, match=rf"worker 1 on {pair.hosts[1]}: its loss is nan"
    ) as error:
        parallel.step(bad, y)
    assert isinstance(error.value, FloatingPointError)
    assert error.value.rank == 1
    assert_same_bits(tensors(parallel), before)
    assert np.isfinite(parallel.step(x, y).loss)


def test_a_step_that_is_interrupted(pair, tmp_path, monkeypatch):
    """The trainer takes no call until all workers have a state of one moment."""
    step = train_step(module_of(), AdamW(lr=0.1), wrt=["w", "b"], loss_scale="dynamic")
    parallel = data_parallel(step, pair, values=START, check_every=1)
    batch = [np.concatenate([array, array]) for array in batches(1)[0]]
    parallel.save(tmp_path / "start")
    losses = [parallel.step(*batch).loss for _ in range(2)]
    after = tensors(parallel)
    run = pair.run

    def interrupted(task, **arguments):
        run(task, **arguments)
        raise KeyboardInterrupt

    parallel.load(tmp_path / "start")
    for call in (lambda: parallel.step(*batch), lambda: parallel.load(tmp_path / "start")):
        monkeypatch.setattr(pair, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
        monkeypatch.setattr(pair, "run", run)
        with pytest.raises(BrokenTrainerError, match="the last step did not end"):
            parallel.save(tmp_path / "half")
    parallel.load(tmp_path / "start")
    assert [parallel.step(*batch).loss for _ in range(2)] == losses
    assert_same_bits(tensors(parallel), after)


def test_replicas_that_differ_are_told(pair):
    """A bit of a parameter that changes on one worker is found at the next comparison."""
    step = train_step(module_of(), SGD(lr=0.1), wrt=["w", "b"])
    parallel = data_parallel(step, pair, values=START, check_every=2)
    batch = [np.concatenate([array, array]) for array in batches(1)[0]]
    parallel.step(*batch)
    pair.import_python_module("worker_tasks")
    pair.run("disturb", name=parallel._name, rank=1)
    with pytest.raises(WorkerError, match=r"worker 1 .*differ from worker 0 after step 1"):
        parallel.step(*batch)


def test_wrong_arguments(pair):
    step = train_step(module_of(), SGD(), wrt=["w", "b"])
    with pytest.raises(TypeError, match="session must be a result of"):
        data_parallel(step, None)
    with pytest.raises(ValueError, match="optimizer is for models"):
        data_parallel(step, pair, SGD())
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum'"):
        data_parallel(step, pair, reduction="max")
    with pytest.raises(ValueError, match="batch_norm must be"):
        data_parallel(step, pair, batch_norm="global")
    with pytest.raises(ValueError, match="replicated: the step has no input or target 'z'"):
        data_parallel(step, pair, replicated=["z"])
    with pytest.raises(ValueError, match="no input with an axis"):
        data_parallel(step, pair, replicated=["x", "y"])
    with pytest.raises(ValueError, match="check_every must be a number of steps"):
        data_parallel(step, pair, check_every=-1)
    with pytest.raises(TypeError, match="session must be a result of"):
        Trainer(step, distributed=2)
    with pytest.raises(TypeError, match="distributed is for Trainer; DataParallelTrainer has"):
        DataParallelTrainer(step, distributed=pair)
    with pytest.raises(ValueError, match="batch_norm must be"):
        Trainer(step, distributed=pair, batch_norm="global")
    dynamic, values, data = linear(SGD())
    parallel = data_parallel(dynamic, pair, values=values)
    with pytest.raises(ValueError, match="an example for each of the 2 workers, but it has 1"):
        parallel.step(*(array[:1] for array in data[0]))
    outputs = train_step(module_of(states=True), SGD(), wrt=["w"], states=["mean"], outputs=True)
    with pytest.raises(ValueError, match="returns no outputs"):
        data_parallel(outputs, pair)
