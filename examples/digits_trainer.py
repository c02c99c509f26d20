"""Train a PyTorch CNN on scikit-learn's digits by one compiled step, with ``Trainer``.

``python examples/digits_trainer.py`` takes less than a minute on two cores. ``--save`` and
``--resume`` write and read the whole state of training, and ``--export FOLDER`` writes the step for
programs without Python.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from relax_grad.frontend.torch import from_module
from relax_grad.training import AdamW, Trainer, train_step


def network() -> nn.Module:
    """Return a CNN with batch normalisation and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 16, 10),
    )


class Loader:
    """Batches of an epoch in random order. The order depends on the epoch alone, so that training
    can resume."""

    def __init__(self, images, labels, batch: int, seed: int):
        self.images, self.labels, self.batch, self.seed, self.epoch = images, labels, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch)

    def __iter__(self):
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.images))
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            yield self.images[rows], self.labels[rows]


def main(arguments: list[str] | None = None) -> float:
    """Run the command; return the share of unseen digits that are classified right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="epochs in all (default 8)")
    parser.add_argument("--batch", type=int, default=32, help="images in a batch (default 32)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the first learning rate")
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of weights, batches and dropout"
    )
    parser.add_argument("--save", type=Path, help="a file for the state of training")
    parser.add_argument("--resume", type=Path, help="a file that --save wrote")
    parser.add_argument("--export", type=Path, help="a folder for programs without Python")
    parser.add_argument("--plot", type=Path, help="a picture of the loss")
    options = parser.parse_args(arguments)

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    labels = digits.target.astype("int64")
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:-360], order[-360:]
    loader = Loader(images[train], labels[train], options.batch, options.seed)

    torch.manual_seed(options.seed)
    imported = from_module(
        network(),
        (torch.zeros(2, 1, 8, 8),),
        loss=F.cross_entropy,
        targets=(torch.zeros(2, dtype=torch.int64),),
        dynamic_shapes={"input": {0: "batch"}, "target": {0: "batch"}},
    )
    step = train_step(imported, AdamW(options.lr, weight_decay=0.01), ema=0.98)
    trainer = Trainer(step, seed=options.seed)
    if options.resume:
        trainer.load(options.resume)
        print(f"training goes on after {trainer.steps} steps")
    updates = options.epochs * len(loader)

    def schedule(update: int) -> float:
        return options.lr * (0.5 + 0.5 * math.cos(math.pi * min(1.0, update / updates)))

    def evaluate(trainer: Trainer) -> dict[str, float]:
        predicted = trainer.predict(images[test], ema=True).numpy().argmax(1)
        return {"accuracy": float(np.mean(predicted == labels[test]))}

    history = trainer.fit(loader, options.epochs, schedule=schedule, evaluate=evaluate)
    for evaluation in history.evaluations:
        print(
            f"epoch {evaluation['epoch'] + 1}: loss {evaluation['mean_loss']:.4f}, "
            f"{100 * evaluation['accuracy']:.2f} % held out"
        )
    if options.save:
        trainer.save(options.save)
    if options.export:
        trainer.export(options.export)
    if options.plot:
        history.plot(options.plot)
    return evaluate(trainer)["accuracy"]


if __name__ == "__main__":
    main()
