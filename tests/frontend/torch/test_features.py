"""The rows of the guide's table "Exact and refused features", each by modules that train for three
steps beside PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, compiled, set_seeds, tensor_of  # noqa: E402
from torch_zoo.parts import Lossy, normal  # noqa: E402

from relax_grad.frontend.torch import from_module, wrap  # noqa: E402
from relax_grad.training import AdamW, Trainer, train_step  # noqa: E402

F, nn, distributions = torch.nn.functional, torch.nn, torch.distributions
attention = F.scaled_dot_product_attention
checkpoint = torch.utils.checkpoint.checkpoint
parametrizations = nn.utils.parametrizations


@pytest.fixture(autouse=True)
def _seeded():
    set_seeds()


def paddings():
    """Rows of padding of two embeddings of one weight, the second counted from the end."""

    def loss(self, tokens):
        other = F.embedding(tokens, self.table.weight, padding_idx=-2)
        return (self.table(tokens) ** 2).sum() + other.sin().sum()

    return Lossy(loss, table=nn.Embedding(5, 3, padding_idx=1)), torch.tensor(
        [[1, 2, 3], [0, 1, 4]]
    )


def codebook():
    """Vector quantisation, whose codes are moving averages, with a straight-through estimator."""

    def loss(self, x):
        data = self.encoder(x)
        places = torch.cdist(data, self.codes).argmin(1)
        code = self.codes[places]
        with torch.no_grad():
            hits = F.one_hot(places, 5).to(data)
            self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hits.t() @ data, alpha=0.1)
            self.codes.copy_(self.sums / (self.counts + 1e-5)[:, None])
        commitment = F.mse_loss(data, code.detach())
        return commitment + F.mse_loss(self.decoder(data + (code - data).detach()), x)

    tensors = {"codes": normal(5, 3), "counts": torch.ones(5), "sums": normal(5, 3)}
    module = Lossy(loss, encoder=nn.Linear(4, 3), decoder=nn.Linear(3, 4), **tensors)
    return module, normal(6, 4)


def target_network():
    """A second network that follows the first one, and a counter that is read."""

    def loss(self, x):
        self.steps += 1
        with torch.no_grad():
            self.weight.lerp_(self.layer.weight, 0.1)
            wanted = F.linear(x, self.weight)
        return F.mse_loss(self.layer(x), wanted + 1) / self.steps + self.layer.bias.sum() * (
            self.steps % 2
        )

    tensors = {"weight": torch.zeros(4, 4), "steps": torch.zeros((), dtype=torch.int64)}
    return Lossy(loss, layer=nn.Linear(4, 4), **tensors), normal(3, 4)


def normalisations():
    """Statistics that are averaged, that stay, and those of instance normalisation."""

    def loss(self, x):
        hidden = self.averaged(x).sin() + self.fixed(x).cos() + self.instances(x)
        return (hidden + self.frozen(x).tanh()).pow(2).sum()

    module = Lossy(
        loss,
        averaged=nn.BatchNorm1d(3, momentum=None),
        fixed=nn.BatchNorm1d(3).eval(),
        frozen=nn.BatchNorm1d(3).requires_grad_(False),
        instances=nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    )
    return module, normal(4, 3, 5)


def parametrised():
    """Weight and spectral normalisation, and orthogonal weights by each of PyTorch's maps."""
    layers = [
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    ]
    layers += [
        parametrizations.orthogonal(nn.Linear(4, width).double(), orthogonal_map=name)
        for name, width in (("matrix_exp", 4), ("cayley", 4), ("householder", 3))
    ]
    module = Lossy(
        lambda self, x: self.layers(x).tanh().pow(2).sum(), layers=nn.Sequential(*layers)
    )
    return module, normal(3, 4)


def recurrent():
    """Networks of two layers and both directions, with projections, without biases, without a
    batch."""

    def loss(self, x):
        a, (h, c) = self.lstm(x)
        b, g = self.gru(x)
        r, k = self.rnn(x[:, 0], self.state)
        parts = (a.pow(2), b.sin(), r, h, c.pow(2), g, k.pow(2))
        return sum(part.sum() for part in parts)

    options = {"num_layers": 2, "bidirectional": True}
    module = Lossy(
        loss,
        lstm=nn.LSTM(3, 4, proj_size=2, **options),
        gru=nn.GRU(3, 2, batch_first=True, **options),
        rnn=nn.RNN(3, 2, bias=False),
        state=nn.Parameter(torch.randn(1, 2)),
    )
    return module, normal(3, 2, 3)


