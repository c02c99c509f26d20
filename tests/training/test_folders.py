"""An exported folder is one thing: the step, the state and the description of one export."""

from __future__ import annotations

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
    library = programs / "librelax_grad_trainer_c.so"
    command = [sys.executable, HERE / "trainer_folders.py", library, home]
    printed = run([*command, tmp_path / "a", tmp_path / "b"])
    assert "each folder is one thing" in printed


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
