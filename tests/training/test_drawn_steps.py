"""Training steps of drawn networks, optimizers and options have the bits of steps whose results all
have memory of their own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.cpu import stages
from relax_grad.training import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, Trainer, train_step

GROUPS = ("params", "states", "optimizer_state")

OPTIMIZERS = (
    lambda: SGD(0.1),
    lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda: Adam(0.01),
    lambda: AdamW(0.01),
    lambda: Adagrad(0.1),
    lambda: RMSprop(0.01, momentum=0.5),
    lambda: Lion(0.01),
    lambda: {"w0": AdamW(0.01), "*": SGD(0.1, momentum=0.5)},
)

#: The options, of which a step has two at most with any others.
OPTIONS = (
    {"accumulate": 2},
    {"clip_norm": 0.5},
    {"clip_value": 0.05},
    {"ema": 0.9},
    {"skip_nonfinite": True},
    {"loss_scale": "dynamic"},
    {"loss_scale": 8.0},
    {"remat": "auto"},
    {"remat": "nothing_saveable"},
    {"outputs": True},
)

#: Seeds of steps that fail if results are written to memory that is read later.
SOME = (4, 10, 21, 31)

ACTIVATIONS = (op.nn.relu, op.tanh, op.nn.gelu, op.nn.silu)


def network(draw: random.Random) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Return a drawn network whose ``loss`` takes ``x``, with the values of its parameters.

    Layers may be normalized, share a weight, add an earlier result, and be joined with one.
    """
    numbers = np.random.default_rng(draw.randrange(2**32))
    rows, width = draw.choice([(1, 4), (4, 7), (3, 16)])
    types: dict[str, relax.Var] = {"x": relax.Var("x", relax.TensorType((rows, width), "float32"))}
    values: dict[str, np.ndarray] = {}

    def param(name: str, *shape: int) -> relax.Var:
        if name not in types:
            types[name] = relax.Var(name, relax.TensorType(shape, "float32"))
            values[name] = numbers.normal(scale=0.5, size=shape).astype("float32")
        return types[name]

    plan = []
    for i in range(draw.randint(1, 4)):
        kind = draw.choice(["dense", "dense", "residual", "joined", "norm", "shared"])
        plan.append((i, kind, draw.choice(ACTIVATIONS)))
        if kind == "norm":
            param(f"g{i}", width), param(f"h{i}", width)
        else:
            name = "w0" if kind == "shared" else f"w{i}"
            param(name, width, width), param(f"b{i}", width)
    bb = relax.BlockBuilder()
    with bb.function("loss", list(types.values())):
        with bb.dataflow():
            y = types["x"]
            for i, kind, activation in plan:
                if kind == "norm":
                    y = bb.emit(op.nn.layer_norm(y, types[f"g{i}"], types[f"h{i}"], axes=[-1]))
                    continue
                weight = types["w0" if kind == "shared" else f"w{i}"]
                new = bb.emit(activation(bb.emit(op.add(op.matmul(y, weight), types[f"b{i}"]))))
                if kind == "residual":
                    new = bb.emit(op.add(y, new))
                if kind == "joined":
                    both = bb.emit(op.concat([y, new], axis=0))
                    new = bb.emit(op.mean(op.reshape(both, (2, rows, width)), axis=0))
                y = new
            loss = bb.emit_output(op.mean(op.square(y)))
        bb.emit_func_output(loss)
    return bb.get(), values


@pytest.fixture
def no_reuse(monkeypatch):
    """Turns off the passes that give results the memory of arguments."""

    def off():
        for name in ("WriteToDonated", "WriteToLastRead"):
            monkeypatch.setattr(stages, name, lambda: tvm.transform.Sequential([]))

    return off


def check(seed: int, no_reuse) -> None:
    draw = random.Random(seed)
    module, values = network(draw)
    options: dict[str, object] = {}
    for chosen in draw.sample(OPTIONS, 2):
        options.update(chosen)
    step = train_step(module, draw.choice(OPTIMIZERS)(), wrt=list(values), **options)
    shape = [int(extent) for extent in module["loss"].params[0].ty.shape]
    batches = np.random.default_rng(seed).normal(size=(4, *shape))
    results = []
    for _ in range(2):
        with relax_grad.cache(None):  # both programs have one key
            trainer = Trainer(step, values=values)
        losses = [trainer.step(batch.astype("float32")).loss for batch in batches]
        results.append((losses, {group: trainer._group(group) for group in GROUPS}))
        no_reuse()
    (losses, groups), (wanted_losses, wanted) = results
    assert losses == wanted_losses, options
    for group in GROUPS:
        for name, tensor in groups[group].items():
            np.testing.assert_array_equal(tensor.numpy(), wanted[group][name].numpy(), name)


@pytest.mark.parametrize("seed", SOME)
def test_some_steps(seed, no_reuse):
    check(seed, no_reuse)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(40) if seed not in SOME])
def test_more_steps(seed, no_reuse):
    check(seed, no_reuse)
