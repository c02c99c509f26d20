"""Transformers trained for several steps beside PyTorch: loss, outputs, the gradient of every
parameter, new states."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from sweep import share  # noqa: E402
from torch_models import check, compiled  # noqa: E402

from relax_grad.errors import UnsupportedOperatorError  # noqa: E402
from relax_grad.frontend.torch import from_module  # noqa: E402

from .transformers import FAMILIES, REFUSED, Model, sequence  # noqa: E402

#: The models of the suite that runs always.
FEW = [("plain", "encoder_layer-gelu-first"), ("decoders", "gpt2-sdpa"), ("adapters", "lora-gpt2")]

ALL = [(family, name) for family, models in FAMILIES.items() for name in models]


def built(family: str, name: str, table=FAMILIES) -> Model:
    """Return a model, or skip the test if its library is not installed."""
    try:
        return table[family][name]()
    except ModuleNotFoundError as error:
        pytest.skip(f"a package is not installed: extra zoo ({error})")


@pytest.mark.parametrize(("family", "name"), FEW)
def test_a_few_transformers(family, name):
    module, args, kwargs, options = built(family, name)
    check(module, args, kwargs, steps=2, forward=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), share(ALL))
def test_every_transformer(family, name):
    module, args, kwargs, options = built(family, name)
    check(module, args, kwargs, steps=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, models in REFUSED.items() for name in models]
)
def test_a_transformer_that_is_refused(family, name):
    """The error names the line of the model that cannot be imported."""
    module, args, kwargs, options = built(family, name, REFUSED)
    options = dict(options)
    line = options.pop("line")
    with pytest.raises(UnsupportedOperatorError, match=line) as error:
        from_module(module, args, kwargs)
    assert "converter fails" not in str(error.value)


class Attention(torch.nn.Module):
    """Attention to equal keys: without dropout, all weights are equal."""

    def __init__(self, rate: float, dtype: torch.dtype):
        super().__init__()
        self.rate = rate
        self.value = torch.nn.Parameter(torch.eye(64, dtype=dtype).expand(2, 4, 64, 64).clone())

    def forward(self, query):
        key = torch.zeros_like(self.value)
        rate = self.rate if self.training else 0.0
        weights = torch.nn.functional.scaled_dot_product_attention(
            query, key, self.value, dropout_p=rate
        )
        return weights.square().sum(), weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_drops_weights(dtype):
    """The values are unit vectors, and the results therefore the weights; in float32, they are
    those of an operator."""
    rate = 0.25
    imported = from_module(Attention(rate, dtype), (torch.randn(2, 4, 64, 64, dtype=dtype),))
    script = imported.module.script()
    assert ("R.grad.attention_dropout(" in script) == (dtype == torch.float32)
    run = compiled(imported)
    values = [torch.from_dlpack(param) for param in imported.params.values()]
    query = torch.randn(2, 4, 64, 64, dtype=dtype)
    rtol, atol = (1e-12, 1e-15) if dtype == torch.float64 else (1e-5, 1e-7)
    masks = []
    for seed in (0, 1, 0):
        (_, outputs, _), (gradient,) = run("loss_adjoint", torch.tensor(seed), query, *values)
        weights = outputs[-1]
        kept = weights != 0
        torch.testing.assert_close(
            weights, kept.to(dtype) / (64 * (1 - rate)), rtol=rtol, atol=atol
        )
        # The gradient has the same mask.
        torch.testing.assert_close(gradient, weights.transpose(-1, -2) @ (2 * weights))
        masks.append(kept)
    assert torch.equal(masks[0], masks[2])
    assert abs(float(masks[0].double().mean()) - (1 - rate)) < 0.01
    both = (masks[0] & masks[1]).double().mean()
    assert abs(float(both) - (1 - rate) ** 2) < 0.01
    # Heads and rows differ.
    assert len({tuple(mask.flatten().tolist()) for mask in masks[0].flatten(0, 1)}) == 8
    torch.testing.assert_close(run("forward", query, *values)[-1], torch.full_like(query, 1 / 64))


def test_dropout_of_a_layer_averages_to_its_absence():
    """The mean over many seeds of a layer's linear part is the result without dropout."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True).double()

    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, data):
            attended = self.layer(data, data, data, need_weights=False)[0]
            return attended.mean(), attended

    data = sequence()
    imported = from_module(Mean(), (data,))
    run = compiled(imported)
    values = [torch.from_dlpack(param) for param in imported.params.values()]
    results = torch.stack(
        [run("loss_adjoint", torch.tensor(seed), data, *values)[0][1][-1] for seed in range(400)]
    )
    layer.eval()
    with torch.no_grad():
        wanted = layer(data, data, data, need_weights=False)[0]
    deviation = results.std(0) / 400**0.5
    assert bool((deviation > 0).all())
    assert float(((results.mean(0) - wanted) / deviation).abs().max()) < 5
