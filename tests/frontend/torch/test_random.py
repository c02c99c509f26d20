"""PyTorch modules that draw random numbers: distributions, independence, gradients given the drawn
numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import tvm  # noqa: E402
from sweep import TARGET  # noqa: E402
from torch_models import compiled, tensor_of  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.torch import UnsupportedOperatorError, from_module  # noqa: E402
from relax_grad.frontend.torch._converters import CONVERTERS  # noqa: E402
from relax_grad.frontend.torch._importer import Importer  # noqa: E402

F, nn = torch.nn.functional, torch.nn


class Drawing(nn.Module):
    """A module that returns drawn tensors by name, and in evaluation nothing random."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if self.training else {"x": x * 2}


def drawn(function, x, seeds=(0,)):
    """Return the tensors of a function by name, for each seed."""
    imported = from_module(Drawing(function), (x,))
    run = compiled(imported, forward=False, name="training")
    return [
        dict(zip(imported.outputs, run("training", torch.tensor(seed), x)[0], strict=True))
        for seed in seeds
    ]


def stepper(imported, *inputs):
    """Return a function of the seed that returns the loss, the outputs by name, and the gradients
    by name."""
    run = compiled(imported, forward=False)
    values = [tensor_of(param) for param in imported.params.values()]

    def step(seed):
        (loss, outputs, _), gradients = run("loss_adjoint", torch.tensor(seed), *inputs, *values)
        results = dict(zip(imported.outputs, outputs, strict=True))
        return loss, results, dict(zip(imported.params, gradients, strict=True))

    return step


N = 2**15


def test_operators_have_the_moments_of_pytorch():
    def function(x):
        empty = torch.empty_like
        return {
            "rand": torch.rand(N),
            "rand_like": torch.rand_like(x, dtype=torch.float64),
            "rand_half": torch.rand(N, dtype=torch.float16),
            "randn": torch.randn(x.shape),
            "randn_like": torch.randn_like(x, dtype=torch.bfloat16),
            "randint": torch.randint(7, (N,)),
            "randint_low": torch.randint(-3, 4, (N,), dtype=torch.int32),
            "randint_like": torch.randint_like(x, 5),
            "randint_like_low": torch.randint_like(x, 2, 5),
            "random": empty(x).random_(),
            "random_to": empty(x).random_(9),
            "random_integers": empty(x, dtype=torch.uint8).random_(),
            "random_booleans": empty(x, dtype=torch.bool).random_(),
            "bernoulli": torch.bernoulli(x),
            "bernoulli_p": torch.bernoulli(x, 0.3),
            "bernoulli_in_place": empty(x).bernoulli_(0.3),
            "bernoulli_of_tensor": empty(x).bernoulli_(x),
            "normal_mean": torch.normal(x, 0.5),
            "normal_std": torch.normal(1.0, x),
            "normal_both": torch.normal(x, x),
            "normal_numbers": torch.normal(-1.0, 2.0, (N,)),
            "normal_in_place": empty(x).normal_(1, 2),
            "uniform": empty(x).uniform_(-1, 3),
            "exponential": empty(x).exponential_(2.0),
            "log_normal": empty(x).log_normal_(0.5, 0.25),
            "geometric": empty(x).geometric_(0.25),
            "geometric_integers": torch.empty(N, dtype=torch.int64).geometric_(0.25),
            "cauchy": empty(x).cauchy_(1, 2).clamp(-9, 11),
        }

    x = torch.full((N,), 0.75)
    wanted = function(x)
    (draws,) = drawn(function, x)
    assert list(draws) == list(wanted)
    for name, draw in draws.items():
        other = wanted[name]
        assert (draw.dtype, draw.shape) == (other.dtype, other.shape), name
        draw, other = draw.double(), other.double()
        error = 5 * max(float(other.std()), 1e-9) * math.sqrt(2 / N)
        assert abs(draw.mean() - other.mean()) < error, name
        spread = ((other - other.mean()) ** 2).std()
        assert abs(draw.var() - other.var()) < 6 * float(spread) * math.sqrt(2 / N) + 1e-9, name
        if other.unique().numel() < 20 or name == "random_integers":
            assert torch.equal(draw.unique(), other.unique()), name
    numbers = torch.stack(
        [number.double() for number in draws.values() if number.double().std() > 0]
    )
    correlation = np.corrcoef(numbers.numpy()) - np.eye(len(numbers))
    assert abs(correlation).max() < 5 / math.sqrt(N)


