"""Buffers that a call assigns, and buffers that share memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check  # noqa: E402

from relax_grad.frontend.torch import from_module, wrap  # noqa: E402
from relax_grad.training import SGD, Trainer, train_step  # noqa: E402

nn = torch.nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.prepare()

    def prepare(self):
        self.add("a", "b")

    def add(self, *names):
        for i, name in enumerate(names):
            self.register_buffer(name, torch.full((4,), float(i)))


class Crosswise(Base):
    """A delay, a swap, a rotation, a part of a buffer, one tensor for two buffers, and caches."""

    def prepare(self):
        self.add("now", "before", "left", "right", "x", "y", "z", "part", "one", "two")
        self.register_buffer("rows", torch.arange(8.0).reshape(2, 4))
        self.register_buffer("cache", None)

    def forward(self, data):
        new = data.detach().mean(0)
        if self.cache is None:
            self.cache = torch.arange(4.0)
        self.before = self.now
        self.now = new
        self.left, self.right = self.right, self.left + 1
        self.x, self.y, self.z = self.y, self.z, self.x + new
        self.part = self.rows[0]
        self.rows = torch.stack([new, self.rows[0]])
        self.one = self.two = new * 2
        read = self.before + 2 * self.left + 3 * self.x + 5 * self.part + self.two * self.cache
        return ((data * self.w - read) ** 2).mean()


@pytest.mark.filterwarnings("ignore:the function forward does not return the buffers")
def test_all_buffers_are_read_before_the_first_is_written():
    torch.manual_seed(0)
    batches = [torch.randn(3, 4) for _ in range(4)]
    module, other = Crosswise(), Crosswise()
    trainer = Trainer(train_step(from_module(module, batches[:1]), SGD(lr=0.1)))
    wrapped = wrap(module, batches[:1])
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (module, other)]
    for batch in batches:
        losses = []
        for model, optimizer in zip((wrapped, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert trainer.step(batch).loss == pytest.approx(losses[1], rel=1e-5)
        for key, wanted in other.named_buffers():
            if key != "cache":
                ours = torch.from_dlpack(trainer.states[key]), dict(module.named_buffers())[key]
                for value in ours:
                    torch.testing.assert_close(value, wanted, msg=lambda m, k=key: f"{k}: {m}")
    assert module.cache is None


class InParameter(Base):
    def prepare(self):
        self.register_buffer("view", self.w.detach().view(2, 2))

    def forward(self, data):
        return (data * self.w * self.view.view(4)).sum()


class Overlapping(Base):
    def prepare(self):
        self.add("a")
        self.register_buffer("b", self.a[:2])

    def forward(self, data):
        self.a.add_(1.0)
        return (data * self.w).sum() + self.b.sum()


class Tied(Base):
    def prepare(self):
        self.add("a")
        self.register_buffer("b", self.a)

    def forward(self, data):
        self.a.add_(1.0)
        return (data * self.w).sum() + self.b.sum()


class Attribute(Tied):
    def prepare(self):
        self.add("a")
        self.b = self.a


class TiedAssigned(Tied):
    def forward(self, data):
        self.a = self.a + 1
        return (data * self.w).sum() + self.b.sum()


class FromNone(Base):
    def prepare(self):
        self.register_buffer("mean", None)

    def forward(self, data):
        mean = data.detach().mean(0)
        self.mean = mean if self.mean is None else self.mean + mean
        return (data * self.w * self.mean).sum()


class Registered(Base):
    def forward(self, data):
        if not hasattr(self, "late"):
            self.register_buffer("late", data.detach().mean(0))
        return (data * self.w * self.late).sum()


class ToParameter(Base):
    def forward(self, data):
        self.a = self.w.detach()
        return (data * self.w * self.a).sum()


class WrittenInPlace(Base):
    def forward(self, data):
        loss = (data * self.w * self.b.clone()).sum()
        self.b = self.a
        self.a.add_(data.detach().mean(0))
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Overlapping, "tensors a and b of the module have the same memory, and a call writes"),
        (TiedAssigned, r"the buffer a of TiedAssigned is a buffer of another name.*a\.copy_\("),
        (Attribute, "tensors a and b of the module have the same memory, and a call writes"),
        (FromNone, r"the buffer mean of FromNone is None, .*register_buffer\('mean'"),
        (Registered, r"the buffer late of Registered is None, and a call gives it"),
        (ToParameter, r"the buffer a of ToParameter the memory of the parameter w, .*clone\(\)"),
        (WrittenInPlace, "the buffers a of WrittenInPlace and b of WrittenInPlace share memory"),
    ],
)
def test_buffers_without_a_meaning_in_a_graph_are_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        from_module(kind(), (torch.randn(3, 4),))


def test_a_buffer_in_the_memory_of_a_parameter():
    """The wrapped module has one memory for both, and an import has copies."""
    with pytest.raises(ValueError, match="view has the memory of w, which changes in training"):
        from_module(InParameter(), (torch.randn(3, 4),))
    module, data = InParameter(), torch.randn(3, 4)
    from_module(module, (data,), trainable=[])
    wrapped = wrap(module, (data,))
    for _ in range(2):
        torch.testing.assert_close(wrapped(data), module(data))
        with torch.no_grad():
            module.w.mul_(2)


class Counting(Base):
    """A layer that is registered twice, with a buffer that is written or assigned."""

    def prepare(self):
        self.add("a", "b")
        self.is_assigned = False

    def forward(self, data):
        if self.is_assigned:
            self.a = self.a * 0.5 + data.detach().mean(0)
        else:
            self.a.mul_(0.5).add_(data.detach().mean(0))
        self.b += self.a
        return data * self.w + self.a - self.b


@pytest.mark.parametrize("is_assigned", [False, True])
def test_layers_that_are_registered_twice(is_assigned):
    layer, norm = Counting(), nn.BatchNorm1d(4)
    layer.is_assigned = is_assigned
    module = nn.Sequential(layer, norm, nn.Linear(4, 4), layer, norm).double()
    data = torch.randn(6, 4).double()
    imported = check(module, (data,), loss=lambda y: y.cos().sum(), steps=2, tolerance=1e-6)
    assert list(imported.states)[:2] == ["0.a", "0.b"]
    assert imported.aliases["3.a"] == "0.a"
    assert imported.aliases["4.running_mean"] == "1.running_mean"


def test_a_buffer_of_two_names_that_is_written_in_place():
    check(Tied(), (torch.randn(3, 4),), steps=2, forward=False)
