"""A trainer takes batches of any size, whatever the size of the import's examples."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from relax_grad.frontend.torch import from_module  # noqa: E402
from relax_grad.training import SGD, Trainer, lora, train_step  # noqa: E402

nn = torch.nn

ROWS, WIDTH, CLASSES = 12, 5, 3
loss = nn.functional.cross_entropy


def drawn(count, width=WIDTH):
    generator = torch.Generator().manual_seed(count)
    data = torch.randn(count, width, generator=generator)
    return data, torch.arange(count) % CLASSES


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def of_step(model, x, y, **options):
    imported = from_module(model, (x,), loss=loss, targets=(y,), **options)
    return train_step(imported, SGD(lr=0.1, momentum=0.9), ema=0.5)


@pytest.fixture(scope="module")
def step():
    return of_step(made(), *drawn(ROWS))


@pytest.fixture(scope="module")
def trained(step):
    """A trainer after batches of several sizes, and the losses of PyTorch for them."""
    trainer, model = Trainer(step), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for count in (ROWS, 7, 5, ROWS):
        x, y = drawn(count)
        value = loss(model(x), y)
        losses.append((trainer.step(x, y).loss, value.item()))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return trainer, model.eval(), losses


def test_steps_of_several_sizes(trained):
    trainer, model, losses = trained
    for actual, expected in losses:
        assert actual == pytest.approx(expected, rel=1e-5)
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(trainer.values[name].numpy(), tensor, rtol=1e-4, atol=1e-6)


def test_predictions_and_means_of_several_sizes(trained):
    trainer, model, _ = trained
    for count in (1, 7, ROWS):
        x, _ = drawn(count)
        np.testing.assert_allclose(trainer.predict(x).numpy(), model(x).detach(), atol=1e-5)
    x, y = drawn(ROWS + 7)
    batches = [(x[:ROWS], y[:ROWS]), {"input": x[ROWS:], "target": y[ROWS:]}]
    metrics = {"accuracy": lambda output, target: np.mean(output.argmax(1) == target)}
    found = trainer.evaluate(batches, metrics)["accuracy"]
    assert found == pytest.approx((model(x).argmax(1) == y).float().mean().item())


def test_a_file_of_one_size_goes_on_with_another(trained, step, tmp_path):
    trainer, _, _ = trained
    trainer.save(tmp_path / "state.safetensors")
    other = Trainer(step)
    other.load(tmp_path / "state.safetensors")
    other._variants._other = trainer._variants._other  # compiled already
    batch = drawn(7)
    assert other.step(*batch).loss == trainer.step(*batch).loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y[:3]), "must have as many rows, but input has 7, target has 3"),
        (lambda x, y: (x.double(), y), r"input must have .* float32, but it has \(7, 5\) and fl"),
        (lambda x, y: (x[:, :4], y), r"input must have shape \(12, 5\)"),
        (lambda x, y: (x[:1], y[:1]), "needs more than 1 value per channel"),
    ],
)
def test_batches_that_do_not_fit(trained, change, message):
    trainer, _, _ = trained
    steps = trainer.steps
    with pytest.raises(ValueError, match=message):
        trainer.step(*change(*drawn(7)))
    assert trainer.steps == steps


def test_many_steps_of_another_size_warn(trained, monkeypatch):
    trainer, _, _ = trained
    monkeypatch.setattr(trainer._variants, "_counts", [99, 0])
    with pytest.warns(UserWarning, match="the examples of the import, which have 12 rows"):
        trainer.step(*drawn(7))


class Reshaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.layer(x).reshape(ROWS, CLASSES)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (Reshaping, {}, "the model fixes it: its code has the number itself"),
        (made, {"batch": ROWS}, "batch=12 fixes it"),
    ],
)
def test_a_fixed_number_of_rows_says_why(make, options, reason):
    step = of_step(make(), *drawn(ROWS), **options)
    x, y = drawn(7)
    with pytest.raises(ValueError, match=rf"must have 12 rows, but it has 7: {reason}.*\(x\[:7\]"):
        step._other_rows.are_in(step.batch, {next(iter(step.batch)): x, "target": y})
    assert not step._other_rows.are_in(step.batch, {next(iter(step.batch)): x[:, :2], "target": y})


def test_a_budget_of_memory_fixes_the_number(step):
    imported = from_module(made(), (drawn(4)[0],), loss=lambda output: output.sum())
    budget = train_step(imported, SGD(), remat=1_000_000)
    with pytest.raises(ValueError, match="remat is a budget in bytes"):
        budget._other_rows.are_in(budget.batch, {"input": drawn(7)[0]})


@pytest.mark.parametrize("frozen", [None, "int8"])
def test_adapters_take_batches_of_other_sizes(frozen):
    model = nn.Linear(64, CLASSES)
    x, y = drawn(ROWS, 64)
    imported = from_module(model, (x,), loss=loss, targets=(y,))
    adapted = lora(imported, 2, "weight", alpha=4, frozen=frozen, group_size=16)
    trainer = Trainer(train_step(adapted, SGD(lr=0.1)))
    a, b = (torch.tensor(value.numpy(), requires_grad=True) for value in adapted.params.values())
    stored = torch.from_numpy(adapted.merged()["weight"].numpy())

    def outputs(x):
        return x @ (stored + 2 * b @ a).T + model.bias.detach()

    optimizer = torch.optim.SGD([a, b], lr=0.1)
    for count in (ROWS, 7, 5):
        x, y = drawn(count, 64)
        value = loss(outputs(x), y)
        assert trainer.step(x, y).loss == pytest.approx(value.item(), rel=1e-5)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    np.testing.assert_allclose(trainer.predict(x[:1]).numpy(), outputs(x[:1]).detach(), atol=1e-5)


def test_the_model_with_adapters_has_them_for_other_sizes():
    x, y = drawn(ROWS)
    adapted = lora(
        from_module(nn.Linear(WIDTH, CLASSES), (x,), loss=loss, targets=(y,)), 2, "weight"
    )
    step = train_step(adapted.model, SGD(lr=0.1))
    assert list(step._other_rows.step().params) == list(step.params) == list(adapted.params)


def test_adapters_of_a_fixed_size_name_the_remedy():
    x, y = drawn(ROWS)
    imported = from_module(nn.Linear(WIDTH, CLASSES), (x,), loss=loss, targets=(y,), batch=ROWS)
    trainer = Trainer(train_step(lora(imported, 2, "weight"), SGD()))
    with pytest.raises(ValueError, match=r"batch=12 fixes it\. .* import the model for 7 rows"):
        trainer.step(x[:7], y[:7])
