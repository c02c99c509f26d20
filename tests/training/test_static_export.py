"""Exported steps without a runtime: C programs train as Python does, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import static_trainer
import training_models
from static_models import ROWS, batches, digits_step
from static_trainer import StaticError, StaticTrainer, tensors_in
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.training import SGD, Trainer, _static, static_plan, train_step

HERE = Path(__file__).parent
TARGET = relax_grad.target.x86_64("v2", num_cores=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a trainer of Python, the library of its step, and the exported state."""
    folder = tmp_path_factory.mktemp("static") / "digits"
    trainer = Trainer(digits_step(), target=TARGET, seed=7)
    trainer.export(folder, runtime="none")
    return trainer, static_trainer.built(folder)


@pytest.fixture
def own(exported):
    """Return a new trainer of C, with the exported state."""
    return StaticTrainer(exported[1])


@pytest.fixture
def pair(exported, tmp_path):
    """Return a trainer of Python and one of C, with the exported state."""
    trainer, library = exported
    trainer.load(library.parent / "state.safetensors")
    return trainer, StaticTrainer(library)


def saved(trainer, folder) -> bytes:
    path = folder / "state.safetensors"
    trainer.save(path)
    return path.read_bytes()


def test_steps_and_states_have_the_bits_of_python(pair, tmp_path):
    python, own = pair
    for batch in batches(4):
        assert own.step(**batch) == python.step(**batch).loss
    state = saved(python, tmp_path)
    assert tensors_in(own.save()) == tensors_in(state)
    counters = own.counters()
    assert (counters.seed, counters.steps, counters.updates) == (7, 4, 4)
    images = batches(1, 5)[0]["input"]
    for ema in (False, True):
        (output,) = own.predict(ema, input=images)
        np.testing.assert_array_equal(output, python.predict(images, ema=ema).numpy())


def test_states_go_from_one_language_to_the_other(pair, tmp_path):
    python, own = pair
    first, second, third = batches(3)
    own.step(**first)
    (tmp_path / "c.safetensors").write_bytes(own.save())
    python.load(tmp_path / "c.safetensors")
    assert python.steps == 1
    python.step(**second)
    python.save(tmp_path / "p.safetensors", {"note": 'a "text" \u00e9', "list": [1, {"a": None}]})
    own.load((tmp_path / "p.safetensors").read_bytes())
    assert own.step(**third) == python.step(**third).loss
    (tmp_path / "c.safetensors").write_bytes(own.save())
    history = python.history.loss
    more = python.load(tmp_path / "c.safetensors")
    assert more == {"note": 'a "text" \u00e9', "list": [1, {"a": None}]}
    assert python.history.loss == history[:1], "C keeps the history of the file"