def test_a_permutation():
    first, second = drawn(
        lambda x: {"a": torch.randperm(50), "b": x[torch.randperm(3)]}, torch.eye(3), (0, 1)
    )
    assert first["a"].dtype == torch.int64
    assert sorted(first["a"].tolist()) == sorted(second["a"].tolist()) == list(range(50))
    assert first["a"].tolist() != second["a"].tolist()
    assert (first["b"].sum(0) == 1).all()


KINDS = {
    "a": nn.Dropout(0.25),
    "b": nn.Dropout(0.25),
    "in_place": nn.Dropout(0.25, inplace=True),
    "nothing": nn.Dropout(0.0),
    "everything": nn.Dropout(1.0),
    "1d": nn.Dropout1d(0.25),
    "2d": nn.Dropout2d(0.25),
    "3d": nn.Dropout3d(0.25),
    "alpha": nn.AlphaDropout(0.25),
    "feature_alpha": nn.FeatureAlphaDropout(0.25),
    "alpha_everything": nn.AlphaDropout(1.0),
}

#: Those whose result does not depend on the seed.
FIXED = ("nothing", "everything", "alpha_everything")


class Dropouts(nn.Module):
    """All kinds of dropout, after a product with parameters; the outputs are the results and the
    loss's weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(KINDS)
        self.weight = nn.ParameterDict(
            {name: torch.randn(self.shape(name), dtype=torch.float64) for name in KINDS}
        )

    @staticmethod
    def shape(name):
        rank = {"1d": 1, "2d": 2, "3d": 3, "feature_alpha": 2}.get(name, 0)
        return (40, 50, *[4] * rank) if rank else (40, 50)

    def forward(self, x):
        results = {name: layer(self.weight[name] * x) for name, layer in self.layers.items()}
        return {"loss": sum(result.sum() for result in results.values()), **results}


def test_dropout_of_all_kinds():
    """The gradient of the sum with respect to a weight is the factor of this element."""
    module = Dropouts()
    unit = torch.tensor(1.0).double()
    step = stepper(from_module(module, (unit,)), unit)
    factors = {}
    for seed in (5, 5, 6):
        _, outputs, gradients = step(seed)
        for name, weight in module.weight.items():
            factor = gradients[f"weight.{name}"]
            factors.setdefault(name, []).append(factor)
            if "alpha" not in name:
                torch.testing.assert_close(outputs[name], weight.detach() * factor)
    for name, (unit, again, other) in factors.items():
        assert torch.equal(unit, again)
        if name in FIXED:
            assert (unit == (name == "nothing")).all()
            continue
        assert not torch.equal(unit, other)
        kept = unit != 0
        units = kept.flatten(2)[..., 0] if kept.ndim > 2 else kept
        if kept.ndim > 2:
            assert (kept.flatten(2) == units[..., None]).all()
        assert abs(units.double().mean() - 0.75) < 5 * math.sqrt(0.1875 / units.numel())
        if "alpha" not in name:
            torch.testing.assert_close(unit, kept.double() / 0.75)
    masks = [factors[name][0] != 0 for name in KINDS if name not in FIXED]
    masks = np.stack([values.reshape(40 * 50, -1)[:, 0] for values in masks])
    assert abs(np.corrcoef(masks) - np.eye(len(masks))).max() < 5 / math.sqrt(masks.shape[1])
    for name in ("alpha", "feature_alpha"):
        kept = (factors[name][2] != 0).double()
        scale = 1 / math.sqrt((1.7580993408473766**2 * 0.25 + 1) * 0.75)
        shift = 1.7580993408473766 * scale * 0.25
        lost = -1.7580993408473766 * scale * 0.75
        expected = torch.where(kept > 0, module.weight[name].detach() * scale + shift, lost)
        torch.testing.assert_close(outputs[name], expected)


class Stacked(nn.Module):
    """Recurrent networks whose states are those of the layer before with dropped elements."""

    def __init__(self):
        super().__init__()
        options = {"dropout": 0.25, "nonlinearity": "relu", "batch_first": True}
        self.layers = nn.ModuleList(
            [nn.RNN(4, 64, 3, **options), nn.RNN(4, 32, 3, bidirectional=True, **options)]
        )
        with torch.no_grad():
            for layer in self.layers:
                for mask in layer.parameters():
                    mask.zero_()
                layer.bias_ih_l0.fill_(1.0)
            self.layers[1].bias_ih_l0_reverse.fill_(1.0)
            for name in ("weight_ih_l1", "weight_ih_l2"):
                getattr(self.layers[0], name).copy_(torch.eye(64))
                getattr(self.layers[1], name).copy_(torch.eye(64)[:32])
                getattr(self.layers[1], f"{name}_reverse").copy_(torch.eye(64)[32:])

    def forward(self, x):
        results = [layer(x)[0] for layer in self.layers]
        packed = nn.utils.rnn.pack_padded_sequence(x, [2] * x.shape[0], batch_first=True)
        packed = self.layers[0](packed)[0]
        results.append(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0])
        return {"loss": sum(param.sum() for param in results), "all": torch.stack(results)}


def test_dropout_between_the_layers_of_recurrent_networks():
    """PyTorch's decomposition leaves it out; a result is the product of two factors of dropout."""
    x = torch.randn(20, 2, 4)
    step = stepper(from_module(Stacked(), (x,)), x)
    results = []
    for seed in (1, 1, 2):
        _, outputs, gradients = step(seed)
        result = outputs["all"]
        kept = result != 0
        torch.testing.assert_close(result, kept / 0.75**2)
        assert abs(kept.float().mean() - 0.75**2) < 0.02
        # The sum's gradient has the same masks.
        forwards, directions = result[0] + result[2], result[1]
        bias = gradients["layers.0.bias_ih_l0"], gradients["layers.1.bias_ih_l0"]
        torch.testing.assert_close(bias[0], forwards.sum((0, 1)))
        torch.testing.assert_close(bias[1], directions[..., :32].sum((0, 1)))
        results.append(result)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    pairs = (results[0][0] != 0), (results[0][2] != 0)
    assert abs((pairs[0] & pairs[1]).float().mean() - 0.75**4) < 0.04


