"""Models by family against PyTorch, for three steps: loss, every gradient, new states."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from sweep import share  # noqa: E402
from torch_models import check, set_seeds  # noqa: E402
from torch_zoo.families import FAMILIES, MODELS  # noqa: E402

from relax_grad.frontend.torch import UnsupportedOperatorError, from_module  # noqa: E402

#: A model of each kind that compiles soon, for the suite that runs always.
FEW = ("unet", "gru_packed", "vq_vae", "gat")


def _check(name: str) -> None:
    set_seeds(0)
    try:
        model = MODELS[name]()
    except ModuleNotFoundError as error:
        pytest.skip(f"a package is not installed: extra zoo ({error})")
    check(
        *(model.module, model.args),
        **{"loss": model.loss, "targets": model.targets, "steps": 3, **model.options},
    )


@pytest.mark.parametrize("name", FEW)
def test_models(name):
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", share(sorted(MODELS)))
@pytest.mark.filterwarnings("ignore:the import has no function forward")
def test_all_models(name):
    _check(name)


def test_the_zoo_has_models_of_all_families():
    assert len(MODELS) == sum(map(len, FAMILIES.values()))
    assert len(MODELS) >= 60


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, torch.nn.Linear(4, 4)

    def forward(self, *args):
        return self.function(self.layer, *args)


def _counts(layer, x):
    return layer(x).sum() * torch.bincount(x[:, 0].long(), minlength=2).sum()


def _masked(layer, x):
    return layer(x)[x > 0].mean()


def _packed(layer, x):
    lengths = x[:, 0, 0].long()
    packed = torch.nn.utils.rnn.pack_padded_sequence(layer(x), lengths, batch_first=True)
    return packed.data.mean()


@pytest.mark.parametrize(
    ("function", "shape", "line"),
    [
        (_counts, (3, 4), "torch.bincount"),
        (_masked, (3, 4), r"layer\(x\)\[x > 0\]"),
        (_packed, (3, 2, 4), r"packed\.data\.mean"),
    ],
)
def test_refused_models_name_the_line_of_the_user(function, shape, line):
    with pytest.raises(UnsupportedOperatorError, match=rf"test_zoo.py.*{line}"):
        from_module(_Module(function), (torch.ones(shape),))


def test_a_trace_that_stops_prints_nothing(capfd):
    """torch.export prints the graph of a trace that a condition on values stops."""

    def conditional(layer, x):
        return layer(x).sum() if x.sum() > 0 else x.sum()

    with pytest.raises(UnsupportedOperatorError, match=r"test_zoo.py.*if x.sum\(\) > 0"):
        from_module(_Module(conditional), (torch.ones(3, 4),))
    assert capfd.readouterr() == ("", "")


class _Stateful(torch.nn.Module):
    """A layer whose function has state of Python."""

    def __init__(self, function, state=None):
        super().__init__()
        self.function, self.state, self.layer = function, state, torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self, self.layer(x)).square().mean()


def _kept(m, x):
    """Read the hidden state of the last call."""
    m.state = torch.tanh(x + m.state).detach()
    return x + m.state


def _first_kept(m, x):
    last = torch.zeros_like(x) if m.state is None else m.state
    m.state = (x + last).detach()
    return x + last


def _initialised(m, x):
    if not m.state:
        m.state = True
        return 2 * x
    return x


def _counted(m, x):
    m.state["calls"] += 1
    return x * m.state["calls"]


def _appended(m, x):
    m.state.append(x.detach())
    return x * len(m.state)


class _Counter:
    """A counter, in an object or not."""

    def __init__(self, inner=None):
        self.inner, self.calls = inner, 0


def _counted_within(m, x):
    m.state.inner.calls += 1
    return x * m.state.inner.calls


@pytest.mark.parametrize(
    ("function", "state", "message"),
    [
        (_kept, torch.zeros(3, 4), "a write to the attribute state of _Stateful"),
        (_first_kept, None, "a write to the attribute state of _Stateful"),
        (_initialised, False, "a write to the attribute state of _Stateful"),
        (_counted, {"calls": 0}, "a write to the attribute state of _Stateful"),
        (_appended, [], "a write to the attribute state of _Stateful"),
        (_counted_within, _Counter(_Counter()), "a write to the attribute state of _Stateful"),
        (lambda m, x: x * random.random(), None, "a random number of the module random"),
        (lambda m, x: x * float(np.random.rand()), None, "of numpy.random"),  # noqa: NPY002
    ],
    ids=["tensor", "first", "flag", "dict", "list", "object", "random", "numpy"],
)
def test_state_of_python_is_an_error(function, state, message):
    """The graph has the state of the first call."""
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_module(_Stateful(function, state), (torch.ones(3, 4),))


def test_the_line_that_changes_state_is_named():
    for function, state, line in (
        (_kept, torch.zeros(3, 4), "m.state = torch.tanh(x + m.state).detach()"),
        (_appended, [], "m.state.append(x.detach())"),
    ):
        with pytest.raises(UnsupportedOperatorError) as caught:
            from_module(_Stateful(function, state), (torch.ones(3, 4),))
        assert f"in {function.__name__}: {line}" in str(caught.value)


def _cached(m, x):
    if m.state is None:
        m.state = torch.arange(4.0) / 4
    return x * m.state


def _noted(m, x):
    m.state = x.abs().sum()
    return x + m.state


@pytest.mark.parametrize("function", [_cached, _noted])
def test_caches_and_notes_are_imported(function):
    imported = from_module(_Stateful(function), (torch.ones(3, 4),))
    assert list(imported.params) == ["layer.weight", "layer.bias"]
