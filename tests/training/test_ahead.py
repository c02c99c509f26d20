"""Steps on a device that begin before the losses of earlier ones are read have the same results.

A stand-in on the CPU for the device copies as late as CUDA may.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tvm
from interrupts import interrupted, state_of
from late_device import OPTIONS
from late_device import late_device as stand_in
from training_models import START, batches, module_of
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.errors import BrokenTrainerError
from relax_grad.training import (
    SGD,
    Adam,
    AdamW,
    Trainer,
    _ahead,
    _device,
    _feed,
    _loop,
    _moment,
    _steps,
    history,
    train_step,
    trainer,
)

FILES = {m.__file__ for m in (_ahead, _device, _feed, _loop, _moment, _steps, history, trainer)}
BATCHES = batches(7, "float32")
INFINITE = np.full((6, 3), np.inf, "float32"), np.zeros(6, "float32")

STEPS = {
    "plain": (SGD(0.05, momentum=0.9), {}),
    "scaled": (Adam(0.05), {"accumulate": 2, "loss_scale": "dynamic"}),
    "clipped": (AdamW(0.05), {"skip_nonfinite": True, "clip_norm": 1.0, "ema": 0.9}),
}


def step_of(case):
    optimizer, options = STEPS[case]
    module = module_of("float32", seed=True, states=True)
    return train_step(module, optimizer, wrt=["w", "b"], states=["mean"], **options)


def values():
    return {name: np.float32(value) for name, value in {**START, "mean": np.zeros(3)}.items()}


def with_infinite(*places):
    return [INFINITE if i in places else batch for i, batch in enumerate(BATCHES)]


def outcome(trained, loader, start, **options):
    """Return the state after a fit from the start, and the error."""
    trained.load(start)
    error = None
    try:
        trained.fit(loader, 2, progress=False, **options)
    except FloatingPointError as raised:
        error = str(raised)
    return state_of(trained), error


@pytest.fixture(scope="module")
def late_device():
    with stand_in() as device:
        yield device


@pytest.fixture(scope="module")
def make(late_device, tmp_path_factory):
    """Make a trainer of a step, and the file of its start; each step is compiled once."""
    folder, made = tmp_path_factory.mktemp("starts"), {}

    def make(case="scaled"):
        if case not in made:
            made[case] = Trainer(step_of(case), values=values(), **OPTIONS)
            made[case].save(folder / case)
        made[case].load(folder / case)
        return made[case], folder / case

    return make


@pytest.mark.parametrize("case", STEPS)
def test_results_have_the_same_bits(late_device, make, case):
    """With losses that are not finite, and learning rates by the number of the update."""
    trained, start = make(case)
    schedule = {"schedule": lambda update: 0.1 / (1 + update)}
    for on_nan in ("skip", "raise"):
        trained.on_nan = on_nan
        for places in ((), (0,), (2, 3), (1, 4, 6)):
            loader = with_infinite(*places)
            wanted = outcome(trained, loader, start, ahead=0, **schedule)
            assert (wanted[1] is None) == (on_nan == "skip" or not places)
            for ahead in (1, 3):
                late_device.reset()
                found = outcome(trained, loader, start, ahead=ahead, **schedule)
                assert found == wanted, (places, ahead)
                assert late_device.most == ahead + 1
    assert wanted[1].startswith("the loss is nan in step 1; everything is as before the step")


def test_results_are_those_of_the_cpu(make):
    trained, start = make()
    on_cpu = Trainer(trained.train_step, values=values())
    for on_nan in ("skip", "raise"):
        for each in (trained, on_cpu):
            each.on_nan = on_nan
            outcome(each, with_infinite(2, 4), start)
        assert trained.steps == on_cpu.steps
        np.testing.assert_allclose(trained.history.loss, on_cpu.history.loss, 1e-5)
        for name, value in {**on_cpu.values, **on_cpu.optimizer_state}.items():
            own = {**trained.values, **trained.optimizer_state}[name]
            np.testing.assert_allclose(own.numpy(), value.numpy(), 1e-5, 1e-6)


def test_steps_do_not_wait(late_device, make):
    """The host waits for the device at the end of an epoch only, and for copies of the state."""
    trained, _ = make()
    trained.on_nan = "raise"
    late_device.reset()
    trained.fit([*BATCHES] * 5, progress=False)
    assert (late_device.waits, late_device.most) == (0, 3)
    late_device.reset()
    trained.fit(BATCHES, progress=False, callbacks=[lambda _: None])
    assert late_device.waits >= len(BATCHES)
    assert late_device.most == 1


@pytest.mark.parametrize("kind", ["OneCycleLR", "SequentialLR", "LambdaLR"])
def test_schedulers_take_updates_back(make, kind):
    torch = pytest.importorskip("torch")
    lrs = torch.optim.lr_scheduler
    kinds = {
        "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=12),  # and the momentum
        "SequentialLR": lambda o: lrs.SequentialLR(
            o, [lrs.LinearLR(o, 0.2, 1.0, 3), lrs.ExponentialLR(o, 0.7)], [3]
        ),
        "LambdaLR": lambda o: lrs.LambdaLR(o, lambda k: 1 / (1 + k)),
    }
    trained, start = make()
    for on_nan in ("skip", "raise"):
        found, trained.on_nan = [], on_nan
        for ahead in (0, 2):
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1, momentum=0.9)
            scheduler = kinds[kind](optimizer)
            results = outcome(trained, with_infinite(1, 4), start, schedule=scheduler, ahead=ahead)
            (group,) = optimizer.param_groups
            settings = {key: value for key, value in group.items() if key != "params"}
            found.append((*results, repr(scheduler.state_dict()), settings))
        assert found[0] == found[1]


class Stop(Exception):
    """An error of a loader."""


@pytest.mark.parametrize("places", [(), (1,), (2,), (3,)])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_loader_that_fails(make, places, error):
    """The steps that have begun count, and an error of an earlier step is raised instead, unless
    the user interrupts."""
    trained, start = make()

    def loader():
        yield from with_infinite(*places)[:4]
        raise error

    for on_nan in ("skip", "raise"):
        found, trained.on_nan = [], on_nan
        for ahead in (0, 2):
            trained.load(start)
            wanted = FloatingPointError if places and on_nan == "raise" else error
            if ahead and error is KeyboardInterrupt and places != (1,):
                wanted = KeyboardInterrupt  # before the loss was read
            with pytest.raises(wanted):
                trained.fit(loader(), progress=False, ahead=ahead)
            found.append(state_of(trained))
        if on_nan == "skip" and places and places != (1,):
            # The batches after the skipped one were not trained again, and are next.
            assert found[1]["batch"] == found[1]["steps"] == places[0] + 1
        else:
            assert found[0] == found[1]
        trained.fit(BATCHES, progress=False)
        assert (trained.batch, trained.epoch) == (0, 1)
        assert trained.history.step == list(range(trained.steps)) == list(range(7))


def test_a_step_that_does_not_end(make, monkeypatch):
    """The steps before it count, and a state must be loaded."""
    trained, start = make()
    call, left = _device.DevicePlace.call, 3

    def failing(*arguments):
        nonlocal left
        function, given = call(*arguments)
        left -= 1
        return (function, given) if left else (fails, given)

    def fails(*_):
        raise MemoryError("in the middle of the step")

    with monkeypatch.context() as patch:
        patch.setattr(_device.DevicePlace, "call", failing)
        with pytest.raises(MemoryError, match="in the middle"):
            trained.fit(BATCHES, progress=False)
    for _ in range(2):
        with pytest.raises(BrokenTrainerError, match=r"load a saved state with Trainer\.load"):
            trained.step(*BATCHES[0])
    assert trained._moment.steps == 2
    trained.load(start)
    trained.step(*BATCHES[0])


def test_an_interrupt_anywhere(make):
    """The state is the one after a step of a training without interrupts, which goes on."""
    trained, start = make()
    trained.on_nan, states = "raise", []
    trained.fit(BATCHES, 2, progress=False, callbacks=[lambda t: states.append(state_of(t))])
    trained.load(start)
    places = set()
    for number in range(40, 100_000, 397):
        with interrupted(number, FILES) as place:
            trained.fit(BATCHES, 2, progress=False)
        places.update(name for name, _ in place)
        now = state_of(trained)
        if now["steps"]:
            wanted = states[now["steps"] - 1]
            assert {k: v for k, v in now.items() if k not in ("epoch", "batch", "evaluations")} == {
                k: v for k, v in wanted.items() if k not in ("epoch", "batch", "evaluations")
            }
        if now["steps"] == 14:
            break
    assert {"_begin", "staged", "follow"} & places
    assert trained.epoch == 2


def test_a_training_that_waits(late_device):
    """Nothing could take back an update of another pipeline, or of a scheduler without a state."""
    options = {**OPTIONS, "compile_options": {"relax_pipeline": "default"}}
    other = Trainer(step_of("plain"), values=values(), **options)
    late_device.reset()
    other.fit(BATCHES, progress=False, ahead=2)
    assert late_device.most == 1
    assert [_ahead.ahead_of(ahead, [], object()) for ahead in (None, 2)] == [0, 0]


def test_a_loader_may_use_its_memory_again(make):
    """Each batch is copied before the next one is drawn, also for a second call of its step."""
    trained, start = make()
    trained.on_nan = "skip"

    def loader():
        memory = [tvm.runtime.tensor(array) for array in BATCHES[0]]
        for batch in with_infinite(1, 2, 5):
            for own, array in zip(memory, batch, strict=True):
                own.copyfrom(array)
            yield memory

    wanted = outcome(trained, with_infinite(1, 2, 5), start, ahead=0)
    trained.load(start)
    for _ in range(2):
        trained.fit(loader(), progress=False)
    assert state_of(trained) == wanted[0]


def test_a_loader_that_reads_the_trainer(make):
    trained, start = make()
    trained.on_nan = "skip"
    for on_nan in ("skip", "raise"):
        trained.on_nan, found = on_nan, []
        for ahead in (0, 3):
            seen = []

            def loader(seen=seen):
                for i, batch in enumerate(with_infinite(2, 4)):
                    if i in (3, 6):
                        seen.append((trained.steps, trained.skipped))
                    yield batch

            class Loader:
                def __iter__(self, loader=loader):
                    return loader()

            found.append((outcome(trained, Loader(), start, ahead=ahead), seen[:1]))
        assert found[0][0] == found[1][0]
        if on_nan == "skip":
            assert found[0][1] == found[1][1]


def test_a_schedule_that_reads_the_trainer(make):
    trained, start = make()
    trained.on_nan, loader = "skip", with_infinite(1, 4)

    def schedule(update):
        return 0.1 / (1 + trained.skipped + update)

    wanted = outcome(trained, loader, start, ahead=0, schedule=schedule)
    assert outcome(trained, loader, start, ahead=3, schedule=schedule) == wanted


def test_another_thread_that_reads_the_trainer(make):
    """Results are read once, by either thread."""
    trained, start = make()
    trained.on_nan = "skip"
    loader = with_infinite(2, 5) * 4
    wanted = outcome(trained, loader, start, ahead=0)
    is_over, seen = threading.Event(), []

    def watch():
        while not is_over.is_set():
            with trained._lock:  # as predict does
                seen.append(trained.steps)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert outcome(trained, loader, start, ahead=3) == wanted
    finally:
        is_over.set()
        thread.join()
    assert len(set(seen)) > 1


def test_a_state_that_is_the_last_batch(late_device, tmp_path):
    """The next batch in the same memory leaves the state as it is."""
    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float32"))
    last = relax.Var("last", relax.TensorType((4, 3), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w, last]):
        difference = bb.emit(op.subtract(x, last))
        y = bb.emit(op.matmul(difference, w))
        loss = bb.emit(op.sum(op.square(y)))
        bb.emit_func_output(relax.Tuple([loss, x]))
    step = train_step(bb.get(), SGD(0.001), wrt=["w"], states=["last"], accumulate=1)
    start = {"w": np.ones(3, "float32"), "last": np.zeros((4, 3), "float32")}
    loader = [batch[0][:4] for batch in BATCHES]
    trained, found = Trainer(step, values=start, **OPTIONS), []
    trained.save(tmp_path / "start")
    for ahead in (0, 2):
        trained.load(tmp_path / "start")
        trained.fit(loader, 2, progress=False, ahead=ahead)
        found.append(state_of(trained))
    assert found[0] == found[1]
    np.testing.assert_array_equal(trained.states["last"].numpy(), loader[-1])


def test_batches_of_many_sizes(late_device):
    """Their memory is freed when no step uses it."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        loss = bb.emit(op.mean(op.square(bb.emit(op.matmul(x, w)))))
        bb.emit_func_output(loss)
    step = train_step(bb.get(), SGD(0.01), wrt=["w"])
    start = {"w": np.ones(3, "float32")}
    loader = [np.full((rows, 3), rows, "float32") for rows in (3, 5, 5, 2, 7)]
    trained, on_cpu = Trainer(step, values=start, **OPTIONS), Trainer(step, values=start)
    for each in (trained, on_cpu):
        each.fit(loader, 2, progress=False)
    assert len(set(trained.history.loss)) > 5
    np.testing.assert_allclose(trained.history.loss, on_cpu.history.loss, 1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ahead": -1}, ValueError, "ahead must be"),
        ({"ahead": "2"}, TypeError, "ahead must be"),
        (
            {"ahead": 1, "callbacks": [lambda _: None]},
            ValueError,
            "callbacks see the trainer after each step, but ahead=1 lets later steps begin",
        ),
    ],
)
def test_refusals(options, error, message):
    trained = Trainer(step_of("plain"), values=values())
    with pytest.raises(error, match=message):
        trained.fit(BATCHES, **options)
