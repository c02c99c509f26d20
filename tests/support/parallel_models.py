"""Models for training by several workers, with batches whose shares may be unequal, and comparisons
of trainers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.distributed import column, row
from relax_grad.training import SGD, AdamW, train_step

GROUPS = ("params", "states", "optimizer_state")


def tensors(trainer):
    """Return the tensors of a trainer by their names, as arrays."""
    return {
        f"{group}/{name}": tensor.numpy()
        for group in GROUPS
        for name, tensor in getattr(trainer, group).items()
    }


def assert_same_bits(actual, wanted):
    """Assert that two groups of arrays are the same to the bit."""
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].tobytes() == value.tobytes(), name


def assert_close(actual, wanted, tolerance=1e-5):
    """Assert that no element differs by more than a share of the largest one of its tensor."""
    for name, value in wanted.items():
        size = max(np.abs(value).max(), 1e-6)
        assert np.abs(actual[name] - value).max() <= tolerance * size, name


def linear(optimizer):
    """Return a step of a linear function whose number of examples is symbolic, and 10 batches."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    y = relax.Var("y", relax.TensorType((n,), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, y, w]):
        difference = bb.emit(relax.op.subtract(bb.emit(relax.op.matmul(x, w)), y))
        bb.emit_func_output(bb.emit(relax.op.mean(bb.emit(relax.op.square(difference)))))
    rng = np.random.default_rng(4)
    data = [rng.normal(size=(count, 4)).astype("float32") for count in [5, 6] * 5]
    step = train_step(bb.get(), optimizer, wrt="w")
    return step, {"w": np.ones(3, "float32")}, [(rows[:, :3], rows[:, 3]) for rows in data]


def convolutional():
    """Return a step of a module of Relax with a batch normalisation and its running statistics, and
    values."""
    n = tirx.Var("n", "int64")

    def variable(name, *shape, dtype="float32"):
        return relax.Var(name, relax.TensorType(shape, dtype))

    x, labels = variable("x", n, 2, 6, 6), variable("labels", n, dtype="int64")
    shapes = {
        "w": (6, 2, 3, 3),
        "gamma": (6,),
        "beta": (6,),
        "mean": (6,),
        "variance": (6,),
        "v": (96, 4),
    }
    others = [variable(name, *shape) for name, shape in shapes.items()]
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, labels, *others]):
        w, gamma, beta, mean, variance, v = others
        y = bb.emit(op.nn.conv2d(x, w))
        whole = bb.emit(op.nn.batch_norm(y, gamma, beta, mean, variance, 1, momentum=0.1))
        y, *new = (bb.emit(relax.TupleGetItem(whole, i)) for i in range(3))
        y = bb.emit(op.reshape(bb.emit(op.nn.relu(y)), (n, 96)))
        y = bb.emit(op.nn.log_softmax(bb.emit(op.matmul(y, v))))
        loss = bb.emit(op.nn.nll_loss(y, labels))
        bb.emit_func_output(relax.Tuple([loss, *new]))
    step = train_step(
        bb.get(),
        AdamW(lr=0.01),
        wrt=["w", "gamma", "beta", "v"],
        states=["mean", "variance"],
        clip_norm=1.0,
    )
    rng = np.random.default_rng(0)
    values = {
        name: (0.3 * rng.normal(size=shape) + (name in ("gamma", "variance"))).astype("float32")
        for name, shape in shapes.items()
    }
    values["variance"] = np.abs(values["variance"])
    batches = [
        (
            rng.normal(size=(count, 2, 6, 6)).astype("float32"),
            rng.integers(0, 4, count).astype("int64"),
        )
        for count in [12, 9, 11, 12, 10] * 4
    ]
    return step, values, batches


