"""Exported steps for pages: WebAssembly in Node trains as Python does on x86-64-v2, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import training_models
from static_models import ROWS, batches, digits_step
from static_trainer import tensors_in
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.static import webassembly
from relax_grad.training import SGD, Trainer, train_step

HERE = Path(__file__).parent
NODE = shutil.which("node") or shutil.which("nodejs")
TARGET = relax_grad.target.x86_64("v2", num_cores=1)
WASM = relax_grad.target.wasm()


def tools() -> None:
    """Skip the test without the tools."""
    if NODE is None:
        pytest.skip("Node is not installed: apt-get install nodejs")
    try:
        webassembly.tools()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def node(command: str, folder: Path, file: Path | list | None = None, *options: str) -> dict:
    """Run a command of web_trainer.mjs with a file, or with batches."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as written:
        if isinstance(file, list):
            lists = [
                {name: array.ravel().tolist() for name, array in batch.items()} for batch in file
            ]
            json.dump(lists, written)
            written.flush()
            file = Path(written.name)
        program = [
            NODE,
            *options,
            HERE / "web_trainer.mjs",
            command,
            folder,
            *([file] if file else []),
        ]
        run = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a trainer of Python and the folder for pages."""
    tools()
    folder = tmp_path_factory.mktemp("web") / "digits"
    trainer = Trainer(digits_step(), target=TARGET, seed=7)
    trainer.export(folder, target=WASM)
    return trainer, folder


@pytest.fixture
def pair(exported):
    """Return a trainer of Python with the exported state, and the folder."""
    trainer, folder = exported
    trainer.load(folder / "state.safetensors")
    return trainer, folder


@pytest.fixture(scope="module")
def other_state(tmp_path_factory):
    """Return the path of the state of another step."""
    module = training_models.module_of("float32")
    values = {name: np.asarray(v, "float32") for name, v in training_models.START.items()}
    trainer = Trainer(train_step(module, SGD(), wrt=["w", "b"]), values=values)
    path = tmp_path_factory.mktemp("other") / "other.safetensors"
    trainer.save(path)
    return path


def test_the_folder_has_one_module_and_a_trainer(exported):
    folder = exported[1]
    names = {"manifest.json", "state.safetensors", "step.wasm", "trainer.d.mts", "trainer.mjs"}
    assert {path.name for path in folder.iterdir() if "node" not in path.name} >= names
    assert not list(folder.glob("*.c")) + list(folder.glob("*.o"))
    described = json.loads((folder / "manifest.json").read_text())
    assert (described["format"], described["library"]) == ("relax_grad.web", "step.wasm")
    module = (folder / "step.wasm").read_bytes()
    assert described["library_bytes"] == len(module) < 100_000


def test_steps_and_states_have_the_bits_of_python(pair):
    python, folder = pair
    given = batches(6)
    own = node("train", folder, given)
    assert own["losses"] == [python.step(**batch).loss for batch in given]
    counters = {name: own["counters"][name] for name in ("seed", "steps", "updates", "skipped")}
    assert counters == {"seed": 7, "steps": 6, "updates": 6, "skipped": 0}
    for ema, prediction in zip((False, True), own["predictions"], strict=True):
        wanted = python.predict(given[0]["input"], ema=ema).numpy()
        np.testing.assert_array_equal(np.float32(prediction).reshape(wanted.shape), wanted)
    python.save(folder / "python.safetensors", {"note": 'a "text" \u00e9'})
    state = (folder / "node.safetensors").read_bytes()
    assert tensors_in(state) == tensors_in((folder / "python.safetensors").read_bytes())
    more = batches(3, seed=1)
    resumed = node("resume", folder, more)
    python.load(folder / "python.safetensors")
    assert resumed["losses"] == [python.step(**batch, lr=0.005).loss for batch in more]
    assert resumed["hyperparameters"]["lr"] == 0.005
    # A state that Node saved goes on in Python, with what Python wrote of its own.
    wanted = {name: value.numpy() for name, value in python.params.items()}
    assert python.load(folder / "node.safetensors") == {"note": 'a "text" \u00e9'}
    assert python.steps == 9
    for name, value in python.params.items():
        np.testing.assert_array_equal(value.numpy(), wanted[name])


def test_fit_tells_its_progress_and_goes_on(pair):
    python, folder = pair
    given = batches(3)
    own = node("fit", folder, given)
    assert own["losses"] == [python.step(**batch).loss for batch in given * 3]
    assert own["places"] == [[epoch, batch] for epoch in range(3) for batch in (1, 2, 3)]
    assert (own["timed"], own["predicted"], own["epochs"]) == (True, 1, [2])
    ends = [(own[name]["epoch"], own[name]["batch"]) for name in ("counters", "stopped", "resumed")]
    assert ends == [(2, 0), (2, 1), (3, 0)]
    names = ("step", "load", "fit", "setHyperparameter", "setCounters")
    for name, error in zip(names, own["busy"], strict=True):
        assert error["message"].startswith(f"{name} while fit runs")
        assert (error["code"], error["isSame"]) == ("busy", True)
    wanted = ["above 3", 'above 3, .*"5"', "batches must be an iterable", "gave no batch"]
    _check(own["wrong"], wanted)


def _check(errors: list[dict], wanted: list[str], *, same: bool = True) -> None:
    for error, match in zip(errors, wanted, strict=True):
        assert re.search(match, error["message"]), (match, error)
        assert error["isSame"] is same, error
        assert error["code"] in ("error", "not_finite", "memory", "broken"), error


def test_calls_that_do_not_fit_leave_the_state(pair):
    own = node("calls", pair[1], batches(1))
    wanted = [
        "needs 2 tensors, but 0 were given",
        "takes an object with input, target, but it is null",
        "takes an object with input, target, but it is an object of Array",
        "needs 2 tensors, but 1 were given",
        "has no input more; it has input, target",
        "target must have the dtype int64, as a BigInt64Array .* object of Float32Array",
        "input must have the dtype float32, as a Float32Array .* object of Float64Array",
        'input must have the dtype float32, .* but it is "text"',
        r"input must have 384 elements, with the extents \(6, 1, 8, 8\), but it has 383",
        r"target must have 6 elements, with the extents \(6\), but it has 7",
        "input must have 4 axes, but it has 1",
        "input must have the extent 6 on axis 0, .* but it has 1",
        r"input has 384 elements, but the shape \(3\)",
        'shape of input must be a list of extents, but it is "6"',
        "target is 10 at its element 0, but it selects one of 10",
        "target is -1 at its element 0",
        "target must have elements of int64, but its element 0 is 1.5",
        "target must have elements of int64, but its element 0 is 18446744073709551616",
        'input must have elements of float32, but its element 0 is "1"',
        "the loss is not finite in step 0; everything is as before",
        "predict has no input target; it has input",
        "input must have 384 elements, .* but it has 1",
        "no hyperparameter rate",
        "lr must be finite",
        'lr must be a number, but it is "1"',
        "steps must be from 0",
        "counters must be integers named seed, .* but step is 1",
        "but steps is 1.5",
        'the group must be params, .* but it is "weights"',
    ]
    _check(own["errors"], wanted)
    assert own["errors"][19]["code"] == "not_finite"
    assert own["first"] == own["again"], "and the order of inputs is free"
    assert own["skipped"] == [False, 1, "NaN"]


def test_files_that_are_damaged_or_of_others(pair, other_state):
    own = node("files", pair[1], other_state)
    wanted = [
        "step.wasm has 5000 bytes, but manifest.json says",
        "step.wasm is damaged, or of another export: its checksum",
        "step.wasm has 8 bytes",
        "source.module must be bytes",
        "manifest.json is damaged",
        "manifest.json is damaged",
        'must have the format "relax_grad.web", but it has "relax_grad.training"',
        "has version 3, but version 2 is known",
        "manifest.json is damaged: it has no checksum",
        "the state is damaged: it has 7 bytes",
        "the state is damaged: its checksum is wrong",
        "a tensor that the step lacks|the state lacks",
        "refuses .* MB of memory",
        "room must be a number of bytes, but it is -1",
        "source.manifest must be bytes",
        "no such file",
        "the state is damaged: it has 0 bytes",
        "the state is damaged",
        "a tensor that the step lacks|the state lacks",
        "the state must be bytes, .* but it is an object of Object",
    ]
    found = own["errors"]
    assert found[15].pop("code") == "Error"
    found[15]["code"] = "error"
    _check(found, wanted)
    assert own["same"]


def test_traps_and_refused_memory(pair):
    python, folder = pair
    given = batches(1)
    own = node("traps", folder, given)
    wanted = ["step did not end: unreachable", "open the trainer again", "open the trainer again"]
    _check(own["errors"], [*wanted, r"refuses \d+ MB of memory .*no memory"])
    assert [error["code"] for error in own["errors"]] == ["broken"] * 3 + ["memory"]
    assert own["same"]
    assert own["loss"] == python.step(**given[0]).loss


def test_the_programs_of_the_page_train(pair, tmp_path):
    page = (HERE.parents[1] / "docs/web.md").read_text()
    blocks = re.findall(r"^```js\n(.*?)^```$", page, re.M | re.S)
    program = "".join(block for block in blocks if "postMessage" not in block)
    assert program.count("await open") == 2
    (tmp_path / "page.mjs").write_text(re.sub(r"\b32\b", f"{ROWS}", program))
    shutil.copytree(pair[1], tmp_path / "model")
    run = subprocess.run(
        [NODE, "page.mjs"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.stdout.splitlines() == [
        f"[ {ROWS}, 1, 8, 8 ] true",
        f"[ {ROWS}, 10 ] {10 * ROWS}",
        "epoch 0, batch 1: loss true",
        "epoch 1, batch 1: loss true",
        "3 true",
    ], run.stderr


def test_sizes_metrics_outputs_and_functions_of_the_engine(tmp_path):
    """A smaller last batch, accumulation, and sines, which JavaScript computes."""
    import tvm

    tools()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 5), "float32"))
    w = relax.Var("w", relax.TensorType((5,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            y = bb.emit(op.matmul(op.tan(x), w))
            loss = bb.emit_output(op.mean(op.square(op.sin(op.astype(y, "float64")))))
        bb.emit_func_output(loss)
    step = train_step(bb.get(), SGD(0.1, momentum=0.9), wrt="w", accumulate=2, clip_norm=1.0)
    python = Trainer(step, target=TARGET, values={"w": np.ones(5, "float32")})
    python.export(tmp_path / "web", target=WASM, extents=[{"n": 8}, {"n": 3}])
    rng = np.random.default_rng(0)
    given = [{"x": rng.random((rows, 5), "float32")} for rows in (8, 8, 3, 8)]
    own = node("train", tmp_path / "web", given)
    assert [size["x"]["shape"] for size in own["types"]] == [[8, 5], [3, 5]]
    for batch, loss, metrics in zip(given, own["losses"], own["metrics"], strict=True):
        wanted = python.step(**batch)
        # ECMAScript lets engines choose the last bits of Math.sin and Math.tan.
        np.testing.assert_allclose(loss, wanted.loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], wanted.metrics["grad_norm"], rtol=1e-6)
    assert own["counters"]["updates"] == python.updates == 2


def half_step(dtype):
    """Return a trainer of Python whose loss is computed in a dtype of 16 bits."""
    x = relax.Var("x", relax.TensorType((8, 4), "float32"))
    w = relax.Var("w", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        with bb.dataflow():
            y = bb.emit(op.sigmoid(op.astype(op.multiply(x, w), dtype)))
            loss = bb.emit_output(op.mean(op.astype(y, "float32")))
        bb.emit_func_output(loss)
    step = train_step(bb.get(), SGD(0.1), wrt="w")
    return Trainer(step, target=TARGET, values={"w": np.ones(4, "float32")})


def test_bfloat16_trains_and_float16_is_refused(tmp_path):
    """LLVM 22 does not end for a sigmoid of float16 with SIMD128."""
    tools()
    with pytest.raises(ValueError, match=r"computes in float16, .* use float32 or bfloat16"):
        half_step("float16").export(tmp_path / "float16", target=WASM)
    assert not (tmp_path / "float16").exists()
    python = half_step("bfloat16")
    python.export(tmp_path / "bfloat16", target=WASM)
    given = [{"x": x} for x in np.random.default_rng(0).random((3, 8, 4), "float32")]
    own = node("train", tmp_path / "bfloat16", given)
    assert own["losses"] == [python.step(**batch).loss for batch in given]


#: The operator f32x4.relaxed_madd.
MULTIPLY_ADD = bytes([0xFD, 0x85, 0x02])


def test_relaxed_simd_trains_or_the_error_names_it(pair, tmp_path):
    python, folder = pair
    python.export(tmp_path / "fused", target=relax_grad.target.wasm(relaxed_simd=True))
    assert (tmp_path / "fused/step.wasm").read_bytes().count(MULTIPLY_ADD) > 20
    assert (folder / "step.wasm").read_bytes().count(MULTIPLY_ADD) < 5  # by chance
    given = batches(3)
    own = node("train_or_fail", tmp_path / "fused", given)
    if "error" in own:
        assert "relaxed SIMD if its target is wasm(relaxed_simd=True)" in own["error"]
        option = "--experimental-wasm-relaxed-simd"
        known = subprocess.run([NODE, "--v8-options"], capture_output=True, text=True, check=True)
        if option not in known.stdout:
            pytest.skip("this Node lacks relaxed SIMD, as the error says")
        own = node("train", tmp_path / "fused", given, option)
    wanted = [python.step(**batch).loss for batch in given]
    np.testing.assert_allclose(own["losses"], wanted, 1e-5)
    assert own["losses"] != wanted


def test_zig_makes_a_module_with_the_same_bits(pair, tmp_path):
    """Zig is what pip brings: pip install ziglang."""
    python, folder = pair
    try:
        webassembly.tools("zig")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    given = batches(3)
    wanted = node("train", folder, given)["losses"]
    python.export(tmp_path / "zig", target=WASM, compiler="zig")
    assert node("train", tmp_path / "zig", given)["losses"] == wanted


def test_arguments_and_tools_that_are_missing(exported, tmp_path):
    trainer = exported[0]
    with pytest.raises(FileNotFoundError, match=r"clang-0 is not installed; .*install clang lld"):
        trainer.export(tmp_path / "none", target=WASM, compiler="clang-0")
    with pytest.raises(ValueError, match=r"compiler must be a clang, but .* is another"):
        trainer.export(tmp_path / "none", target=WASM, compiler="cc")
    with pytest.raises(ValueError, match=r"target=relax_grad\.target\.wasm\(\)"):
        trainer.train_step.export(tmp_path / "none", target=WASM)
    with pytest.raises(ValueError, match="takes one target, but there is a list"):
        trainer.export(tmp_path / "none", target=[WASM], runtime="none")
    assert not (tmp_path / "none").exists()