class Heads(nn.Module):
    """Multi-head attention, which drops weights and returns them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 1, dropout=0.25, batch_first=True)

    def forward(self, x):
        output, weights = self.layer(x, x, x)
        return {"loss": output.square().sum(), "weights": weights}


def test_attention_with_the_drawn_mask(monkeypatch):
    module, x = Heads(), torch.randn(4, 32, 16)
    loss, outputs, gradients = stepper(from_module(module, (x,)), x)(3)
    mask = outputs["weights"] != 0
    assert abs(mask.float().mean() - 0.75) < 0.03
    monkeypatch.setattr(F, "dropout", lambda weights, p, **_: weights * mask / (1 - p))
    wanted = module(x)
    torch.testing.assert_close(outputs["weights"], wanted["weights"])
    torch.testing.assert_close(loss, wanted["loss"].detach())
    for result, other in zip(
        gradients.values(), torch.autograd.grad(wanted["loss"], module.parameters()), strict=True
    ):
        torch.testing.assert_close(result, other, rtol=1e-3, atol=1e-4)


class Samples(nn.Module):
    """Samples of categories by PyTorch's function, and the slopes of randomised leaky ReLU."""

    def __init__(self):
        super().__init__()
        shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
        self.logits = nn.Parameter(shares.log().expand(4096, 4).clone())
        self.data = nn.Parameter(torch.randn(100, 100))

    def forward(self, factor):
        hard = F.gumbel_softmax(self.logits * factor, tau=0.5, hard=True)
        soft = F.gumbel_softmax(self.logits, tau=0.5)
        slopes = F.rrelu(self.data, 0.1, 0.3, training=True)
        loss = (hard * torch.arange(4)).sum() + soft.square().sum() + slopes.sum()
        return {"loss": loss, "hard": hard, "soft": soft, "slopes": slopes}


