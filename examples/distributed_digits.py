"""Train a PyTorch CNN on scikit-learn's digits by several processes, on one machine or on several.

``python examples/distributed_digits.py --workers 2`` starts two processes on this machine. On two
machines, the first one runs it with ``--nodes 2 --listen HOST:PORT``, and the second one
``python -m relax_grad worker --controller HOST:PORT``; both have the same secret in the variable
``RELAX_GRAD_SECRET``. ``--save`` and ``--resume`` write and read the whole state of training, with
any number of workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from digits_trainer import Loader, network
from sklearn.datasets import load_digits
from torch.nn import functional as F

from relax_grad.distributed import data_parallel, session
from relax_grad.frontend.torch import from_module
from relax_grad.training import AdamW, train_step


def main(arguments: list[str] | None = None) -> float:
    """Run the command; return the share of unseen digits that are classified right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="the address for other machines",
    )
    parser.add_argument("--epochs", type=int, default=6, help="epochs in all (default 6)")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch (default 64)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the learning rate")
    parser.add_argument("--save", type=Path, help="a file for the state of training")
    parser.add_argument("--resume", type=Path, help="a file that --save wrote")
    options = parser.parse_args(arguments)

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    labels = digits.target.astype("int64")
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:-360], order[-360:]
    loader = Loader(images[train], labels[train], options.batch, 0)
    torch.manual_seed(0)
    imported = from_module(
        network(),
        (torch.zeros(2, 1, 8, 8),),
        loss=F.cross_entropy,
        targets=(torch.zeros(2, dtype=torch.int64),),
        dynamic_shapes={"input": {0: "batch"}, "target": {0: "batch"}},
    )
    step = train_step(imported, AdamW(options.lr, weight_decay=0.01), ema=0.98)

    def evaluate(trainer) -> dict[str, float]:
        predicted = trainer.predict(images[test], ema=True).numpy().argmax(1)
        return {"accuracy": float(np.mean(predicted == labels[test]))}

    with session(options.workers, nodes=options.nodes, listen=options.listen) as workers:
        trainer = data_parallel(step, workers)
        if options.resume:
            trainer.load(options.resume)
            print(f"training goes on after {trainer.steps} steps")
        history = trainer.fit(loader, options.epochs, evaluate=evaluate)
        for evaluation in history.evaluations:
            accuracy = 100 * evaluation["accuracy"]
            print(
                f"epoch {evaluation['epoch'] + 1}: loss {evaluation['mean_loss']:.4f}, "
                f"{accuracy:.2f} % held out"
            )
        if options.save:
            trainer.save(options.save)
        return evaluate(trainer)["accuracy"]


if __name__ == "__main__":
    main()