def attentions():
    """Masks of every kind, groups of heads, a scale, and more queries than keys."""

    def loss(self, query, key, value):
        query = query * self.factor
        keys, values = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
        parts = (
            attention(query, key, value, enable_gqa=True),
            attention(query, keys, values, is_causal=True),
            attention(query, keys, values, attn_mask=self.bias, scale=0.2),
            attention(query, key, value, attn_mask=self.mask, enable_gqa=True),
            attention(query, keys, values, attn_mask=self.mask[:, :1]),
            attention(keys[0], query[0], query[0], is_causal=True),
        )
        return sum(part.sin().sum() for part in parts)

    module = Lossy(
        loss,
        factor=nn.Parameter(normal(8)),
        bias=nn.Parameter(normal(4, 5, 7)),
        mask=torch.rand(2, 4, 5, 7) > 0.4,
    )
    return module, normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 6)


def heads():
    """Multi-head attention with both masks, further keys, and averaged weights."""

    def loss(self, x):
        masks = {"key_padding_mask": self.padding, "attn_mask": self.future}
        output, weights = self.layer(x, x, x, **masks)
        other, _ = self.layer(x, x, x, key_padding_mask=self.padding, need_weights=False)
        return output.pow(2).sum() + weights.sin().sum() + other.sum()

    module = Lossy(
        loss,
        layer=nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        padding=torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]]).bool(),
        future=torch.ones(4, 4).triu(1).bool(),
    )
    return module, normal(2, 4, 8)


def checked():
    """Losses and distributions that check values in PyTorch."""

    def loss(self, x, labels):
        mean, scale = self.first(x).chunk(2, -1)
        scale = F.softplus(scale)
        normal_of = distributions.Normal(mean, scale, validate_args=True)
        other = distributions.Independent(self.prior, 1)
        prior = distributions.kl_divergence(distributions.Independent(normal_of, 1), other)
        losses = F.gaussian_nll_loss(mean, x[:, :3], scale, full=True, reduction="none")
        second = distributions.MultivariateNormal(mean, torch.diag_embed(scale))
        kinds = distributions.Categorical(logits=mean)
        likelihood = second.log_prob(x[:, :3]) + normal_of.log_prob(x[:, 1:]).sum(-1)
        picked = kinds.log_prob(labels % 3) + kinds.entropy()
        clusters, single = self.clusters(mean, labels), self.clusters(mean[0], labels[0])
        total = clusters.output @ x[:, 0] + clusters.loss + single.loss + single.output
        return (prior - likelihood - picked).sum() + losses.sum() + total

    module = Lossy(
        loss,
        first=nn.Linear(4, 6),
        clusters=nn.AdaptiveLogSoftmaxWithLoss(3, 9, [2, 6], div_value=1.5),
    ).double()
    module.prior = distributions.Normal(torch.zeros(3).double(), torch.ones(3).double())
    return module, normal(5, 4), torch.tensor([0, 8, 1, 4, 6])


@pytest.mark.parametrize(
    "make",
    [
        *(paddings, codebook, target_network, normalisations, parametrised),
        *(recurrent, attentions, heads, checked),
    ],
)
def test_three_steps(make):
    module, *args = make()
    check(module.double(), args, steps=3, forward=False)


