"""An exported folder is one thing: the step, the state and the description of one export."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from trainer_programs import run
from tvm import relax
from tvm.relax import op

from relax_grad.training import SGD, AdamW, Trainer, _files, train_step

pytest.importorskip("safetensors", reason="exported states are files of safetensors")

needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="the library for C is built with CMake and g++",
)

HERE = Path(__file__).parent


def scaled(factor: float, optimizer=None):
    """Return a step whose loss is the mean square of a product, times a factor."""
    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        loss = bb.emit(op.mean(bb.emit(op.square(bb.emit(op.matmul(x, w))))))
        bb.emit_func_output(bb.emit(op.multiply(loss, relax.const(factor, "float32"))))
    return train_step(bb.get(), optimizer or AdamW(lr=0.1), wrt="w")


@needs_cmake
def test_folders_that_are_exported_anew(programs, tmp_path):
    for name, factor, start in (("a", 1.0, 1.0), ("b", 10.0, 2.0)):
        scaled(factor).export(tmp_path / name, values={"w": np.full(3, start, "float32")})
    home = tmp_path / "home"
    home.mkdir()
    more = {"text": 'é\U0001f600\0"\\', "deep": nested(62), "numbers": [1, -0.0, 1e300, 2**70]}
    python = Trainer(scaled(1.0), values={"w": np.full(3, 7, "float32")})
    python.save(home / "python", more)
    library = programs / "librelax_grad_trainer_c.so"
    command = [sys.executable, HERE / "trainer_folders.py", library, home]
    printed = run([*command, tmp_path / "a", tmp_path / "b"])
    assert "each folder is one thing" in printed
    assert python.load(home / "c") == more
    assert np.all(python.params["w"].numpy() == 7)


def nested(depth: int) -> list:
    """Return lists that contain one another."""
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"a": ["\ud800"]}, r"\['a'\]\[0\] must be text that UTF-8 has, but it is '.ud800'"),
        ({"\udc00": 1}, "a key of .* must be text that UTF-8 has"),
        ({"a": nested(63)}, "is nested more than 64 deep"),
        ({"a": nested(2000)}, "is nested more than 64 deep"),
    ],
)
def test_values_that_a_file_cannot_hold(trained, tmp_path, more, message):
    """An error says so when they are saved, and the older file stays."""
    trained.save(tmp_path / "state", {"a": nested(62)})
    with pytest.raises(ValueError, match=message):
        trained.save(tmp_path / "state", more)
    assert trained.load(tmp_path / "state") == {"a": nested(62)}


@pytest.fixture(scope="module")
def trained():
    return Trainer(scaled(1.0), values={"w": np.ones(3, "float32")})


def test_values_that_are_too_long(trained, tmp_path, monkeypatch):
    trained.save(tmp_path / "state")
    monkeypatch.setattr(_files, "_MOST_HEADER", 2000)
    with pytest.raises(ValueError, match=r"take 3... bytes, more than the 2000"):
        trained.save(tmp_path / "state", {"text": "x" * 3000})
    assert trained.load(tmp_path / "state") == {}


@pytest.mark.parametrize("name", ["a\nb", "\0"])
def test_names_that_no_manifest_has(name, tmp_path):
    """The C++ library refuses them, so that they are not exported."""
    step = scaled(1.0)
    renamed = dataclasses.replace(step, metrics=(name,))
    with pytest.raises(ValueError, match="must be texts without control characters, but one is"):
        renamed.export(tmp_path / "model", values={"w": np.ones(3, "float32")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("counter", ["seed", "steps", "updates", "skipped", "epoch", "batch"])
def test_counters_that_no_file_has(trained, counter):
    with pytest.raises(ValueError, match=f"{counter} must be an integer from 0 to"):
        setattr(trained, counter, -1)
    with pytest.raises(TypeError, match=f"{counter} must be an integer"):
        setattr(trained, counter, 0.5)


def test_the_digest_of_a_step(tmp_path):
    """States and folders have that of their step: of the loss, the optimizer and the options, and
    not of its building."""
    step = scaled(1.0)
    digests = [
        made._digest for made in (scaled(2.0), scaled(1.0, SGD(0.1)), scaled(1.0, AdamW(1.0)))
    ]
    assert len({step._digest, *digests}) == 4
    assert scaled(1.0)._digest == step._digest
    trainer = Trainer(step, values={"w": np.ones(3, "float32")})
    trainer.save(tmp_path / "state")
    assert _files.read(tmp_path / "state")[1]["step"] == step._digest