@pytest.mark.filterwarnings("ignore:the import has no function forward")
def test_gumbel_softmax_and_rrelu():
    module, factor = Samples(), torch.tensor(1.0)
    _, outputs, gradients = stepper(from_module(module, (factor,)), factor)(3)
    assert ((outputs["hard"] == 0) | (outputs["hard"] == 1)).all()
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert abs(outputs["hard"].mean(0) - shares).max() < 0.04
    torch.testing.assert_close(outputs["soft"].sum(-1), torch.ones(4096))
    assert not torch.equal(outputs["soft"].argmax(-1), outputs["hard"].argmax(-1))
    assert gradients["logits"].isfinite().all()
    # The gradient with respect to logits has no component along their sum.
    assert abs(gradients["logits"].sum(-1)).max() < 1e-5
    assert gradients["logits"].std() > 0.1
    slopes = outputs["slopes"] / module.data.detach()
    torch.testing.assert_close(gradients["data"], slopes)
    negative = slopes[module.data < 0]
    assert abs(negative.mean() - 0.2) < 0.005
    assert 0.1 <= negative.min() < 0.105
    assert 0.295 < negative.max() <= 0.3001
    assert (slopes[module.data > 0] == 1).all()


def test_undecomposed_dropout_is_converted_too():
    """Releases of torch.export differ in the operators that they decompose before the importer sees
    them."""

    def function(x):
        return (
            torch.dropout(x, 0.5, True),
            torch.feature_dropout(x, 0.5, True),
            torch.alpha_dropout(x, 0.5, True),
            torch.feature_alpha_dropout(x, 0.5, True),
            torch.alpha_dropout(x, 1.0, True),
            torch.dropout(x, 0.5, False),
            F.rrelu(-x, training=True),
        )

    data = torch.rand(20, 30, 2, 2) + 1
    exported = torch.export.export(Drawing(function), (data,), strict=False)
    bb = relax.BlockBuilder()
    importer = Importer(bb, {})
    importer.seed = relax.Var("seed", relax.TensorType((), "int64"))
    x = relax.Var("x", relax.TensorType(data.shape, "float32"))
    with bb.function("main", [importer.seed, x]):
        with bb.dataflow():
            for node in exported.graph.nodes:
                if node.op == "placeholder":
                    importer.env[node] = x
                elif node.op == "call_function" and node.target.__name__ in CONVERTERS:
                    gradient = CONVERTERS[node.target.__name__](importer, node)
                    importer.env[node] = bb.normalize(gradient)
                elif node.op == "call_function":
                    importer.env[node] = bb.emit(relax.op.negative(x))
            results = bb.emit_output(relax.Tuple(list(importer._retrieve_args(node.args[0]))))
        bb.emit_func_output(results)
    names = [node.target.__name__ for node in exported.graph.nodes if node.op == "call_function"]
    assert "feature_dropout.default" in names
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    gradient = machine["main"](*map(tvm.runtime.tensor, (np.array(1), data.numpy())))
    plain, feature, alpha, feature_alpha, lost, off, rrelu = (
        torch.from_numpy(converted.numpy()) for converted in gradient
    )
    dropped = plain == 0
    torch.testing.assert_close(plain, torch.where(dropped, 0, data * 2))
    assert abs(dropped.float().mean() - 0.5) < 0.05
    for result in (feature, feature_alpha):
        same = (result == result.flatten()[result.flatten().argmin()]).flatten(2)
        assert (same == same[..., :1]).all()
        assert 0.4 < same.float().mean() < 0.6
    assert abs((alpha == alpha.min()).float().mean() - 0.5) < 0.05
    assert (lost == 0).all()
    assert torch.equal(off, data)
    slopes = -rrelu / data
    assert 0.124 < slopes.min() < 0.13
    assert 0.328 < slopes.max() < 0.334


