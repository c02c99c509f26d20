"""The functions of ``relax_grad_trainer.h``, called from C, Go, Java and ctypes, train with the
bits of Python."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training_models import START, WIDTH, batches, module_of, symbolic
from tvm import relax, tirx
from tvm.relax import op

import relax_grad.runtime
from relax_grad.training import Adam, Trainer, _files, train_step

pytest.importorskip("safetensors", reason="exported states are files of safetensors")

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
HEADER = relax_grad.runtime.folder() / "relax_grad_trainer.h"

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("cmake", "gcc", "g++")),
    reason="the library for C is built with CMake, gcc and g++",
)


def run(command, code: int = 0, cwd: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A step with outputs and metrics: its values, its folder, and a loader with the rows of a
    file."""
    from safetensors.numpy import save_file

    step = train_step(
        module_of("float32", seed=True, states=True),
        Adam(0.05),
        wrt=["w", "b"],
        states=["mean"],
        clip_norm=1.0,
        outputs=True,
    )
    folder = tmp_path_factory.mktemp("exported")
    values = {name: np.float32(value) for name, value in {**START, "mean": np.zeros(3)}.items()}
    step.export(folder / "model", values=values)
    loader = batches(4, "float32")
    x, y = (np.concatenate(arrays) for arrays in zip(*loader, strict=True))
    save_file({"x": x, "y": y}, folder / "data")
    return step, values, folder, loader