class Mixed(nn.Module):
    """Regions of two dtypes, and one in which autocast is off."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            y = F.layer_norm(self.first(x).float(), (8,))
            with torch.autocast("cpu", enabled=False):
                y = y + self.second(x)
            z = self.first(y) @ y.t()
        return z.float().pow(2).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    check(Mixed(dtype), (torch.randn(4, 8),), steps=3, forward=False, tolerance=3e-2)


def test_statistics_of_a_checkpointed_section_are_updated_once():
    """PyTorch updates them again when it recomputes the section."""
    norm = nn.BatchNorm1d(3)
    module = Lossy(
        lambda self, x: checkpoint(self.norm, x * self.scale, use_reentrant=False).sin().sum(),
        norm=norm,
        scale=nn.Parameter(torch.randn(3)),
    ).double()
    x = normal(4, 3)
    imported = from_module(module, (x,))
    values = [tensor_of(value) for value in imported.values]
    (_, _, states), _ = compiled(imported, forward=False)(
        "loss_adjoint", torch.tensor(0), x, *values
    )
    norm(x * module.scale)  # once
    for state, wanted in zip(states, norm.buffers(), strict=True):
        torch.testing.assert_close(state, wanted)


class Labels(nn.Module):
    """Connectionist temporal classification of logits, with targets of every form."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(4, 3, 5, dtype=dtype))

    def forward(self, targets, sizes, counts):
        logits = self.logits.log_softmax(-1)
        joined = torch.cat([targets[0], targets[1, :1], targets[2, :2]])
        empty = torch.tensor([3, 0, 3])
        losses = [
            F.ctc_loss(logits, targets, sizes, counts, reduction="sum"),
            F.ctc_loss(
                self.logits, targets, (4, 3, 3), (3, 1, 2)
            ),  # no logarithms of probabilities
            F.ctc_loss(logits, joined, sizes, counts),
            F.ctc_loss(logits, targets, sizes, empty, zero_infinity=True),
            F.ctc_loss(logits[:, 0], targets[0] - 1, sizes[0], counts[0], blank=4),
        ]
        return torch.stack(losses).sum(), *losses


def test_connectionist_temporal_classification():
    """The third sequence is too short for its labels where zero_infinity is given."""
    targets = torch.tensor([[1, 2, 2], [3, 1, 1], [4, 4, 4]])
    args = (targets, torch.tensor([4, 3, 3]), torch.tensor([3, 1, 2]))
    check(Labels(), args, forward=False, steps=2)


@pytest.mark.parametrize(("kind", "length"), [(torch.bfloat16, 260), (torch.float16, 20)], ids=str)
def test_attention_in_half_precision_is_an_operator(kind, length):
    """Its kernels have no matrix of weights, and round their results once."""

    def loss(self, x, mask):
        q, k, v = self.layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return sum(
            (attention(q, k[:, :heads], v[:, :heads], **options).float() ** 2).mean()
            for heads, options in (
                (2, {"is_causal": True}),
                (2, {"attn_mask": mask}),
                (1, {"enable_gqa": True, "scale": 0.2}),
            )
        )

    module = Lossy(loss, layer=nn.Linear(6, 48)).to(kind)
    mask = torch.ones(length, length, dtype=torch.bool).tril(3)
    imported = check(module, (normal(2, length, 6).to(kind), mask), steps=2, tolerance=2e-2)
    text = imported.module["loss"].script()
    assert text.count("R.nn.attention") == 3


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_attention_of_other_axes_is_an_operator(is_symbolic):
    """With three or five axes, a batch by broadcast, and masks of one key."""

    def loss(self, x, mask):
        q, k, v = self.layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        pairs = mask[:, None].expand(-1, mask.shape[1], -1)
        deep = [part[:, None].expand(-1, 3, -1, -1, -1) for part in (q, k, v)]
        results = [
            attention(*(part[:, 0] for part in (q, k, v)), is_causal=True),
            attention(*(part[:, 0] for part in (q, k, v)), attn_mask=pairs),
            attention(*deep, scale=0.3),
            attention(*deep, attn_mask=mask[:, None, None, None] * 0.5),
            attention(*deep, attn_mask=mask[0].sigmoid()),
            attention(q, k[:1], v[:1], attn_mask=mask[:, None, None]),
            attention(q, k, v, attn_mask=mask[:, None, :, None] > 0),
        ]
        return sum((result**2).mean() for result in results)

    module = Lossy(loss, layer=nn.Linear(6, 48))
    axes = {"dynamic_shapes": ([{1: "steps"}] * 2,)} if is_symbolic else {}
    imported = check(
        module, (normal(2, 37, 6).float(), normal(2, 37).float()), forward=False, **axes
    )
    text = imported.module["loss"].script()
    assert text.count("R.nn.attention") == 7
    assert "R.nn.softmax" not in text


class Attentions(nn.Module):
    """Attentions of four axes and one of three."""

    def forward(self, query, key, value, mask):
        return (
            attention(query, key, value),
            attention(query, key[:, :1], value[:, :1], is_causal=True, enable_gqa=True, scale=0.3),
            attention(query, key, value, attn_mask=mask),
            attention(query[0], key[0], value[0]),
        )


