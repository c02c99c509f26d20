"""The attributes that a trace reads, and their changes."""

from __future__ import annotations

import copy
import functools
import types

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from relax_grad.frontend.torch.run.guards import Guards  # noqa: E402
from relax_grad.frontend.torch.tracing.state import watching_state  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class Settings:
    """A class whose objects have data within data."""

    shift = 0.5  # of the class

    def __init__(self, inner=None):
        self.inner, self._power = inner, 1.0

    def power(self, x):
        return x**self._power


class Slots:
    __slots__ = ("shift",)

    def __init__(self):
        self.shift = 0.5


class Reader(nn.Module):
    """Reads attributes that a training loop may change."""

    scale = 1.0  # of the class
    factors = (1.0, [2.0])  # of the class

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.rnn = nn.BatchNorm1d(4), nn.Dropout(0.0), nn.LSTM(4, 4)
        self.temperature, self.is_squared, self.shape = 1.0, False, (5, 4)
        self.weights, self.table = [1.0, 2.0], {"shift": 0.5}
        self.config = types.SimpleNamespace(shift=0.5)
        self.mask, self.rows = torch.ones(4), [torch.ones(4)]
        self.activation, self.unread = F.relu, 1
        self.nested = types.SimpleNamespace(inner=types.SimpleNamespace(shifts=[0.5]))
        self.clamped, self.pair = functools.partial(torch.clamp, min=-1.0), {"of": {"shift": 0.5}}
        self.settings, self.power = Settings(Settings(Slots())), Settings().power
        self.settings_class, self.groups = type("Own", (Settings,), {}), {"of": [Settings()]}
        self.other, self.shared, self.drop.slope = torch.ones(4), torch.ones(4), 0.5

    def doubled(self, x):
        return x * 2

    def forward(self, x):
        x = self.doubled(self.clamped(x) * self.other * self.shared) * vars(self.drop)["slope"]
        x = self.power(x) + self.settings.inner.inner.shift + self.settings_class.shift
        x = x * self.factors[1][0] + self.groups["of"][0].shift + self.settings.inner.shift
        x = x + self.nested.inner.shifts[0] + self.pair["of"]["shift"]
        y = self.drop(self.norm(x)) / self.temperature * self.scale
        y = self.activation(y) * self.weights[1] * self.mask * self.rows[0]
        y = y + self.config.shift + self.table["shift"]
        y = y**2 if self.is_squared else y
        return self.rnn((y + self.offset if hasattr(self, "offset") else y).reshape(self.shape))


CHANGES = {
    "temperature of Reader": lambda m: setattr(m, "temperature", 4.0),
    "scale of Reader": lambda m: setattr(m, "scale", 3.0),
    "is_squared of Reader": lambda m: setattr(m, "is_squared", True),
    "shape of Reader": lambda m: setattr(m, "shape", (5, 2, 2)),
    "weights of Reader": lambda m: m.weights.__setitem__(1, 5.0),
    "table of Reader": lambda m: m.table.__setitem__("shift", 1.0),
    "config of Reader": lambda m: setattr(m.config, "shift", -1.0),
    "mask of Reader": lambda m: m.mask.zero_(),
    "rows of Reader": lambda m: m.rows.__setitem__(0, torch.zeros(4)),
    "activation of Reader": lambda m: setattr(m, "activation", torch.tanh),
    "momentum of BatchNorm1d": lambda m: setattr(m.norm, "momentum", 1),
    "eps of BatchNorm1d": lambda m: setattr(m.norm, "eps", 1.0),
    "p of Dropout": lambda m: setattr(m.drop, "p", 1.0),
    "offset of Reader": lambda m: setattr(m, "offset", 0.25),
    "nested of Reader": lambda m: m.nested.inner.shifts.__setitem__(0, 2.0),
    "pair of Reader": lambda m: m.pair["of"].__setitem__("shift", 2.0),
    "settings of Reader": lambda m: setattr(m.settings.inner.inner, "shift", 2.0),
    "settings of Reader, replaced": lambda m: setattr(m.settings, "inner", Settings(Settings())),
    "settings_class of Reader": lambda m: setattr(m.settings_class, "shift", 2.0),
    "power of Reader": lambda m: setattr(m.power.__self__, "_power", 2.0),
    "groups of Reader": lambda m: setattr(m.groups["of"][0], "shift", 2.0),
    "factors of Reader": lambda m: setattr(m, "factors", (1.0, [3.0])),
    "clamped of Reader": lambda m: setattr(m, "clamped", functools.partial(torch.clamp, min=0.0)),
    "other of Reader": lambda m: setattr(m.other, "data", torch.zeros(4)),
    "shared of Reader": lambda m: m.shared.numpy().fill(2.0),
    "doubled of Reader": lambda m: setattr(m, "doubled", torch.cos),
    "slope of Dropout": lambda m: setattr(m.drop, "slope", 2.0),
    "forward of Dropout": lambda m: setattr(m.drop, "forward", lambda x: x * 2),
}


@pytest.fixture(scope="module")
def traced():
    module = Reader()
    with watching_state(nn.ModuleList([module]), lambda *_: None) as reads:
        module(torch.randn(5, 4))
    return module, Guards(list(module.modules()), reads)


@pytest.mark.parametrize("text", CHANGES)
def test_changes_are_found(text):
    module = Reader()
    with watching_state(nn.ModuleList([module]), lambda *_: None) as reads:
        module(torch.randn(5, 4))
    guards = Guards(list(module.modules()), reads)
    bound = guards.of(list(module.modules()))
    assert bound.changed() is None
    CHANGES[text](module)
    text = text.partition(",")[0]
    assert bound.changed() == text
    assert guards.of(list(module.modules())).changed() == text


def test_changes_of_classes_are_found(traced):
    module, guards = traced
    bound = guards.of(list(module.modules()))
    for kind, name, value in ((Reader, "scale", 2.0), (Reader, "factors", (1.0, [4.0]))):
        old = getattr(kind, name)
        setattr(kind, name, value)
        assert bound.changed() == f"{name} of Reader"
        setattr(kind, name, old)
    Settings.shift = 2.0
    assert bound.changed() in {"settings of Reader", "power of Reader", "groups of Reader"}
    Settings.shift = 0.5
    assert bound.changed() is None


def test_what_a_step_changes_is_no_attribute(traced):
    """Parameters, buffers, equal values, and attributes that forward does not read."""
    module, guards = traced
    bound = guards.of(list(module.modules()))
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.add_(1)
    # Equal values in other objects.
    module.unread, module.temperature, module.shape = 2, float("1.0"), (*module.shape,)
    module.eval()
    assert bound.changed() is None


def test_a_copy_has_its_own_attributes():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature, self.config = 2.0, types.SimpleNamespace(shift=0.5)

        def forward(self, x):
            return x / self.temperature + self.config.shift

    module = Plain()
    with watching_state(nn.ModuleList([module]), lambda *_: None) as reads:
        module(torch.ones(2))
    guards = Guards([module], reads)
    other = copy.deepcopy(module)
    assert guards.of([other]).changed() is None
    other.temperature = 3.0
    assert guards.of([other]).changed() == "temperature of Plain"
    assert guards.of([module]).changed() is None