class Vae(nn.Module):
    """A variational autoencoder that returns its noise, and takes it in the place of drawn
    numbers."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x, noise=None):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean) if noise is None else noise
        latent = mean + noise * torch.exp(0.5 * log_variance)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return {"loss": F.mse_loss(self.decoder(latent), x) + divergence, "noise": noise}


class DropPath(nn.Module):
    """Residual branches that are dropped for whole samples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, noise=None):
        masks = []
        for i, layer in enumerate(self.layers):
            mask = x.new_empty(x.shape[0], 1).bernoulli_(0.7) if noise is None else noise[i]
            x = x + torch.tanh(layer(x)) * mask / 0.7
            masks.append(mask)
        return {"loss": (x**2).sum(), "noise": torch.stack(masks)}


class Gumbel(nn.Module):
    """Hard samples of Gumbel softmax, by the steps of torch.nn.functional.gumbel_softmax."""

    def __init__(self):
        super().__init__()
        self.logits, self.codes = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x, noise=None):
        logits = self.logits(x)
        noise = torch.empty_like(logits).exponential_() if noise is None else noise
        soft = torch.softmax((logits - noise.log()) / 0.7, -1)
        index = soft.max(-1, keepdim=True)[1]
        hard = torch.zeros_like(logits).scatter_(-1, index, 1.0)
        return {"loss": F.mse_loss(self.codes(hard - soft.detach() + soft), x), "noise": noise}


class NormalOfParameters(nn.Module):
    """No gradient passes through the parameters of torch.normal and torch.bernoulli."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, noise=None):
        h = torch.sigmoid(self.layer(x))
        if noise is None:
            noise = torch.normal(h, h) + torch.normal(h) + torch.bernoulli(h)
        return {"loss": (h * noise).sum(), "noise": noise}


@pytest.mark.parametrize("kind", [Vae, DropPath, Gumbel, NormalOfParameters])
def test_gradients_given_the_drawn_numbers(kind):
    module = kind()
    x = torch.randn(16, 6)
    imported = from_module(module, (x,))
    step = stepper(imported, x)
    noises = []
    for seed in (3, 4):
        loss, outputs, gradients = step(seed)
        noise = outputs["noise"]
        wanted = module(x, noise.detach())["loss"]
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-5)
        for mask, other in zip(
            gradients.values(), torch.autograd.grad(wanted, module.parameters()), strict=True
        ):
            torch.testing.assert_close(mask, other, rtol=1e-4, atol=1e-4)
        noises.append(noise)
    assert not torch.equal(*noises)


def test_a_symbolic_batch_draws_a_number_for_each_element():
    batch = torch.export.Dim("batch", min=2)
    x = torch.ones(4, 33)
    imported = from_module(
        Drawing(lambda x: {"a": F.dropout(x, 0.5), "b": torch.randn_like(x)}),
        (x,),
        dynamic_shapes={"x": {0: batch}},
    )
    run = compiled(imported, forward=False, name="training")
    small, large = (run("training", torch.tensor(0), torch.ones(rows, 33))[0] for rows in (3, 500))
    for gradient, other in zip(small, large, strict=True):
        assert torch.equal(gradient, other[:3])
    assert abs(large[0].mean() - 1) < 0.04
    assert abs(large[1].std() - 1) < 0.03


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.multinomial(x, 2), "multinomial.*Gumbel"),
        (lambda x: torch.poisson(x), "poisson.*rejection"),
        (lambda x: torch._standard_gamma(x), "_standard_gamma.*rejection"),
        (lambda x: torch.rand(3, generator=torch.Generator()), "torch.Generator"),
    ],
)
def test_other_draws_are_refused(function, message):
    with pytest.raises(UnsupportedOperatorError, match=message) as error:
        from_module(Drawing(lambda x: {"a": function(x)}), (torch.rand(3, 4),))
    assert "test_random.py" in str(error.value)