@pytest.mark.parametrize(
    "kind", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_attention_in_half_precision_is_no_less_accurate_than_pytorch(kind):
    """Results and gradients against float64 of the same numbers."""
    shapes = [(2, 3, 48, 24)] * 3
    tensors = [(2 * normal(*shape)).to(kind) for shape in shapes]
    mask = torch.rand(48, 48) < 0.7
    module = Attentions()
    wrapped = wrap(module, [*(x.clone().requires_grad_() for x in tensors), mask])
    grads = [normal(*result.shape).to(kind) for result in module(*tensors, mask)]

    def results(run, kind):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        attended = run(*leaves, mask)
        return [
            (result.detach(), *torch.autograd.grad(result, leaves, grad.to(kind), True))
            for result, grad in zip(attended, grads, strict=True)
        ]

    rounding = torch.finfo(kind).eps / 2
    runs = results(module, torch.float64), results(module, kind), results(wrapped, kind)
    for number, parts in enumerate(zip(*runs, strict=True)):
        for wanted, theirs, ours in zip(*parts, strict=True):
            other, error = (
                float((x.double() - wanted).abs().max() / wanted.abs().max())
                for x in (theirs, ours)
            )
            # The operator rounds once; on processors that multiply pairs of bfloat16, the weights
            # are rounded too, as in PyTorch.
            rounds_weights = kind == torch.bfloat16
            limit = max(2 * rounding, 1.2 * other) if rounds_weights else 1.2 * rounding
            assert error <= limit, (number, error, other)


@pytest.mark.parametrize("length", [20, 260])
def test_attention_with_dropout_in_half_precision_is_an_operator(length):
    def loss(self, x):
        q, k, v = self.layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, dropout_p=0.25).float().mean()

    module = Lossy(loss, layer=nn.Linear(6, 48)).to(torch.bfloat16)
    imported = from_module(module, (normal(2, length, 6).to(torch.bfloat16),))
    text = imported.module["loss"].script()
    assert "R.grad.attention_dropout" in text


class Scaled(nn.Module):
    """A loss under autocast of float16, of a convolution, attention and a recurrent network whose
    dtypes differ."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(7, 8, 3, padding=1)
        self.query = nn.Linear(8, 16, bias=False)  # a bias of keys has no gradient
        self.net = nn.GRU(8, 9, batch_first=True)
        self.head = nn.Linear(9, 5)

    def forward(self, x, y):
        with torch.autocast("cpu", torch.float16):
            x = self.conv(x.transpose(1, 2)).relu().transpose(1, 2)
            query, key = self.query(x).chunk(2, -1)
            x = x + attention(query, key, x, is_causal=True)
            return F.cross_entropy(self.head(self.net(x)[0][:, -1]), y)


def test_steps_with_scaled_losses_are_those_of_pytorch(tmp_path):
    """Under autocast of float16, with a dynamic scale, clipped gradients, batches of other sizes,
    infinities, and a resumed trainer."""
    module, scaler = Scaled(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    batches = [(torch.randn(size, 6, 7), torch.arange(size)) for size in (4, 3, 1, 5, 2, 4, 1, 3)]
    batches[2][0][0, 0, 0], batches[5][0][0, 3, 1] = torch.inf, torch.nan
    axes = {"x": {0: "batch"}, "y": {0: "batch"}}
    imported = from_module(module, batches[0], dynamic_shapes=axes)
    step = train_step(imported, AdamW(0.01), loss_scale="dynamic", clip_norm=0.3)
    trainer = Trainer(step, on_nan="skip")
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        wanted, scale = module(x, y), scaler.get_scale()
        scaler.scale(wanted).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        result = trainer.step(x.numpy(), y.numpy())
        assert result.metrics["loss_scale"] == scale
        assert result.metrics["applied"] == float(norm.isfinite())
        assert float(result.loss) == pytest.approx(wanted.item(), rel=2e-3, nan_ok=True)
        if number == 3:  # after skipped updates
            trainer.save(tmp_path / "trainer")
            trainer = Trainer(step, on_nan="skip")
            trainer.load(tmp_path / "trainer")
    assert trainer.skipped >= 2
    assert float(trainer.optimizer_state["loss_scale"].numpy()) == scaler.get_scale()
    for key, param in module.named_parameters():
        value = trainer.params[key].numpy()
        assert value.dtype == "float32"
        torch.testing.assert_close(torch.from_numpy(value), param.detach(), rtol=0, atol=4e-3)
