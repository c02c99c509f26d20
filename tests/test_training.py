"""Training through relax.training, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import tensor
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.training import Trainer
from tvm.relax.training.loss import CrossEntropyLoss
from tvm.relax.training.optimizer import SGD, Adam

from relax_grad.training import SetupTrainer, append_loss

SHAPES = {"weight": (4, 3, 3, 3), "gamma": (4,), "beta": (4,), "dense": (4, 5)}


def backbone(batch, training):
    """A convolution, a normalisation with running statistics, and a classifier."""
    params = [tensor("x", (batch, 3, 6, 6), "float32")]
    params += [tensor(name, shape, "float32") for name, shape in SHAPES.items()]
    params += [tensor(name, (4,), "float32") for name in ("mean", "variance")]
    bb = relax.BlockBuilder()
    with bb.function("backbone", params):
        x, weight, gamma, beta, dense, mean, variance = params
        with bb.dataflow():
            y = bb.emit(op.nn.conv2d(x, weight, padding=1))
            normalized = bb.emit(
                op.nn.batch_norm(y, gamma, beta, mean, variance, axis=1, training=training)
            )
            y = bb.emit(op.nn.relu(relax.TupleGetItem(normalized, 0)))
            scores = bb.emit_output(op.matmul(bb.emit(op.mean(y, [2, 3])), dense))
            states = [bb.emit_output(relax.TupleGetItem(normalized, i)) for i in (1, 2)]
        bb.emit_func_output(relax.Tuple([scores, *states]))
    return bb.get().with_attrs({"param_num": len(SHAPES), "state_num": 2})


def torch_step(torch, values, mean, variance, x, training):
    y = torch.conv2d(torch.from_numpy(x), values["weight"], padding=1)
    y = torch.nn.functional.batch_norm(
        y, mean, variance, values["gamma"], values["beta"], training, 0.1, 1e-5
    )
    return y.relu().mean((2, 3)) @ values["dense"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("batch", "optimizer"), [(tirx.Var("n", "int64"), SGD), (6, Adam)], ids=["symbolic", "static"]
)
def test_steps_are_those_of_torch(torch, batch, optimizer, training):
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    types = [relax.TensorType((batch, 5), "float32"), relax.TensorType((batch,), "int64")]
    setup = SetupTrainer(CrossEntropyLoss(reduction="mean"), optimizer(0.05), types)
    module = setup(backbone(batch, training))
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    trainer = Trainer(module, machine, tvm.cpu(), False)
    trainer.load_params(start)
    trainer.load_states([np.full(4, 0.1, "float32"), np.full(4, 2.0, "float32")])

    values = {k: torch.from_numpy(v.copy()).requires_grad_() for k, v in start.items()}
    mean, variance = torch.full((4,), 0.1), torch.full((4,), 2.0)
    torch_optimizer = getattr(torch.optim, optimizer.__name__)(values.values(), 0.05)
    for rows in (6, 6) if isinstance(batch, int) else (6, 3, 9):
        x = rng.normal(size=(rows, 3, 6, 6)).astype("float32")
        labels = rng.integers(0, 5, rows)
        loss = trainer.update(x, labels).numpy()
        scores = torch_step(torch, values, mean, variance, x, training)
        wanted = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels))
        torch_optimizer.zero_grad()
        wanted.backward()
        torch_optimizer.step()
        np.testing.assert_allclose(loss, wanted.detach().numpy(), rtol=1e-4)

    for name, found in trainer.export_params().items():
        np.testing.assert_allclose(
            found.numpy(), values[name].detach().numpy(), rtol=2e-3, atol=2e-4, err_msg=name
        )
    states = trainer.export_states()
    np.testing.assert_allclose(states["mean"].numpy(), mean.numpy(), rtol=1e-4, atol=1e-6)
    if training:  # TVM keeps the biased variance, PyTorch the unbiased one
        assert np.all(np.abs(states["variance"].numpy() / variance.numpy() - 1) < 0.02)
    else:
        np.testing.assert_array_equal(states["variance"].numpy(), variance.numpy())

    x = rng.normal(size=(6, 3, 6, 6)).astype("float32")
    predicted = trainer.predict(x).numpy()
    state = [torch.from_numpy(states[name].numpy()) for name in ("mean", "variance")]
    final = torch_step(torch, values, *state, x, False).detach().numpy()
    np.testing.assert_allclose(predicted, final, rtol=1e-2, atol=2e-3)


def test_a_loss_that_does_not_fit():
    module = backbone(6, True)
    loss = CrossEntropyLoss(reduction="mean")
    types = [relax.TensorType((6, 7), "float32"), relax.TensorType((6,), "int64")]
    with pytest.raises(ValueError, match="for the parameter"):
        append_loss(module["backbone"], loss(*types), 1)
    with pytest.raises(ValueError, match="takes 4 outputs"):
        append_loss(module["backbone"], loss(*types), 4)