def same_bits(first_file: Path, other: Path) -> None:
    """Assert that two files have the same tensors and counters."""
    (first, of_first), (second, of_second) = _files.read(first_file), _files.read(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.dtype == second[name].dtype
        assert values.tobytes() == second[name].tobytes(), name
    assert of_first["counters"] == of_second["counters"]


def test_calls(programs, exported, tmp_path):
    """The program examines the text of each error; it trains from buffers that it changes after
    each step."""
    step, values, folder, loader = exported
    shutil.copytree(folder / "model", tmp_path / "damaged")
    data = bytearray((tmp_path / "damaged" / "state.safetensors").read_bytes())
    data[-3] ^= 4
    (tmp_path / "damaged" / "state.safetensors").write_bytes(data)
    arguments = [folder / "model", folder / "data", tmp_path / "damaged", tmp_path / "c"]
    printed = run([programs / "calls", *arguments])
    assert "62 errors as expected" in printed
    trainer = Trainer(step, values=values)
    results = [trainer.step(*batch, lr=0.25) for batch in loader]
    trainer.save(tmp_path / "python")
    same_bits(tmp_path / "python", tmp_path / "c")
    losses = [float(number) for number in re.findall(r"^loss (\S+)$", printed, re.MULTILINE)]
    assert losses == [result.loss for result in results]
    metrics = dict(re.findall(r"^metric (\S+) (\S+)$", printed, re.MULTILINE))
    assert {name: float(text) for name, text in metrics.items()} == results[-1].metrics
    ((_, dtype, size, first),) = re.findall(r"^output (\S+) (\S+) (\S+) (\S+)$", printed, re.M)
    (output,) = results[-1].outputs.values()
    assert (dtype, int(size)) == ("float32", output.numpy().nbytes)
    assert np.float32(first) == output.numpy().ravel()[0]
    assert f"\nw {trainer.params['w'].numpy()[0]:.9g}\n" in printed


@pytest.fixture(scope="module")
def trained(exported, tmp_path_factory):
    """Return the trainer of Python after the two epochs that the examples train, and the file of
    its state."""
    step, values, _, loader = exported
    trainer = Trainer(step, values=values)
    trainer.fit(loader, 2, schedule=lambda update: 0.125, progress=False)
    path = tmp_path_factory.mktemp("python") / "state"
    trainer.save(path)
    return trainer, path


def test_example_in_c(programs, exported, trained, tmp_path):
    _, _, folder, _ = exported
    trainer, state = trained
    program, data = programs / "train_c", folder / "data"
    printed = run([program, folder / "model", data, 2, 6, 0.125, tmp_path / "c"])
    same_bits(state, tmp_path / "c")
    mean = trainer.history.evaluations[-1]["mean_loss"]
    assert f"epoch 2: mean loss {mean:.5g}"[:24] in printed
    for changed, code, message in (
        ({0: tmp_path}, 1, "error: .*manifest.json cannot be read: No such file"),
        ({1: folder / "none"}, 1, "error: .*none cannot be read: No such file"),
        ({3: 25}, 1, "error: too few rows, .*: x"),
        ({3: 5}, 1, r"error: x must have shape \(6, 3\) and dtype float32, but it has \(5, 3\)"),
        ({2: "many"}, 2, "EPOCHS and ROWS must be integers"),
        ({5: tmp_path / "none" / "state"}, 1, "error: .*cannot be written"),
    ):
        arguments = [folder / "model", data, 1, 6, 0.125, tmp_path / "other"]
        for place, value in changed.items():
            arguments[place] = value
        assert re.search(message, run([program, *arguments], code))


def test_example_in_go(programs, exported, trained, tmp_path):
    if shutil.which("go") is None:
        pytest.skip("go is not installed (Debian's package golang-go)")
    _, _, folder, _ = exported
    environment = {
        "CGO_ENABLED": "1",
        "CGO_CFLAGS": f"-I{HEADER.parent}",
        "CGO_LDFLAGS": f"-L{programs} -Wl,-rpath,{programs}",
        "GOTOOLCHAIN": "local",
    }
    program = tmp_path / "go_trainer"
    command = ["go", "build", "-buildvcs=false", "-o", program, "."]
    run(command, cwd=ROOT / "examples/go_trainer", **environment)
    arguments = [folder / "model", folder / "data", 2, 6, 0.125, tmp_path / "go"]
    assert "epoch 2: mean loss" in run([program, *arguments])
    same_bits(trained[1], tmp_path / "go")
    arguments[1] = tmp_path / "none"
    assert "none cannot be read" in run([program, *arguments], 1)


def test_trainers_in_several_threads(programs, tmp_path):
    """Python calls the library by ctypes. Where the number of rows changes, TVM's runtime frees the
    memory of all."""
    step = train_step(symbolic(), Adam(0.01), wrt="w")
    step.export(tmp_path / "model", values={"w": np.eye(WIDTH, dtype="float32")})
    program = Path(__file__).with_name("trainer_threads.py")
    library = programs / "librelax_grad_trainer_c.so"
    command = [sys.executable, program, library, tmp_path / "model"]
    assert "the same losses" in run(command, TVM_NUM_THREADS="2")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator is replaced")
def test_each_allocation_of_a_step_fails(programs, tmp_path):
    """A step without memory leaves the trainer as it was, or one that says so at each call."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    weights = [relax.Var(name, relax.TensorType((3, 3), "float32")) for name in ("v", "w")]
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *weights]):
        y = x
        for weight in weights:
            y = bb.emit(op.tanh(bb.emit(op.matmul(y, weight))))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    # A step with metrics and outputs, whose results C takes without memory.
    step = train_step(bb.get(), Adam(0.1), wrt=["v", "w"], clip_norm=1.0)
    step.export(tmp_path / "model", values=dict.fromkeys("vw", np.eye(3, dtype="float32")))
    failing = tmp_path / "failing.so"
    run(["gcc", "-O1", "-shared", "-fPIC", HERE / "failing_memory.c", "-o", failing])
    library = programs / "librelax_grad_trainer_c.so"
    command = [sys.executable, HERE / "trainer_memory.py", library, tmp_path / "model", failing]
    printed = run(command, LD_PRELOAD=str(failing), TVM_NUM_THREADS="1")
    assert "each step is whole" in printed


def test_models_buffers_and_properties(programs, tmp_path):
    """Python reads the files: a model without the optimizer's state, and a state with
    properties."""
    from safetensors.numpy import load_file

    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float16"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        y = bb.emit(op.matmul(x, bb.emit(op.astype(w, "float32"))))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    trainer = Trainer(
        train_step(bb.get(), Adam(0.01), wrt="w"), values={"w": np.ones(3, "float16")}
    )
    assert "master/w" in trainer.optimizer_state
    trainer.export(tmp_path / "model")
    trainer.save(tmp_path / "state", {"note": "é", "tree": {"a": [1, 2.5, None]}})
    home = tmp_path / "home"
    home.mkdir()
    library = programs / "librelax_grad_trainer_c.so"
    command = [sys.executable, HERE / "trainer_model.py", library, tmp_path / "model"]
    assert "all functions work" in run([*command, tmp_path / "state", home])
    assert trainer.load(home / "state") == {"note": "ü\n", "new": '"'}
    batch = np.arange(12, dtype="float32").reshape(4, 3) / 12
    for _ in range(3):
        trainer.step(batch)
    (saved,) = load_file(home / "model").items()
    assert saved[0] == "w"
    assert saved[1].tobytes() == trainer.params["w"].numpy().tobytes()


def test_code_of_the_page_compiles(tmp_path):
    page = (ROOT / "docs" / "deployment.md").read_text()
    (code,) = re.findall(r"^```c\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "page.c").write_text("#include <stdio.h>\n" + code)
    warnings = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
    run(["gcc", *warnings, f"-I{HEADER.parent}", tmp_path / "page.c"])
    named = re.findall(
        r"`(\w+)`", page.partition("| functions `relax_grad_...`")[2].partition("\n\n")[0]
    )
    declared = HEADER.read_text()
    assert all(f"relax_grad_{name}(" in declared for name in named)


def test_the_library_exports_the_functions_of_the_header(programs):
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed (Debian's package binutils)")
    declared = set(re.findall(r"^RELAX_GRAD_API .*?(relax_grad_\w+)\(", HEADER.read_text(), re.M))
    listed = run(["nm", "--dynamic", "--defined-only", programs / "librelax_grad_trainer_c.so"])
    assert len(declared) == 41
    assert {line.split()[-1] for line in listed.splitlines()} == declared


def test_predictions_and_symbolic_extents(programs, tmp_path):
    """A model of PyTorch predicts what Python does, for another number of rows than it trained."""
    torch = pytest.importorskip("torch")
    from safetensors.numpy import load_file, save_file

    from relax_grad.frontend.torch import from_module

    ids = torch.arange(6).reshape(2, 3)
    net = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(12, 5))
    imported = from_module(
        net,
        (ids,),
        loss=torch.nn.functional.cross_entropy,
        targets=(ids[:, 0],),
        dynamic_shapes={"input": {0: "n"}, "target": {0: "n"}},
    )
    trainer = Trainer(train_step(imported, Adam(0.1)))
    trainer.export(tmp_path / "model")
    rng = np.random.default_rng(0)
    data = {"input": rng.integers(7, size=(11, 3)), "target": rng.integers(5, size=11)}
    save_file(data, tmp_path / "data")
    loader = [[array[i : i + 4] for array in data.values()] for i in (0, 4)]
    trainer.fit(loader, 1, schedule=lambda update: 0.05, progress=False)
    trainer.save(tmp_path / "python")
    program = [programs / "train_c", tmp_path / "model"]
    arguments = [tmp_path / "data", 1, 4, 0.05, tmp_path / "c"]
    run([*program, *arguments, tmp_path / "outputs"])
    same_bits(tmp_path / "python", tmp_path / "c")
    outputs = load_file(tmp_path / "outputs")
    assert list(outputs) == ["output0"]
    np.testing.assert_array_equal(outputs["output0"], trainer.predict(data["input"]).numpy())
    data["input"][5, 1] = 7
    save_file(data, tmp_path / "data")
    assert re.search(r"error: input\[1, 1\] is 7", run([*program, *arguments], 1))


def test_example_in_java(programs, exported, trained, tmp_path):
    if shutil.which("javac") is None:
        pytest.skip("javac is not installed (Debian's package default-jdk-headless)")
    home = Path(shutil.which("javac")).resolve().parents[1]
    if not (home / "include/linux/jni_md.h").exists():
        pytest.skip(f"{home} has no headers of JNI for Linux")
    _, _, folder, _ = exported
    sources = ROOT / "examples/java_trainer"
    run(["javac", "-Xlint:all", "-Werror", "-d", tmp_path, *sorted(sources.glob("*.java"))])
    headers = (home / "include", home / "include/linux", HEADER.parent)
    libraries = [f"-L{programs}", f"-Wl,-rpath,{programs}", "-lrelax_grad_trainer_c"]
    warnings = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    command = ["gcc", *warnings, "-shared", "-fPIC", *(f"-I{header}" for header in headers)]
    output = tmp_path / "libjava_trainer.so"
    run([*command, sources / "java_trainer.c", "-o", output, *libraries])
    java = ["java", "-Xcheck:jni", f"-Djava.library.path={tmp_path}", "-cp", tmp_path, "Train"]
    arguments = [folder / "model", folder / "data", 2, 6, 0.125, tmp_path / "java"]
    printed = run([*java, *arguments])
    assert "epoch 2: mean loss" in printed
    assert "WARNING" not in printed  # of -Xcheck:jni
    same_bits(trained[1], tmp_path / "java")
    for changed, code, message in (
        ({1: tmp_path / "none"}, 1, "error: .*none cannot be read"),
        ({3: 25}, 1, "error: x has 24 rows; a batch has 25, and x 24"),
        ({3: 5}, 1, r"error: x must have shape \(6, 3\)"),
        ({4: "fast"}, 2, "LEARNING_RATE a number"),
    ):
        values = [changed.get(i, value) for i, value in enumerate(arguments)]
        assert re.search(message, run([*java, *values], code))
