"""Build a page in which a CNN learns digits: scikit-learn's, and what a visitor draws.

``python examples/web_page.py FOLDER`` writes ``FOLDER/index.html``: one file, which works from
``file://``, where pages cannot fetch others. It contains the training step as WebAssembly, its
trainer and the digits. ``--state FILE`` prints the accuracy of a state that the page downloaded.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import tempfile
from pathlib import Path

import numpy as np
import torch
from digits_trainer import network
from sklearn.datasets import load_digits
from torch.nn import functional as F

import relax_grad
from relax_grad.frontend.torch import from_module
from relax_grad.training import AdamW, Trainer, train_step

PARTS = Path(__file__).parent / "web"
ROWS, HELD_OUT = 32, 360


def trainer_of(seed: int = 0) -> Trainer:
    """Return the trainer of a CNN for batches of 32 digits."""
    torch.manual_seed(seed)
    batch = torch.zeros(ROWS, 1, 8, 8), torch.zeros(ROWS, dtype=torch.int64)
    imported = from_module(network(), batch[:1], loss=F.cross_entropy, targets=batch[1:])
    return Trainer(train_step(imported, AdamW(3e-3, weight_decay=0.01)), seed=seed)


def digits() -> np.ndarray:
    """Return rows of 64 counts from 0 to 16 and the class, in a fixed random order."""
    data = load_digits()
    rows = np.concatenate([data.data, data.target[:, None]], 1).astype("uint8")
    return rows[np.random.default_rng(0).permutation(len(rows))]


def page(folder: Path) -> str:
    """Return the page of an exported folder, as one file."""
    packed = {
        "manifest": (folder / "manifest.json").read_bytes(),
        "module": (folder / "step.wasm").read_bytes(),
        "state": (folder / "state.safetensors").read_bytes(),
        "digits": digits().tobytes(),
    }
    files = ", ".join(
        f'{name}: "{base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()}"'
        for name, data in packed.items()
    )
    text = (PARTS / "index.html").read_text()
    text = text.replace("/* trainer.mjs */", (folder / "trainer.mjs").read_text())
    text = text.replace("/* page.mjs */", (PARTS / "page.mjs").read_text())
    return text.replace("/* files */", files)


def accuracy(trainer: Trainer) -> float:
    """Return the share of held-out digits that are classified right."""
    rows = digits()[-HELD_OUT:]
    right = 0
    for start in range(0, HELD_OUT, ROWS):
        own = rows[start : start + ROWS]
        images = np.zeros((ROWS, 64), "float32")
        images[: len(own)] = own[:, :64] / 16
        answers = trainer.predict(images.reshape(ROWS, 1, 8, 8)).numpy().argmax(1)
        right += int((answers[: len(own)] == own[:, 64]).sum())
    return right / HELD_OUT


def main(arguments: list[str] | None = None) -> float | None:
    """Run the command; return the accuracy of a state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of the page")
    parser.add_argument("--state", type=Path, help="a state that the page downloaded")
    options = parser.parse_args(arguments)
    trainer = trainer_of()
    if options.folder is not None:
        with tempfile.TemporaryDirectory() as directory:
            exported = Path(directory, "model")
            trainer.export(exported, target=relax_grad.target.wasm())
            options.folder.mkdir(parents=True, exist_ok=True)
            (options.folder / "index.html").write_text(page(exported), encoding="utf-8")
        print(f"open {(options.folder / 'index.html').absolute().as_uri()}")
    if options.state is None:
        return None
    trainer.load(options.state)
    found = accuracy(trainer)
    print(f"{trainer.steps} steps, {100 * found:.2f} % held out")
    return found


if __name__ == "__main__":
    main()
