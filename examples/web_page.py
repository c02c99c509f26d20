"""Build pages in which a CNN learns digits, and classes that a visitor draws.

``python examples/web_page.py FOLDER`` writes ``index.html`` and ``classes.html``. They work from
``file://``, where pages cannot fetch files: each contains its training step as WebAssembly, the
trainer and the data. In ``classes.html``, a CNN that has learnt digits is frozen, and learns a new
last layer.

``--state FILE`` prints the accuracy of a downloaded state. With ``--drawings FILE``, it is the
state of ``classes.html``: ``--steps`` trains it further, and ``--save FILE`` writes it.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from digits_trainer import Loader, network
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import relax_grad
from relax_grad.frontend.torch import Imported, from_module
from relax_grad.training import AdamW, Trainer, train_step

PARTS = Path(__file__).parent / "web"
ROWS, HELD_OUT = 32, 360
DRAWN_ROWS, CLASSES = 16, 5


def trainer_of(seed: int = 0) -> Trainer:
    """Return the trainer of a CNN for batches of 32 digits."""
    torch.manual_seed(seed)
    return _trainer(_imported(network(), ROWS), seed)


def classes_trainer(model: nn.Module, seed: int = 0) -> Trainer:
    """Return the trainer of a new last layer for batches of 16 drawings; the others are frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(*model[:-1], nn.Linear(model[-1].in_features, CLASSES))
    last = f"{len(model) - 1}.*"
    return _trainer(_imported(model, DRAWN_ROWS, trainable=last, batch_norm="frozen"), seed)


def backbone(epochs: int = 4) -> nn.Module:
    """Return a CNN that has learnt digits."""
    rows = digits()[:-HELD_OUT]
    rows = rows[: len(rows) // ROWS * ROWS]
    images = (rows[:, :64] / 16).astype("float32").reshape(-1, 1, 8, 8)
    torch.manual_seed(0)
    model = network()
    imported = _imported(model, ROWS)
    trainer = _trainer(imported, seed=0)
    trainer.fit(Loader(images, rows[:, 64].astype("int64"), ROWS, 0), epochs, progress=False)
    imported.copy_to(model, trainer.values)
    return model


def _imported(model: nn.Module, rows: int, **options) -> Imported:
    batch = torch.zeros(rows, 1, 8, 8), torch.zeros(rows, dtype=torch.int64)
    return from_module(model, batch[:1], loss=F.cross_entropy, targets=batch[1:], **options)


def _trainer(imported: Imported, seed: int) -> Trainer:
    return Trainer(train_step(imported, AdamW(3e-3, weight_decay=0.01)), seed=seed)


def digits() -> np.ndarray:
    """Return rows of 64 counts from 0 to 16 and the class, in a fixed random order."""
    data = load_digits()
    rows = np.concatenate([data.data, data.target[:, None]], 1).astype("uint8")
    return rows[np.random.default_rng(0).permutation(len(rows))]


def page(name: str, trainer: Trainer, **data: bytes) -> str:
    """Return a page with the step of a trainer and data, as one file."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "model")
        trainer.export(folder, target=relax_grad.target.wasm())
        packed = {
            "manifest": (folder / "manifest.json").read_bytes(),
            "module": (folder / "step.wasm").read_bytes(),
            "state": (folder / "state.safetensors").read_bytes(),
            **data,
        }
        script = (folder / "trainer.mjs").read_text()
    files = ", ".join(
        f'{name}: "{base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()}"'
        for name, data in packed.items()
    )
    text = (PARTS / name).read_text()
    text = text.replace("/* trainer.mjs */", script)
    for part in ("style.css", "shared.mjs", "page.mjs", "classes.mjs"):
        text = text.replace(f"/* {part} */", (PARTS / part).read_text())
    return text.replace("/* files */", files)


def predicted(trainer: Trainer, counts: np.ndarray, rows: int) -> np.ndarray:
    """Return the scores of images of 64 counts, which are predicted in batches of fixed size."""
    found = []
    for start in range(0, len(counts), rows):
        own = counts[start : start + rows]
        images = np.zeros((rows, 64), "float32")
        images[: len(own)] = own / 16
        found.append(trainer.predict(images.reshape(rows, 1, 8, 8)).numpy()[: len(own)])
    return np.concatenate(found)


def accuracy(trainer: Trainer) -> float:
    """Return the share of held-out digits that are classified right."""
    rows = digits()[-HELD_OUT:]
    answers = predicted(trainer, rows[:, :64], ROWS).argmax(1)
    return float((answers == rows[:, 64]).mean())


class Drawings:
    """The drawings that a page downloaded."""

    def __init__(self, file: Path):
        kept = json.loads(file.read_text())
        is_known = isinstance(kept, dict) and kept.get("format") == "relax_grad.drawings"
        if not is_known or not any(own["held"] for own in kept["drawings"]):
            raise ValueError(
                f"{file} must have drawings that classes.html downloaded, at least three of a class"
            )
        self.counts = np.array([own["counts"] for own in kept["drawings"]], "float32")
        self.labels = np.array([own["label"] for own in kept["drawings"]])
        self.held = np.array([own["held"] for own in kept["drawings"]])

    def train(self, trainer: Trainer, steps: int, seed: int = 0) -> None:
        """Run steps on drawings that are not held back."""
        rng, choice = np.random.default_rng(seed), np.flatnonzero(~self.held)
        for _ in range(steps):
            rows = rng.choice(choice, DRAWN_ROWS)
            images = (self.counts[rows] / 16).reshape(-1, 1, 8, 8)
            trainer.step(images, self.labels[rows].astype("int64"))

    def accuracy(self, trainer: Trainer) -> float:
        """Return the share of drawings held back that are classified right."""
        scores = predicted(trainer, self.counts[self.held], DRAWN_ROWS)
        scores[:, ~np.isin(np.arange(CLASSES), self.labels)] = -np.inf  # classes without drawings
        return float((scores.argmax(1) == self.labels[self.held]).mean())


def main(arguments: list[str] | None = None) -> float | None:
    """Run the command; return the accuracy of a state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of the pages")
    parser.add_argument("--state", type=Path, help="a state that a page downloaded")
    parser.add_argument("--drawings", type=Path, help="the drawings that classes.html downloaded")
    parser.add_argument("--steps", type=int, default=0, help="steps on the drawings (default 0)")
    parser.add_argument("--save", type=Path, help="a file for the state after these steps")
    options = parser.parse_args(arguments)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        pages = {
            "index.html": page("index.html", trainer_of(), digits=digits().tobytes()),
            "classes.html": page("classes.html", classes_trainer(backbone())),
        }
        for name, text in pages.items():
            (options.folder / name).write_text(text, encoding="utf-8")
            print(f"open {(options.folder / name).absolute().as_uri()}")
    if options.state is None:
        return None
    if options.drawings is None:
        trainer = trainer_of()
        trainer.load(options.state)
        found = accuracy(trainer)
    else:
        trainer, drawings = classes_trainer(network()), Drawings(options.drawings)
        trainer.load(options.state)
        drawings.train(trainer, options.steps)
        found = drawings.accuracy(trainer)
    if options.save:
        trainer.save(options.save)
    print(f"{trainer.steps} steps, {100 * found:.2f} % held out")
    return found


if __name__ == "__main__":
    main()
