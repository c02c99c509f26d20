"""Evaluation and predictions of a trainer."""

from __future__ import annotations

import numpy as np
import pytest
from training_models import START, batches, gradients, module_of, tensors

from relax_grad.training import SGD, Trainer, train_step


def test_evaluation_of_a_module():
    """The mean over examples, with the moving averages too, and without an update."""
    trainer = Trainer(train_step(module_of(), SGD(0.1), wrt=["w", "b"], ema=0.5), values=START)
    trainer.step(*batches(1)[0])
    before = tensors(trainer)
    some = batches(3)
    averages = {name: trainer.optimizer_state[f"ema/{name}"].numpy() for name in START}
    for values, ema in ((trainer.params, False), (averages, True)):
        values = {
            name: np.asarray(getattr(value, "numpy", lambda tensor=value: tensor)())
            for name, value in values.items()
        }
        wanted = np.mean([gradients(values, batch)[0] for batch in some])
        loader = [dict(zip("xy", batch, strict=True)) for batch in some]
        np.testing.assert_allclose(trainer.evaluate(loader, ema=ema)["loss"], wanted, 1e-12)
    assert tensors(trainer) == before
    assert trainer.steps == 1


def test_evaluation_of_a_torch_module():
    """In evaluation mode: metrics of predictions, weighted by the examples of a batch."""
    torch = pytest.importorskip("torch")
    from relax_grad.frontend.torch import from_module

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    both = {"input": {0: "n"}, "target": {0: "n"}}
    loss = torch.nn.functional.mse_loss
    imported = from_module(network, (x,), loss=loss, targets=(y,), dynamic_shapes=both)
    trainer = Trainer(train_step(imported, SGD()))
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    value = trainer.evaluate(
        loader, {"error": lambda output, target: np.mean((output - target) ** 2)}
    )
    wanted = loss(network.eval()(x), y).item()
    assert value == {"error": pytest.approx(wanted, 1e-6)}
    for call, error, message in (
        (lambda: trainer.evaluate(loader), ValueError, "metrics must be given: the loss of a"),
        (lambda: trainer.evaluate([], {"a": np.mean}), ValueError, "the loader gave no example"),
        (lambda: trainer.evaluate(loader, [np.mean]), TypeError, "metrics must be functions by"),
        (
            lambda: trainer.evaluate(loader, {"a": lambda *_: "good"}),
            TypeError,
            "metrics: a must return a number, .* but it returns 'good'",
        ),
        (lambda: trainer.evaluate([(x,)], {"a": np.mean}), TypeError, "the step needs target too"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_predictions_that_draw_random_numbers(torch):
    """The trainer gives the seed, or the caller does; tensors on other devices are refused."""
    from relax_grad.frontend.torch import from_module

    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(3, 64)

        def forward(self, x):
            return torch.nn.functional.dropout(self.dense(x), 0.5, training=True)

    x = torch.ones(2, 3)
    imported = from_module(Noisy(), (x,), loss=lambda y: y.square().mean())
    trainer = Trainer(train_step(imported, SGD(0.1)))
    first = trainer.predict(x).numpy()
    np.testing.assert_array_equal(trainer.predict(x).numpy(), first)
    other = trainer.predict(np.array(5, "int64"), x).numpy()
    assert (other == 0).any()
    assert not np.array_equal(other == 0, first == 0)
    with pytest.raises(ValueError, match="x must be on the CPU, but it is on meta"):
        trainer.predict(torch.ones(2, 3, device="meta"))
