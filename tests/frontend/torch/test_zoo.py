"""Models by family against PyTorch, for three steps: loss, every gradient, new states."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from sweep import share  # noqa: E402
from torch_models import check, set_seeds  # noqa: E402
from torch_zoo import FAMILIES, MODELS  # noqa: E402

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
        (_packed, (3, 2, 4), "pack_padded_sequence"),
    ],
)
def test_refused_models_name_the_line_of_the_user(function, shape, line):
    with pytest.raises(UnsupportedOperatorError, match=rf"test_zoo.py.*{line}"):
        from_module(_Module(function), (torch.ones(shape),))
