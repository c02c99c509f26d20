"""Train an image classifier with Apache TVM, from random weights to held-out accuracy.

The network is built of Relax operators and differentiated by relax_grad.value_and_grad. Forward,
backward and the optimizer compile into one program, so that a training step is one call. The other
files:

    _network.py         the networks: layers, ResNet-9, LeNet
    _training.py        loss -> gradient -> training step
    _compile.py         the compiled program on its device
    _gradient_check.py  the gradient against finite differences
    _data.py            digits and CIFAR-10

Run it: python examples/train_resnet9.py --help
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")  # Works without a display.
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter
    from rich.console import Console
    from rich.progress import Progress
except ImportError as error:
    raise SystemExit(
        f"{error}: install the requirements of the examples with: pip install '.[examples]'"
    ) from error
with Console(stderr=True).status("importing TVM"):
    import numpy as np
    import tvm
    from _data import Dataset, load_cifar10, load_digits
    from _gradient_check import check_gradient
    from _network import LAYOUTS, NETWORKS
    from _training import Trainer
    from tvm.relax.training.optimizer import Adam, MomentumSGD

    from relax_grad import set_num_threads
    from relax_grad.cpu.target import host
    from relax_grad.errors import GradientCheckError

OPTIMIZERS = {
    "sgd": lambda rate: MomentumSGD(rate, momentum=0.9),
    "adam": lambda rate: Adam(rate),
}
DEFAULT_RATES = {"sgd": 0.05, "adam": 0.001}
CHECKED_IMAGES = 8
EVALUATED_AT_ONCE = 500


@dataclass
class History:
    """The measurements of a run: the loss of each step, and the accuracies after each epoch."""

    losses: list[float] = field(default_factory=list)
    train_accuracies: list[float] = field(default_factory=list)
    test_accuracies: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    console = Console()
    try:
        target = parse_target(args.target)
        data = load_cifar10(args.data) if args.data else load_digits()
        if args.batch_size > len(data.train_labels):
            raise ValueError(
                f"--batch-size {args.batch_size} is more than the {len(data.train_labels)} "
                "images to train on"
            )
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console.print(
        f"{args.model} ({args.layout}) on {data.name}: {len(data.train_labels)} images to train "
        f"on, {len(data.test_labels)} held out"
    )
    set_num_threads()
    try:
        history = check_and_train(args, data, target, console)
    except (FloatingPointError, GradientCheckError) as error:
        console.print(f"error: {error}", style="red")
        return 1
    picture = args.out / f"{args.model}_{args.layout}_loss.png"
    plot(history, f"{args.model} on {data.name}", picture)
    console.print(f"loss curve: {picture}")
    console.print(f"held-out accuracy: {history.test_accuracies[-1]:.2%}")
    return 0


def check_and_train(
    args: argparse.Namespace, data: Dataset, target: tvm.target.Target, console: Console
) -> History:
    """Check the gradient of the untrained network, then train it.

    Raises
    ------
    GradientCheckError
        If the gradient is wrong.
    FloatingPointError
        If the loss stops being a number.
    """
    network = NETWORKS[args.model]
    images = data.normalise(data.train_images[:CHECKED_IMAGES])
    labels = data.train_labels[:CHECKED_IMAGES]
    with console.status("checking the gradient"):
        error = check_gradient(network, args.layout, images, labels, target, args.seed)
    console.print(f"gradient agrees with finite differences: relative error {error:.1e}")

    start = time.perf_counter()
    rate = DEFAULT_RATES[args.optimizer] if args.lr is None else args.lr
    optimizer = OPTIMIZERS[args.optimizer](rate)
    with console.status("compiling the training step"):
        trainer = Trainer(network, args.batch_size, args.layout, optimizer, target, args.seed)
    count = sum(math.prod(slot.plain_shape) for slot in trainer.layers.parameters)
    console.print(
        f"{count:,} parameters; compiled the training step in {time.perf_counter() - start:.1f} s"
    )

    return train(trainer, data, args.epochs, args.batch_size, args.seed, console)


def train(
    trainer: Trainer, data: Dataset, epochs: int, batch_size: int, seed: int, console: Console
) -> History:
    """Train for some epochs and report each."""
    history = History()
    rng = np.random.default_rng(seed)
    steps = len(data.train_labels) // batch_size
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=epochs * steps)
        for epoch in range(1, epochs + 1):
            start = time.perf_counter()
            progress.update(task, description=f"epoch {epoch}/{epochs}")
            right = 0
            for images, labels in data.batches(batch_size, rng):
                loss, scores = trainer.step(images, labels)
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"the loss became {loss} in epoch {epoch}; try a smaller --lr"
                    )
                history.losses.append(loss)
                right += int(np.sum(scores.argmax(1) == labels))
                progress.advance(task)
            history.train_accuracies.append(right / (steps * batch_size))
            history.test_accuracies.append(evaluate(trainer, data))
            console.print(
                f"epoch {epoch:3}: loss {np.mean(history.losses[-steps:]):.4f}, "
                f"accuracy {history.train_accuracies[-1]:.2%} in training, "
                f"{history.test_accuracies[-1]:.2%} held out "
                f"({time.perf_counter() - start:.1f} s)"
            )
    return history


def evaluate(trainer: Trainer, data: Dataset) -> float:
    """Return the accuracy on the held-out images."""
    right = 0
    for start in range(0, len(data.test_labels), EVALUATED_AT_ONCE):
        part = slice(start, start + EVALUATED_AT_ONCE)
        scores = trainer.predict(data.normalise(data.test_images[part]))
        right += int(np.sum(scores.argmax(1) == data.test_labels[part]))
    return right / len(data.test_labels)


def plot(history: History, title: str, path: Path) -> None:
    """Draw the loss of each step and the accuracies after each epoch into a PNG file."""
    epochs = np.arange(1, len(history.test_accuracies) + 1)
    steps = np.arange(1, len(history.losses) + 1) * len(epochs) / len(history.losses)
    figure, (upper, lower) = pyplot.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    upper.semilogy(steps, history.losses, linewidth=0.6, alpha=0.5, label="each step")
    upper.semilogy(epochs, epoch_means(history), marker=".", label="mean of the epoch")
    upper.set(ylabel="training loss", title=title)
    lower.plot(epochs, history.train_accuracies, marker=".", label="training")
    lower.plot(epochs, history.test_accuracies, marker=".", label="held out")
    lower.set(ylabel="accuracy", xlabel="epoch")
    lower.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def epoch_means(history: History) -> list[float]:
    """Return the mean loss of each epoch."""
    return [
        float(np.mean(part))
        for part in np.split(np.array(history.losses), len(history.test_accuracies))
    ]


def parse_target(text: str | None) -> tvm.target.Target:
    """Return the target that the user names, or this machine's processor."""
    if text is None:
        return host()
    try:
        target = tvm.target.Target(text)
    except Exception as error:  # TVM raises several types for a bad target.
        raise ValueError(f"--target {text!r} is no target that TVM knows: {error}") from error
    if not tvm.runtime.Device(target.get_target_device_type(), 0).exist:
        raise ValueError(f"--target {text!r}: this machine has no such device")
    return target


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network with Apache TVM Relax and relax_grad, and "
        "print its accuracy on images that it was not trained on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(NETWORKS), default="resnet9", help="the network")
    parser.add_argument(
        "--layout",
        choices=sorted(LAYOUTS),
        default="nchw",
        help="how the convolutions store images and weights; images always come in NCHW",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="the folder cifar-10-batches-py of CIFAR-10's Python version; "
        "without it, train on the handwritten digits that come with scikit-learn",
    )
    parser.add_argument("--epochs", type=positive_int, default=20, help="passes over the data")
    parser.add_argument("--batch-size", type=positive_int, default=128, help="images per step")
    parser.add_argument(
        "--optimizer",
        choices=sorted(OPTIMIZERS),
        default="sgd",
        help="sgd has a momentum of 0.9",
    )
    parser.add_argument(
        "--lr",
        type=positive_float,
        help="learning rate; by default "
        + " and ".join(f"{rate} for {name}" for name, rate in DEFAULT_RATES.items()),
    )
    parser.add_argument(
        "--seed", type=seed_int, default=0, help="of the initial weights and the order of the data"
    )
    parser.add_argument(
        "--target",
        help='the target of the compilation, for example llvm or \'{"kind": "llvm", "mcpu": '
        '"haswell"}\'; '
        "by default this machine's processor with all its vector units",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="where the loss curve goes"
    )
    return parser


def positive_int(text: str) -> int:
    return _number(text, int, lambda value: value > 0, "a positive integer")


def seed_int(text: str) -> int:
    return _number(text, int, lambda value: value >= 0, "a non-negative integer")


def positive_float(text: str) -> float:
    valid = lambda value: value > 0 and math.isfinite(value)  # noqa: E731
    return _number(text, float, valid, "a positive number")


def _number(text, convert, is_valid, wanted):
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not is_valid(value):
        raise argparse.ArgumentTypeError(f"it must be {wanted}, but it is {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