def test_states_go_to_the_trainer_of_c_plus_plus_and_back(exported, programs, tmp_path):
    """With the same kernels: a step there and here gives the same bits."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    trainer, library = exported
    first, second = batches(2)
    own = StaticTrainer(library)
    own.step(**first)
    trainer.export(tmp_path / "model")
    (tmp_path / "model/state.safetensors").write_bytes(own.save())
    save_file(second, tmp_path / "data.safetensors")
    arguments = [tmp_path / "data.safetensors", 1, ROWS, 0.003, tmp_path / "saved"]
    command = [programs / "train_c", tmp_path / "model", *arguments, tmp_path / "outputs"]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    own.set("lr", 0.003)
    own.step(**second)
    theirs = (tmp_path / "saved").read_bytes()
    assert tensors_in(theirs) == tensors_in(own.save())
    own.load(theirs)
    assert own.counters().steps == 2


@pytest.mark.slow
def test_changed_headers_are_read_without_faults(exported, tmp_path):
    """30,000 states without a checksum, with AddressSanitizer."""
    folder = exported[1].parent
    sources = [HERE / "static_fuzzer.c", *sorted(folder.glob("*.c")), folder / "kernels.o"]
    flags = ["-std=c99", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [static_trainer.COMPILER, *flags, "-I", folder, *sources, "-lm"]
    built = subprocess.run(
        [*map(str, command), "-o", str(tmp_path / "fuzzer")], capture_output=True, check=False
    )
    if built.returncode:
        pytest.skip("needs a C compiler with AddressSanitizer")
    arguments = [tmp_path / "fuzzer", folder / "state.safetensors", "30000"]
    run = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_library_needs_only_memory_and_mathematics(exported):
    if shutil.which("nm") is None:
        pytest.skip("needs nm of binutils")
    listed = subprocess.run(["nm", "-u", exported[1]], capture_output=True, text=True, check=True)
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if line}
    system = {"__cxa_finalize", "__stack_chk_fail", "__gmon_start__"}
    needed = {n for n in names if not n.startswith("_ITM") and not n.endswith(":")} - system
    assert needed <= static_trainer.LIBRARY_FUNCTIONS | {"pow", "exp", "log", "sqrt"}, needed


def failing(own, match, action, code=1):
    """Check that an action is an error, after which the state and the counters are as before."""
    before = own.save()
    with pytest.raises(StaticError, match=match) as caught:
        action()
    assert caught.value.code == code
    assert own.save() == before


def test_wrong_inputs_are_errors(own):
    (batch,) = batches(1)
    images, labels = batch.values()
    for match, wrong in (
        ("2 tensors, but 1 were", {"input": images}),
        ("needs the tensor target", {"input": images, "labels": labels}),
        ("target must have the dtype int64, but it has int32", {"target": labels.astype("int32")}),
        ("input must have 4 axes, but it has 3", {"input": images[:, 0]}),
        ("input must have the extent 6 on axis 0, .* 5", {"input": images[:5]}),
        ("target is 10 at its element 2, .* one of 10 .* from 0 to 9", {"target": labels * 0 + 10}),
        ("target is -1 at its element 0", {"target": labels * 0 - 1}),
    ):
        given = wrong if len(wrong) == 1 and "2 tensors" in match else {**batch, **wrong}
        given = wrong if "labels" in wrong else given
        if "element 2" in match:
            given["target"] = np.where(np.arange(ROWS) == 2, 10, 0)
        failing(own, match, lambda given=given: own.step(**given))
    # The ignored label counts as in range.
    assert own.step(**{**batch, "target": np.where(np.arange(ROWS) == 2, -100, labels)}) > 0


def test_a_loss_that_is_not_finite_leaves_everything(own, exported):
    (batch,) = batches(1)
    bad = {**batch, "input": np.full((ROWS, 1, 8, 8), np.nan, "float32")}
    failing(own, "the loss is not finite in step 0", lambda: own.step(**bad), code=2)
    skipping = StaticTrainer(exported[1], skip_nonfinite=1)
    before = tensors_in(skipping.save())
    assert np.isnan(skipping.step(**bad))
    assert not skipping.applied
    assert tensors_in(skipping.save()) == before
    assert (skipping.counters().steps, skipping.counters().skipped) == (1, 1)


def test_hyperparameters_hold_for_all_steps(pair):
    python, own = pair
    own.set("lr", 0.5)
    failing(own, "no hyperparameter momentum", lambda: own.set("momentum", 0.5))
    failing(own, "lr must be finite", lambda: own.set("lr", np.inf))
    for batch in batches(2):
        assert own.step(**batch) == python.step(**batch, lr=0.5).loss


def test_damaged_states_are_refused(own):
    (batch,) = batches(1)
    own.step(**batch)
    state = own.save()
    for size in [*range(60), *range(60, len(state), 401)]:
        failing(own, "damaged", lambda size=size: own.load(state[:size]))
    rng = np.random.default_rng(1)
    for place in rng.integers(0, len(state), 60):
        flipped = bytearray(state)
        flipped[place] ^= 1 << int(rng.integers(0, 8))
        failing(own, "damaged|header|of the format", lambda data=bytes(flipped): own.load(data))


def with_header(state: bytes, change) -> bytes:
    """Return a file without a checksum, of version 1, whose header was changed."""
    length = int.from_bytes(state[:8], "little")
    header = json.loads(state[8 : 8 + length])
    described = json.loads(header["__metadata__"]["relax_grad.training"])
    described["version"] = 1
    change(header, described)
    header["__metadata__"] = {"relax_grad.training": json.dumps(described)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + state[8 + length :]


WEIGHT = "params/0.weight"


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("lacks params/0.weight", lambda header, _: header.pop(WEIGHT)),
        ("a tensor that the step lacks", lambda header, _: header.update(new=header[WEIGHT])),
        ("another shape or dtype", lambda header, _: header[WEIGHT].update(shape=[4, 9])),
        ("another shape or dtype", lambda header, _: header[WEIGHT].update(dtype="I32")),
        ("damaged: the entry", lambda header, _: header[WEIGHT].update(data_offsets=[144, 0])),
        ("damaged: the entry", lambda header, _: header[WEIGHT].update(data_offsets=[-144, 0])),
        ("damaged: .* bytes", lambda header, _: header[WEIGHT].update(data_offsets=[0, 140])),
        ("overlap", lambda header, _: header[WEIGHT].update(data_offsets=[0, 144])),
        ("version 3", lambda _, described: described.update(version=3)),
        ("no checksum", lambda _, described: described.update(version=2)),
        ("counters or history", lambda _, described: described.pop("history")),
        ("counters or history", lambda _, described: described.update(more=[])),
        ("counters or history", lambda _, described: described["counters"].pop("seed")),
        ("seed must be from 0", lambda _, described: described["counters"].update(seed=2**31)),
        ("skipped is 9", lambda _, described: described["counters"].update(skipped=9)),
    ],
)
def test_states_that_do_not_fit_are_refused(own, match, change):
    state = own.save()
    own.load(with_header(state, lambda *_: None))
    failing(own, match, lambda: own.load(with_header(state, change)))


def test_memory_needs_no_alignment_and_is_not_left(exported):
    library = exported[1]
    (batch,) = batches(1)
    losses = set()
    for shift in (0, 1, 63):
        own = StaticTrainer(library, shift=shift)
        losses.add(own.step(**batch))
        outside = np.delete(own.memory, np.s_[shift : shift + own.size])
        assert set(outside.tolist()) == {0xA5}
    assert len(losses) == 1
    with pytest.raises(StaticError, match=f"at least {own.size} bytes, but it has {own.size - 1}"):
        StaticTrainer(library, less=1)
    described = json.loads((library.parent / "manifest.json").read_text())
    # The constant in step.h is a bound for all processors.
    assert own.size <= described["memory"]["trainer"] <= own.size + 1024


def test_memory_is_bounded_before_the_step_is_compiled(exported, tmp_path, monkeypatch):
    trainer, library = exported
    described = json.loads((library.parent / "manifest.json").read_text())["memory"]
    needed, arena = described["trainer"], described["arena"]
    static_plan(trainer.train_step, TARGET, memory=needed)
    monkeypatch.setattr(_static, "object_file", lambda *_: pytest.fail("code was generated"))
    for memory, reason in (
        (needed - 1, f"{arena} bytes, but {arena - 1} are left for it besides the state"),
        (100, f"{arena} bytes, and nothing is left for it besides the state"),
    ):
        match = f"memory is {memory} bytes, but a trainer needs {needed}: .* at least {reason}"
        with pytest.raises(ValueError, match=match):
            trainer.export(tmp_path / "none", runtime="none", memory=memory)
        with pytest.raises(ValueError, match=match):
            static_plan(trainer.train_step, TARGET, memory=memory)
    assert not (tmp_path / "none").exists()


def test_a_long_history_needs_memory(own, exported, tmp_path):
    trainer, library = exported
    trainer.load(library.parent / "state.safetensors")
    trainer.save(tmp_path / "long.safetensors", {"text": "x" * 5000})
    long = (tmp_path / "long.safetensors").read_bytes()
    failing(own, "open the trainer with more memory", lambda: own.load(long))
    with_room = StaticTrainer(library, long, more=6000)
    assert b"x" * 5000 in with_room.save()
    dropping = StaticTrainer(library, long, drop_history=1)
    assert b"xx" not in dropping.save()
    (tmp_path / "c.safetensors").write_bytes(dropping.save())
    assert trainer.load(tmp_path / "c.safetensors") == {}


def test_the_workspace_is_exact_and_a_failed_step_is_noticed(exported, tmp_path):
    """With 64 bytes less, a kernel finds no workspace: the plan bounds it tightly."""
    folder = tmp_path / "less"
    shutil.copytree(exported[1].parent, folder)
    described = json.loads((folder / "manifest.json").read_text())["memory"]
    needed = described["workspace"]
    text, model = (folder / "step.c").read_text(), f"{described['arena']}, {needed},"
    assert text.count(model) == 1
    (folder / "step.c").write_text(
        text.replace(model, model.replace(f"{needed}", f"{needed - 64}"))
    )
    own = StaticTrainer(static_trainer.built(folder, "step.c"))
    (batch,) = batches(1)
    with pytest.raises(StaticError, match="a kernel ran out of workspace"):
        own.step(**batch)
    with pytest.raises(StaticError, match="the last step did not end"):
        own.step(**batch)
    own.load((folder / "state.safetensors").read_bytes())
    own.save()


def test_accumulated_and_skipped_steps_count_as_in_python(tmp_path):
    """With dynamic loss scaling, metrics, outputs, states and a seed."""
    step = train_step(
        training_models.module_of("float32", seed=True, states=True),
        SGD(momentum=0.9),
        wrt=["w", "b"],
        states=["mean"],
        accumulate=2,
        clip_norm=1.0,
        loss_scale="dynamic",
        outputs=True,
    )
    values = {**training_models.START, "mean": np.zeros(3)}
    values = {name: np.asarray(value, "float32") for name, value in values.items()}
    python = Trainer(step, target=TARGET, values=values, on_nan="skip")
    python.export(tmp_path / "step", runtime="none")
    own = StaticTrainer(static_trainer.built(tmp_path / "step"), skip_nonfinite=1)
    raising = StaticTrainer(tmp_path / "step" / "step.shared")
    given = training_models.batches(6, "float32")
    given[1] = given[1][0] * np.float32(np.nan), given[1][1]  # no loss
    given[3] = given[3][0] * np.float32(3e17), given[3][1]  # a loss, but no gradient
    for i, (x, y) in enumerate(given):
        if i == 1:
            failing(raising, "the loss is not finite", lambda x=x, y=y: raising.step(x=x, y=y), 2)
        wanted = python.step(x, y)
        np.testing.assert_equal(own.step(x=x, y=y), wanted.loss)
        if i != 1:
            assert raising.step(x=x, y=y) is not None
        np.testing.assert_equal(own.metrics(), wanted.metrics)
        for mine, other in zip(own.outputs(), wanted.outputs.values(), strict=True):
            np.testing.assert_array_equal(mine, other.numpy())
        assert tensors_in(own.save()) == tensors_in(saved(python, tmp_path))
    counters = own.counters()
    assert counters.skipped == 2
    assert [counters.steps, counters.updates, counters.skipped] == [
        *(python.steps, python.updates, python.skipped)
    ]
    with pytest.raises(StaticError, match="no function for prediction"):
        own.predict()


def test_a_smaller_last_batch_has_a_plan_of_its_own(tmp_path):
    import tvm

    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 5), "float32"))
    w = relax.Var("w", relax.TensorType((5,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            loss = bb.emit_output(op.mean(op.square(op.matmul(x, w))))
        bb.emit_func_output(loss)
    step = train_step(bb.get(), SGD(0.1, momentum=0.9), wrt="w")
    python = Trainer(step, target=TARGET, values={"w": np.ones(5, "float32")})
    python.export(tmp_path / "step", runtime="none", extents=[{"n": 8}, {"n": 3}])
    own = StaticTrainer(static_trainer.built(tmp_path / "step"))
    assert own.number("num_sizes") == 2
    rng = np.random.default_rng(0)
    for rows in (8, 8, 3, 8):
        rows_of = rng.random((rows, 5), "float32")
        np.testing.assert_allclose(own.step(x=rows_of), python.step(rows_of).loss, rtol=1e-6)
    np.testing.assert_allclose(own.group("params")["w"], python.params["w"].numpy(), rtol=1e-6)
    failing(own, "the extent 8 on axis 0, as .* but it has 5", lambda: own.step(x=rows_of[:5]))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_posix_threads_give_the_same_bits(tmp_path):
    x = relax.Var("x", relax.TensorType((128, 256), "float32"))
    w = relax.Var("w", relax.TensorType((256, 512), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            loss = bb.emit_output(op.mean(op.square(op.nn.gelu(op.matmul(x, w)))))
        bb.emit_func_output(loss)
    rng = np.random.default_rng(0)
    values = {"w": rng.standard_normal((256, 512), "float32")}
    target = relax_grad.target.x86_64("v2", num_cores=4)
    trainer = Trainer(train_step(bb.get(), SGD(), wrt="w"), target=target, values=values)
    given = [rng.random((128, 256), "float32") for _ in range(4)]
    found, before = {}, len(list(Path("/proc/self/task").iterdir()))
    for threads in (1, 3):
        folder = tmp_path / f"{threads}"
        trainer.export(folder, runtime="none")
        flags = [f"-DRELAX_GRAD_THREADS={threads}", "-pthread"]
        own = StaticTrainer(static_trainer.built(folder, flags=flags if threads > 1 else ()))
        losses = [own.step(x=rows) for rows in given]
        started = len(list(Path("/proc/self/task").iterdir())) - before
        assert started == threads - 1
        found[threads] = losses, tensors_in(own.save()), own.size
    assert found[1][:2] == found[3][:2]
    workspace = json.loads((folder / "manifest.json").read_text())["memory"]["workspace"]
    assert found[3][2] - found[1][2] == 2 * workspace > 0


def test_the_program_of_the_page_trains(exported, tmp_path):
    page = (Path(__file__).parents[2] / "docs/without_runtime.md").read_text()
    (program,) = re.findall(r"^```c\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "train.c").write_text(re.sub(r"\b32\b", f"{ROWS}", program))
    folder = exported[1].parent
    static_trainer.program(tmp_path / "train.c", folder)
    state = folder / "state.safetensors"
    run = subprocess.run([tmp_path / "train", state], capture_output=True, text=True, check=False)
    own = StaticTrainer(exported[1])
    zeros = {"input": np.zeros((ROWS, 1, 8, 8), "float32"), "target": np.zeros(ROWS, "int64")}
    own.set("lr", 0.005)
    assert run.stdout == f"loss {own.step(**zeros):.9g}\n"
    assert run.returncode == 0
    run = subprocess.run([tmp_path / "train"], capture_output=True, text=True, check=False)
    assert (run.returncode, "damaged: it has 0 bytes" in run.stdout) == (1, True)


def test_arguments_that_do_not_go_together(exported, tmp_path):
    trainer = exported[0]
    for match, options in (
        ('"tvm" or "none", but it is \'wasm\'', {"runtime": "wasm"}),
        ("extents is for runtime", {"extents": {"n": 3}}),
        ("memory is for runtime", {"memory": 1 << 20}),
        ("memory must be a positive", {"runtime": "none", "memory": 0}),
        ("compiler is for runtime", {"runtime": "none", "compiler": "gcc"}),
        ("takes one target", {"runtime": "none", "target": [TARGET]}),
        ("no symbolic extent 'n'; it has none", {"runtime": "none", "extents": {"n": 3}}),
        ("n must be a positive number of elements", {"runtime": "none", "extents": {"n": 0}}),
        ("stands twice", {"runtime": "none", "extents": [{"n": 3}, {"n": 3}]}),
    ):
        with pytest.raises(ValueError, match=match):
            trainer.export(tmp_path / "none", **options)
    for wrong in ("n", 3, [3], {1: 2}, {"n": "3"}):
        with pytest.raises(TypeError, match="extents"):
            trainer.export(tmp_path / "none", runtime="none", extents=wrong)
    with pytest.raises(TypeError, match="memory must be a number of bytes"):
        trainer.export(tmp_path / "none", runtime="none", memory="1 MB")
    assert not (tmp_path / "none").exists()


def test_an_incomplete_triple_is_refused(exported, tmp_path):
    target = {"kind": "llvm", "mtriple": "thumbv7em-none-eabihf", "mcpu": "cortex-m7"}
    with pytest.raises(ValueError, match="must have four parts, thumbv7em-unknown-none-eabihf"):
        exported[0].export(tmp_path / "none", runtime="none", target=target)
