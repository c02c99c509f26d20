"""Train an ONNX file further, and write the new weights back to a file.

``python examples/continue_onnx.py`` makes a classifier of scikit-learn's digits as an ONNX file,
which knows upright images only, and trains it further on images that are upside down.
``--model FILE`` takes a file of your own with one input of shape (batch, 64) and one output of 10
logits. ``--last`` trains the last layer alone.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from sklearn.datasets import load_digits
from tvm.relax import op

from relax_grad.frontend.onnx import from_model
from relax_grad.training import Adam, Trainer, train_step

CLASSES = 10


def new_model(width: int, seed: int) -> onnx.ModelProto:
    """Return a perceptron with random weights."""
    rng, helper = np.random.default_rng(seed), onnx.helper
    sizes = [64, width, CLASSES]
    nodes, initializers, name = [], [], "images"
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        is_last = i == len(sizes) - 2
        weight = rng.uniform(-1, 1, (outputs, inputs)) / np.sqrt(inputs)
        for key, value in ((f"fc{i}.weight", weight), (f"fc{i}.bias", np.zeros(outputs))):
            initializers.append(onnx.numpy_helper.from_array(value.astype("float32"), key))
        result = "logits" if is_last else f"sum{i}"
        nodes.append(
            helper.make_node("Gemm", [name, f"fc{i}.weight", f"fc{i}.bias"], [result], transB=1)
        )
        if not is_last:
            name = f"hidden{i}"
            nodes.append(helper.make_node("Relu", [result], [name]))
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("images", kind, ("batch", 64))],
        [helper.make_tensor_value_info("logits", kind, ("batch", CLASSES))],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def loss_of(bb, logits, labels):
    """Return the mean cross entropy."""
    return op.nn.nll_loss(bb.emit(op.nn.log_softmax(logits)), labels, reduction="mean")


def train_further(source: Path, target: Path, images, labels, options, trainable=None) -> None:
    """Train the weights of a file further, and write them to another one, or to the same."""
    imported = from_model(source, trainable=trainable)
    batch = next(iter(imported.inputs.values())).shape[0]
    targets = {"labels": ((batch if isinstance(batch, int) else str(batch),), "int64")}
    step = train_step(imported, Adam(options.lr), loss=loss_of, targets=targets)
    trainer = Trainer(step, seed=options.seed)
    rng = np.random.default_rng(options.seed)

    class Loader:
        def __iter__(self):
            order = rng.permutation(len(images))
            for start in range(0, len(order) - options.batch + 1, options.batch):
                rows = order[start : start + options.batch]
                yield images[rows], labels[rows]

    history = trainer.fit(Loader(), options.epochs, progress=False)
    losses = [evaluation["mean_loss"] for evaluation in history.evaluations]
    print(f"  loss {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    imported.write_to(target, trainer, inference=True)


def accuracy(path: Path, images, labels) -> float:
    """Return the share of right predictions of a file, computed by the ONNX package itself."""
    evaluator = ReferenceEvaluator(onnx.load(path))
    (logits,) = evaluator.run(None, {evaluator.input_names[0]: images})
    return float(np.mean(logits.argmax(1) == labels))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the command; return accuracies by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="an ONNX file; by default a new classifier")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--last", action="store_true", help="train the last layer alone")
    parser.add_argument(
        "--epochs", type=int, default=10, help="epochs of each training (default 10)"
    )
    parser.add_argument("--batch", type=int, default=32, help="images in a batch (default 32)")
    parser.add_argument("--width", type=int, default=64, help="the hidden layer of a new model")
    parser.add_argument("--lr", type=float, default=2e-3, help="the learning rate (default 0.002)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of weights and batches")
    options = parser.parse_args(arguments)

    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target.astype("int64")
    order = np.random.default_rng(options.seed).permutation(len(images))
    train, test = order[:-360], order[-360:]
    turned = images[:, ::-1].copy()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path is None:
            path = Path(folder, "digits.onnx")
            print("a new model, trained with upright digits:")
            onnx.save(new_model(options.width, options.seed), path)
            train_further(path, path, images[train], labels[train], options)
        last = list(from_model(path).params)[-2:] if options.last else None
        shares = {
            "upright": accuracy(path, images[test], labels[test]),
            "turned before": accuracy(path, turned[test], labels[test]),
        }
        print("the file, trained further with digits upside down:")
        target = options.out or Path(folder, "further.onnx")
        train_further(path, target, turned[train], labels[train], options, trainable=last)
        shares["turned"] = accuracy(target, turned[test], labels[test])
    for name, share in shares.items():
        print(f"{name}: {100 * share:.1f} % of unseen digits are right")
    if options.out:
        print(f"{options.out} has the new weights")
    return shares


if __name__ == "__main__":
    main()
