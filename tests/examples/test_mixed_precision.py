"""The examples in mixed precision: training ends with the losses of float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from machines import HALVES, of_halves

from relax_grad.training import AdamW, Trainer, train_step

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn", reason="scikit-learn has the digits")

from relax_grad.frontend.torch import from_module  # noqa: E402

#: The steps at the end whose mean loss is compared.
LAST = 20


def char_gpt(precision: str | None, target) -> list[float]:
    """Return the losses of a small GPT of characters."""
    import char_gpt

    torch.manual_seed(0)
    manual, rng = char_gpt.manual(), np.random.default_rng(0)
    alphabet = "".join(sorted(set(manual)))
    text = char_gpt.Text(manual, alphabet)
    network = char_gpt.GPT(len(alphabet), 32, 64, 2, 2)
    tokens, following = map(torch.from_numpy, text.batch(rng, 16, 32))
    imported = from_module(network, (tokens,), loss=char_gpt.loss_of, targets=(following,))
    step = train_step(imported, AdamW(lr=3e-3), precision=precision)
    trainer = Trainer(step, target=target)
    return [trainer.step(*text.batch(rng, 16, 32)).loss for _ in range(100)]


def digits(precision: str | None, target) -> list[float]:
    """Return the losses of the CNN of digits."""
    import digits_trainer
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    found = load_digits()
    images, labels = (found.images / 16).astype("float32")[:, None], found.target.astype("int64")
    loader = digits_trainer.Loader(images, labels, 32, 0)
    imported = from_module(
        digits_trainer.network(),
        (torch.zeros(32, 1, 8, 8),),
        loss=torch.nn.functional.cross_entropy,
        targets=(torch.zeros(32, dtype=torch.int64),),
    )
    step = train_step(imported, AdamW(lr=3e-4), precision=precision)
    trainer, losses = Trainer(step, target=target, seed=0), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        losses += [trainer.step(x, y).loss for x, y in loader if len(x) == 32]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("train", [char_gpt, digits])
def test_training_ends_with_the_loss_of_float32(train: Callable, name: str):
    """Within 1 %, with pairs and with tiles (AMX)."""
    target = of_halves(name)
    exact, half = train(None, target), train("bf16", target)
    assert exact != half
    assert np.mean(exact[-LAST:]) < 0.6 * exact[0]
    assert np.mean(half[-LAST:]) == pytest.approx(np.mean(exact[-LAST:]), rel=0.01)