def imported():
    """Return a step of an imported PyTorch network with batch normalisations, and batches."""
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    from relax_grad.frontend.torch import from_module

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 4, 5),
    )
    module = from_module(
        network,
        (torch.zeros(4, 1, 8, 8),),
        loss=torch.nn.functional.cross_entropy,
        targets=(torch.zeros(4, dtype=torch.int64),),
        dynamic_shapes={"input": {0: "batch"}, "target": {0: "batch"}},
    )
    rng = np.random.default_rng(1)
    batches = [
        (
            rng.normal(size=(count, 1, 8, 8)).astype("float32"),
            rng.integers(0, 5, count).astype("int64"),
        )
        for count in [16, 13, 15, 14] * 5
    ]
    return train_step(module, SGD(lr=0.05, momentum=0.9), ema=0.9), None, batches


def transformer():
    """Return a step of a small imported GPT, and batches of texts."""
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    from torch import nn
    from torch.nn import functional as F

    from relax_grad.frontend.torch import from_module

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            # The bias of keys has the gradient 0, of which rounding errors are left, whose signs
            # AdamW would follow.
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, width = x.shape
            parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self, tokens=13, width=16, heads=2, length=8, layers=2):
            super().__init__()
            self.embedding = nn.Embedding(tokens, width)
            self.position = nn.Parameter(0.1 * torch.randn(length, width))
            self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
            self.norm = nn.LayerNorm(width)

        def forward(self, x):
            x = self.embedding(x) + self.position
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embedding.weight.T

    torch.manual_seed(0)
    module = from_module(
        GPT(),
        (torch.zeros(4, 8, dtype=torch.int64),),
        loss=lambda scores, labels: F.cross_entropy(scores.flatten(0, 1), labels.flatten()),
        targets=(torch.zeros(4, 8, dtype=torch.int64),),
        dynamic_shapes={"x": {0: "batch"}, "target": {0: "batch"}},
    )
    rng = np.random.default_rng(2)
    batches = [rng.integers(0, 13, (count, 8, 9)) for count in [4, 5, 6, 7] * 5]
    batches = [(text[..., :-1][:, 0].copy(), text[..., 1:][:, 0].copy()) for text in batches]
    return train_step(module, AdamW(lr=0.003), clip_norm=0.5), None, batches


#: The layers of the example's GPT that are divided, without its vocabulary.
GPT_SHARDS = {
    "*.qkv.*": column(parts=3),
    "*.out.weight": row(),
    "*.mlp.0.*": column(),
    "*.mlp.2.weight": row(),
}


def without_key_biases(values):
    """Leave out the biases of keys, whose gradients are rounding errors of 0."""
    return {
        name: np.concatenate(np.split(value, 3)[::2]) if name.endswith("qkv.bias") else value
        for name, value in values.items()
    }


def char_gpt(layers=1, characters=11, sizes=(4,) * 5, adapt=None, width=16, heads=4, **options):
    """Return the step of a small GPT of the example, and batches of these numbers of texts.

    ``adapt`` takes the import and returns another one. AdamW has a larger epsilon than usual,
    because it would follow rounding errors of gradients that are almost 0.
    """
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    from relax_grad.frontend.torch import from_module

    path = Path(__file__).parents[2] / "examples" / "char_gpt.py"
    spec = importlib.util.spec_from_file_location("char_gpt_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    network = example.GPT(characters, context=6, width=width, layers=layers, heads=heads)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, characters, (count, 7)) for count in sizes]
    batches = [(text[:, :-1].copy(), text[:, 1:].copy()) for text in texts]
    tokens, targets = map(torch.from_numpy, batches[0])
    is_dynamic = len(set(sizes)) > 1
    shapes = {name: {0: "batch"} for name in ("tokens", "target")} if is_dynamic else None
    module = from_module(
        network, (tokens,), loss=example.loss_of, targets=(targets,), dynamic_shapes=shapes
    )
    module = module if adapt is None else adapt(module)
    optimizer = AdamW(lr=0.003, weight_decay=0.01, eps=1e-6)
    return train_step(module, optimizer, clip_norm=0.5, **options), batches
