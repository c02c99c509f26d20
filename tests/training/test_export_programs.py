"""Exported steps in C++ programs with batches of many sizes, of PyTorch models, and on the page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checksums import signed
from trainer_programs import run, same_bits, train, write_data
from training_models import MOST, WIDTH, digits_of_torch, symbolic

import relax_grad
import relax_grad.runtime
from relax_grad.ir.extent_checks import ExtentCheck, with_extent_checks
from relax_grad.training import Adam, AdamW, Trainer, memory_of, train_step

pytest.importorskip("safetensors", reason="exported states are files of safetensors")

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="the C++ trainer is built with CMake and g++",
)


def test_indices_out_of_range(programs, tmp_path):
    """The errors are those of Python, and the other batches train the same bits."""
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module

    def loss(scores, target):
        return torch.nn.functional.cross_entropy(
            scores[:, :-1].flatten(0, 1), target[:, 1:].flatten()
        )

    ids = torch.arange(6).reshape(2, 3)
    net = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 5))
    names = {"input": {0: "n"}, "target": {0: "n"}}
    imported = from_module(net, (ids,), loss=loss, targets=(ids % 5,), dynamic_shapes=names)
    trainer = Trainer(train_step(imported, Adam(0.1)))
    trainer.export(tmp_path / "folder")
    rng = np.random.default_rng(0)
    wrong = {1: ("input", (1, 2), 7), 2: ("input", (0, 1), -1), 4: ("target", (1, 1), -5)}
    wrong |= {5: ("target", (1, 0), 99), 6: ("target", (0, 2), -100), 7: ("target", (0, 2), -101)}
    data = {"input": rng.integers(7, size=(18, 3)), "target": rng.integers(5, size=(18, 3))}
    errors = ""
    for i in range(9):
        batch = {name: array[2 * i : 2 * i + 2] for name, array in data.items()}
        if i in wrong:
            name, place, value = wrong[i]
            batch[name][place] = value
        if i in (5, 6):  # the first target of a row is none, and an ignored one is allowed
            del wrong[i]
        if i not in wrong:
            trainer.step(**batch)
            continue
        with pytest.raises(IndexError) as raised:
            trainer.step(**batch)
        errors += f"batch {i}: {raised.value}\n"
    write_data(tmp_path / "data", **data)
    trainer.save(tmp_path / "python")
    program = [programs / "batches", tmp_path / "folder", tmp_path / "data", 2, tmp_path / "cpp"]
    printed = run([*program, "raise"])
    printed = printed.replace("; Options::check_inputs = false", "; check_inputs=False")
    lines = [line for line in printed.splitlines(True) if line.startswith("batch ")]
    assert "".join(lines) == errors  # TVM's warnings aside
    assert same_bits(tmp_path / "python", tmp_path / "cpp")["counters"]["steps"] == 5
    manifest = json.loads((tmp_path / "folder" / "manifest.json").read_text())
    for key, value in (
        ("extent", -1),
        ("extent", 2**62),
        ("extent", "m"),
        ("input", "other"),
        ("slices", [[0, 0, 0], [0, 0, 1]]),
        ("slices", [[0, 0, 1]]),
    ):
        ranges = [{**manifest["index_ranges"][0], key: value}]
        changed = json.dumps({**manifest, "index_ranges": ranges}).encode()
        (tmp_path / "folder" / "manifest.json").write_bytes(signed(changed))
        printed = train(programs, tmp_path / "folder", "data", code=1)
        assert "manifest.json is damaged" in printed
        assert "index_ranges" in printed


def test_extents_that_are_checked(programs, tmp_path):
    """The errors are those of Python, and a batch that is refused changes nothing."""
    module = symbolic()
    checks = [
        ExtentCheck(("n", 2, "//", 2, "*", "n", "=="), "rows are halved and doubled"),
        ExtentCheck(("n", 5, "%", 3, "-", 0, "max", "n", "min", "n", "<="), "always"),
    ]
    module["loss"] = with_extent_checks(module["loss"], checks)
    values = {"w": np.eye(WIDTH, dtype="float32")}
    trainer = Trainer(train_step(module, Adam(0.01), wrt="w"), values=values)
    trainer.export(tmp_path / "folder")
    x = np.full((6, WIDTH), 0.5, "float32")
    write_data(tmp_path / "data", x=x)
    for rows in (3, 2):
        errors = ""
        for i in range(6 // rows):
            if rows == 2:
                trainer.step(x[:rows])
                continue
            with pytest.raises(ValueError, match="doubled, but the inputs have n = 3") as raised:
                trainer.step(x[:rows])
            errors += f"batch {i}: {raised.value}\n"
        trainer.save(tmp_path / "python")
        program = [programs / "batches", tmp_path / "folder", tmp_path / "data"]
        printed = run([*program, rows, tmp_path / "cpp", "raise"])
        lines = [line for line in printed.splitlines(True) if line.startswith("batch ")]
        assert "".join(lines) == errors
        steps = same_bits(tmp_path / "python", tmp_path / "cpp")["counters"]["steps"]
        assert steps == (0 if rows == 3 else 3)
    manifest = json.loads((tmp_path / "folder" / "manifest.json").read_text())
    for condition in ([], ["n", "n"], ["n", "<"], ["m", 1, "<"]):
        found = [{"condition": condition, "reason": "any"}]
        changed = json.dumps({**manifest, "extent_checks": found}).encode()
        (tmp_path / "folder" / "manifest.json").write_bytes(signed(changed))
        printed = train(programs, tmp_path / "folder", "data", code=1)
        assert "manifest.json is damaged" in printed
        assert "extent_checks" in printed


def test_batches_of_many_sizes(programs, tmp_path):
    """The memory stays near that of the largest batch, as in Python."""
    step = train_step(symbolic(), Adam(0.01), wrt="w")
    step.export(tmp_path / "folder", values={"w": np.eye(WIDTH, dtype="float32")})
    write_data(tmp_path / "data", x=np.full((MOST, WIDTH), 0.5, "float32"))
    largest = memory_of(step, extents={"n": MOST}).peak
    program = [programs / "batches", tmp_path / "folder", tmp_path / "data", 0, tmp_path / "cpp"]
    grown = int(run([*program, "raise"]).splitlines()[0])
    assert grown < 0.5 * largest + 2e6


def test_digits_from_torch(programs, tmp_path):
    """A network with batch normalisation and dropout learns digits, with the same bits as in
    Python."""
    imported, images, labels = digits_of_torch()
    trainer = Trainer(train_step(imported, AdamW(0.01)), seed=7)
    trainer.export(tmp_path / "folder")
    count = 1472
    write_data(tmp_path / "data", input=images[:count], target=labels[:count])
    loader = [(images[i : i + 64], labels[i : i + 64]) for i in range(0, count, 64)]
    trainer.fit(loader, 3, progress=False)
    trainer.save(tmp_path / "python")
    options = ["--epochs", 3, "--batch", 64, "--save", tmp_path / "cpp"]
    options += ["--predict", tmp_path / "outputs"]
    train(programs, tmp_path / "folder", tmp_path / "data", *options)
    same_bits(tmp_path / "python", tmp_path / "cpp")
    from safetensors.numpy import load_file

    outputs = load_file(tmp_path / "outputs")
    wanted = trainer.predict(images[:count]).numpy()
    np.testing.assert_array_equal(outputs.pop("output0"), wanted)
    assert not outputs
    classes = trainer.predict(images[count:]).numpy().argmax(1)
    assert np.mean(classes == labels[count:]) > 0.8


def test_the_walk_of_the_page_trains(programs, tmp_path, monkeypatch):
    """The Python of the section writes the files that its last command reads."""
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "deployment.md").read_text()
    section = page.partition("## Export, build and run\n")[2].partition("\n## ")[0]
    export = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[-1]
    commands = re.search(r"```console\n(.*?)```", section, re.DOTALL)[1].replace("\\\n", "")
    first, configure, build, last = re.findall(r"^\$ (.+)$", commands, re.MULTILINE)
    assert first == "python export.py"
    assert (ROOT / configure.split()[2] / "train.cc").exists()  # the target that programs has
    assert build == "cmake --build build"
    monkeypatch.chdir(tmp_path)
    exec(compile(export, "export.py", "exec"), {})
    program, *arguments = last.split()
    assert program == "build/train"
    printed = train(programs, *arguments)
    losses = [float(text) for text in re.findall(r"epoch \d+: mean loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert {path.name for path in tmp_path.iterdir()} >= {
        *("model", "data.safetensors", "trained.safetensors", "outputs.safetensors"),
    }


def test_code_of_the_page_compiles(programs, tmp_path):
    page = (ROOT / "docs" / "deployment.md").read_text()
    include, code = re.search(r"```cpp\n(#include.*?\n)(.*?)```", page, re.DOTALL).groups()
    values = "std::vector<float> pixels; std::vector<int64_t> digits;"
    program = tmp_path / "page.cc"
    program.write_text(
        f"{include}int main() {{ {values}\n{code}\nreturn loss > scores.numel(); }}\n"
    )
    from tvm_ffi import libinfo

    folders = [relax_grad.runtime.folder(), *libinfo.include_paths()]
    run(["g++", "-std=c++17", "-fsyntax-only", *(f"-I{folder}" for folder in folders), program])
