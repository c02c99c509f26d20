"""Networks of graphs, experts, metric learning, reinforcement learning, recommendation, and
fields."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Lossy, Sample, index, normal, sample, unit

NODES, EDGES = 6, 14


def _edges() -> torch.Tensor:
    return torch.cat([index(NODES, 2, EDGES), torch.arange(NODES).repeat(2, 1)], 1)


def gcn() -> Sample:
    """Return two graph convolutions with symmetric normalisation, by index_add, on the labelled
    nodes."""

    def convolve(layer, x, edges):
        source, target = edges
        degree = torch.zeros(NODES, dtype=x.dtype).index_add(
            0, target, torch.ones_like(target, dtype=x.dtype)
        )
        scale = degree.pow(-0.5)
        x = layer(x)
        messages = x[source] * (scale[source] * scale[target]).unsqueeze(1)
        return torch.zeros_like(x).index_add_(0, target, messages)

    def loss(self, x, edges, labelled, y):
        h = F.relu(convolve(self.first, x, edges))
        return F.nll_loss(F.log_softmax(convolve(self.second, h, edges), 1)[labelled], y)

    module = Lossy(loss, first=nn.Linear(4, 8, bias=False), second=nn.Linear(8, 3, bias=False))
    return sample(module, normal(NODES, 4), _edges(), torch.tensor([0, 3, 4]), index(3, 3))


def gat() -> Sample:
    """Return attention over edges, with a softmax by scatter_reduce and scatter_add."""

    def loss(self, x, edges, y):
        source, target = edges
        h = self.layer(x).view(NODES, 2, 3)
        scores = (h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        places = target.unsqueeze(1).expand_as(scores)
        low = torch.full((NODES, 2), -math.inf, dtype=x.dtype)
        high = low.scatter_reduce(0, places, scores.detach(), "amax")
        weights = (scores - high[target]).exp()
        total = torch.zeros(NODES, 2, dtype=x.dtype).scatter_add(0, places, weights)
        messages = h[source] * (weights / total[target]).unsqueeze(-1)
        places = target.view(-1, 1, 1).expand_as(messages)
        out = torch.zeros_like(h).scatter_add(0, places, messages)
        return F.cross_entropy(F.elu(out).mean(1), y)

    parameters = {name: nn.Parameter(torch.randn(2, 3)) for name in ("left", "right")}
    return sample(
        Lossy(loss, layer=nn.Linear(4, 6), **parameters),
        normal(NODES, 4),
        _edges(),
        index(3, NODES),
    )


def graph_sage() -> Sample:
    """Return means and maxima of neighbours, and a readout of each graph."""

    def loss(self, x, edges, graph, y):
        source, target = edges
        places = target.unsqueeze(1).expand(-1, x.shape[1])
        mean = torch.zeros_like(x).scatter_reduce(0, places, x[source], "mean", include_self=False)
        high = torch.zeros_like(x).scatter_reduce(0, places, x[source], "amax", include_self=False)
        h = F.relu(self.layer(torch.cat([x, mean, high], 1)))
        count = F.one_hot(graph, 2).sum(0).clamp(min=1).to(x.dtype)
        pooled = torch.zeros(2, 8, dtype=x.dtype).index_add(0, graph, h) / count.unsqueeze(1)
        return F.multi_margin_loss(self.head(pooled), y)

    module = Lossy(loss, layer=nn.Linear(12, 8), head=nn.Linear(8, 3))
    graph = torch.tensor([0, 0, 0, 1, 1, 1])
    return sample(module, normal(NODES, 4), _edges(), graph, index(3, 2))


def gin() -> Sample:
    """Return an isomorphism network with features of edges and a virtual node."""

    def loss(self, x, edges, features, y):
        source, target = edges
        messages = F.relu(x[source] + self.edge(features))
        summed = torch.zeros_like(x).index_put((target,), messages, accumulate=True)
        h = self.mlp((1 + self.epsilon) * x + summed) + self.virtual(x.sum(0, keepdim=True))
        return F.huber_loss(self.head(h).squeeze(-1), y, delta=0.5)

    mlp = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    modules = {"edge": nn.Embedding(3, 4), "virtual": nn.Linear(4, 8), "head": nn.Linear(8, 1)}
    module = Lossy(loss, mlp=mlp, epsilon=nn.Parameter(torch.zeros(1)), **modules)
    return sample(module, normal(NODES, 4), _edges(), index(3, EDGES + NODES), normal(NODES))


def moe() -> Sample:
    """Return the two best experts of four for each token, with a loss that balances them."""

    def loss(self, x, y):
        logits = self.gate(x)
        weights, chosen = torch.topk(logits, 2, -1)
        weights = weights.softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        picked = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[1]))
        out = (picked * weights.unsqueeze(-1)).sum(1)
        used = F.one_hot(chosen, 4).sum(1).to(x.dtype).mean(0)
        balance = 4 * (used * logits.softmax(-1).mean(0)).sum()
        return (
            F.mse_loss(out, y) + 0.01 * balance + 1e-3 * torch.logsumexp(logits, -1).square().mean()
        )

    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5)) for _ in range(4)
    )
    return sample(
        Lossy(loss, gate=nn.Linear(5, 4, bias=False), experts=experts), normal(7, 5), normal(7, 5)
    )


def switch() -> Sample:
    """Return one expert for each token within a capacity, by positions from a cumulative sum."""

    def loss(self, x, y):
        p = self.gate(x).softmax(-1)
        weight, chosen = p.max(-1)
        hot = F.one_hot(chosen, 3)
        place = (torch.cumsum(hot, 0) * hot).sum(-1) - 1
        kept = (place < 3).to(x.dtype)
        dispatch = hot.to(x.dtype).unsqueeze(-1) * F.one_hot(place.clamp(max=2), 3).to(
            x.dtype
        ).unsqueeze(1)
        dispatch = dispatch * kept[:, None, None]
        inputs = torch.einsum("tec,td->ecd", dispatch, x)
        h = torch.einsum("ecd,edf->ecf", inputs, self.up).relu()
        out = torch.einsum("ecf,efd->ecd", h, self.down)
        out = torch.einsum("tec,ecd->td", dispatch * weight[:, None, None], out)
        return F.mse_loss(x + out, y)

    weights = {"up": nn.Parameter(torch.randn(3, 5, 6)), "down": nn.Parameter(torch.randn(3, 6, 5))}
    return sample(Lossy(loss, gate=nn.Linear(5, 3), **weights), normal(8, 5), normal(8, 5))


def _encoder(out: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out))


def triplet() -> Sample:
    def loss(self, anchor, positive, negative):
        embedded = [self.encoder(image) for image in (anchor, positive, negative)]
        total = F.triplet_margin_loss(*embedded, margin=0.7, swap=True)
        distance = nn.CosineSimilarity(-1)
        return total + F.triplet_margin_with_distance_loss(*embedded, distance_function=distance)

    return sample(Lossy(loss, encoder=_encoder()), normal(5, 4), normal(5, 4), normal(5, 4))


def hard_triplet() -> Sample:
    """Return the hardest positive and negative of each sample, of distances that are zero on the
    diagonal."""

    def loss(self, x, y):
        z = F.normalize(self.encoder(x), dim=1)
        distances = torch.cdist(z, z)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        positive = (distances * same).amax(1)
        negative = (distances + 9.0 * same).amin(1)
        return F.relu(positive - negative + 0.5).mean()

    return sample(Lossy(loss, encoder=_encoder()), normal(6, 4), torch.tensor([0, 1, 2] * 2))


def contrastive() -> Sample:
    def loss(self, first, second, same):
        distance = F.pairwise_distance(self.encoder(first), self.encoder(second))
        pairs = same * distance**2 + (1 - same) * F.relu(1.5 - distance) ** 2
        cosine = F.cosine_embedding_loss(
            self.encoder(first), self.encoder(second), 2 * same - 1, margin=0.1
        )
        return pairs.mean() + cosine

    return sample(Lossy(loss, encoder=_encoder()), normal(5, 4), normal(5, 4), index(2, 5).double())


def arc_face() -> Sample:
    def loss(self, x, y):
        cosine = F.linear(F.normalize(self.encoder(x)), F.normalize(self.weight)).clamp(
            -1 + 1e-7, 1 - 1e-7
        )
        hot = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1.0)
        moved = torch.cos(torch.acos(cosine) + 0.5 * hot)
        return F.cross_entropy(16 * moved, y)

    return sample(
        Lossy(loss, encoder=_encoder(), weight=nn.Parameter(torch.randn(4, 5))),
        normal(5, 4),
        index(4, 5),
    )


def sim_clr() -> Sample:
    def loss(self, first, second):
        z = F.normalize(self.encoder(torch.cat([first, second])), dim=1)
        n = first.shape[0]
        scores = (z @ z.t() / 0.2).fill_diagonal_(-math.inf)
        return F.cross_entropy(scores, (torch.arange(2 * n) + n) % (2 * n))

    return sample(Lossy(loss, encoder=_encoder()), normal(4, 4), normal(4, 4))


class _Byol(nn.Module):
    """A network with a target that follows it, which the forward function updates."""

    def __init__(self):
        super().__init__()
        self.online, self.predictor = _encoder(), nn.Linear(5, 5)
        for i, param in enumerate(self.online.parameters()):
            self.register_buffer(f"average{i}", param.detach().clone())
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, first, second):
        names = [name for name, _ in self.online.named_parameters()]
        averages = [getattr(self, f"average{i}") for i in range(len(names))]
        with torch.no_grad():
            target = torch.func.functional_call(
                self.online, dict(zip(names, averages, strict=True)), (second,)
            )
        predicted = self.predictor(self.online(first))
        if self.training:
            with torch.no_grad():
                self.steps += 1
                for average, param in zip(averages, self.online.parameters(), strict=True):
                    average.lerp_(param, 0.1)
        return 2 - 2 * F.cosine_similarity(predicted, target, dim=-1).mean()


def byol() -> Sample:
    return sample(_Byol(), normal(4, 4), normal(4, 4))


def policy_gradient() -> Sample:
    """Return the loss of an actor and a critic with an entropy bonus."""

    def loss(self, states, actions, returns):
        h = torch.relu(self.body(states))
        policy = torch.distributions.Categorical(logits=self.actor(h), validate_args=False)
        value = self.critic(h).squeeze(-1)
        advantage = (returns - value).detach()
        actor = -(policy.log_prob(actions) * advantage).mean() - 0.01 * policy.entropy().mean()
        return actor + 0.5 * F.smooth_l1_loss(value, returns)

    module = Lossy(loss, body=nn.Linear(4, 8), actor=nn.Linear(8, 3), critic=nn.Linear(8, 1))
    return sample(module, normal(6, 4), index(3, 6), normal(6))


def ppo() -> Sample:
    def loss(self, states, actions, old, advantages):
        policy = torch.distributions.Normal(
            self.mean(states), self.deviation.exp(), validate_args=False
        )
        ratio = (policy.log_prob(actions).sum(-1) - old).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = ratio.clamp(0.8, 1.2)
        return (
            -torch.min(ratio * advantages, clipped * advantages).mean()
            - 0.01 * policy.entropy().sum(-1).mean()
        )

    module = Lossy(loss, mean=_encoder(2), deviation=nn.Parameter(torch.zeros(2)))
    return sample(module, normal(6, 4), normal(6, 2), normal(6) * 0.1 - 3, normal(6))


def dqn() -> Sample:
    """Return double Q-learning with a target network."""

    def loss(self, states, actions, rewards, following, done):
        q = self.net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.net(following).argmax(1, keepdim=True)
            future = self.target(following).gather(1, best).squeeze(1)
            wanted = rewards + 0.9 * (1 - done) * future
        return F.smooth_l1_loss(q, wanted)

    net = _encoder(3)
    target = copy.deepcopy(net).requires_grad_(False)
    done = index(2, 6).double()
    return sample(
        Lossy(loss, net=net, target=target),
        normal(6, 4),
        index(3, 6),
        normal(6),
        normal(6, 4),
        done,
    )


def sac() -> Sample:
    """Return an actor's loss with squashed normal actions, on given noise."""

    def loss(self, states, noise):
        mean, deviation = self.actor(states).chunk(2, -1)
        deviation = deviation.clamp(-5, 2).exp()
        raw = mean + deviation * noise
        action = torch.tanh(raw)
        density = (-0.5 * noise**2 - deviation.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        density = density - (2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)
        values = [critic(torch.cat([states, action], -1)).squeeze(-1) for critic in self.critics]
        return (self.temperature.exp().detach() * density - torch.minimum(*values)).mean()

    critics = nn.ModuleList(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)
    )
    module = Lossy(
        loss, actor=_encoder(4), critics=critics, temperature=nn.Parameter(torch.zeros(()))
    )
    return sample(module, normal(6, 4), normal(6, 2))


def physics() -> Sample:
    """Return a network of an equation, whose derivative is that of the layers written out."""

    def loss(self, t):
        h = torch.tanh(self.first(t))
        u = self.second(h)
        slope = ((1 - h**2) * self.first.weight.t()) @ self.second.weight.t()
        return (slope + self.rate * u).square().mean() + (u[0] - 1).square().sum()

    module = Lossy(
        loss, first=nn.Linear(1, 8), second=nn.Linear(8, 1), rate=nn.Parameter(torch.ones(()))
    )
    return sample(module, unit(6, 1))


def siren() -> Sample:
    def loss(self, x, y):
        return F.mse_loss(self.last(torch.sin(30 * self.second(torch.sin(30 * self.first(x))))), y)

    modules = {"first": nn.Linear(2, 8), "second": nn.Linear(8, 8), "last": nn.Linear(8, 3)}
    for layer in modules.values():
        nn.init.uniform_(layer.weight, -0.02, 0.02)
    return sample(Lossy(loss, **modules), unit(9, 2), unit(9, 3))


def radiance_field() -> Sample:
    """Return a field with encoded positions, and rays with products of transmittance."""

    def loss(self, points, color):
        scaled = points.unsqueeze(-1) * 2.0 ** torch.arange(3, dtype=points.dtype)
        encoded = torch.cat([scaled.sin(), scaled.cos()], -1).flatten(-2)
        out = self.net(encoded)
        density, rgb = F.softplus(out[..., 0]), out[..., 1:].sigmoid()
        alpha = 1 - torch.exp(-density * 0.3)
        through = torch.cumprod(
            torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1
        )[:, :-1]
        return F.mse_loss(((alpha * through).unsqueeze(-1) * rgb).sum(1), color)

    net = nn.Sequential(nn.Linear(18, 8), nn.SELU(), nn.Linear(8, 4))
    return sample(Lossy(loss, net=net), normal(4, 5, 3), unit(4, 3))


def neural_ode() -> Sample:
    """Return the steps of a Runge-Kutta method."""

    def loss(self, x, y):
        for _ in range(2):
            first = self.field(x)
            second = self.field(x + 0.05 * first)
            third = self.field(x + 0.05 * second)
            fourth = self.field(x + 0.1 * third)
            x = x + 0.1 / 6 * (first + 2 * second + 2 * third + fourth)
        return F.mse_loss(x, y)

    return sample(Lossy(loss, field=_encoder(4)), normal(5, 4), normal(5, 4))


def deep_sets() -> Sample:
    def loss(self, x, mask, y):
        h = self.inner(x) * mask.unsqueeze(-1)
        high = h.masked_fill(~mask.unsqueeze(-1), -1e9).max(1).values
        pooled = torch.cat([h.sum(1), high, h.sum(1) / mask.sum(1, keepdim=True)], -1)
        return F.soft_margin_loss(self.outer(pooled).squeeze(-1), y)

    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    module = Lossy(loss, inner=_encoder(6), outer=nn.Linear(18, 1))
    return sample(module, normal(3, 5, 4), mask, torch.tensor([1.0, -1, 1]).double())


def recommendation() -> Sample:
    """Return bags of embeddings, interactions of features, and dense features."""

    def loss(self, dense, tokens, offsets, y):
        parts = [self.dense(dense), self.bag(tokens, offsets), self.bag_of_means(tokens.view(3, 4))]
        parts = torch.stack(parts, 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, -1)
        out = self.head(torch.cat([parts.flatten(1), products[:, rows, columns]], 1))
        return F.binary_cross_entropy_with_logits(
            out.squeeze(1), y, pos_weight=torch.tensor(2.0).double()
        )

    bags = {
        "bag": nn.EmbeddingBag(9, 4, mode="sum"),
        "bag_of_means": nn.EmbeddingBag(9, 4, mode="mean"),
    }
    module = Lossy(loss, dense=nn.Linear(5, 4), head=nn.Linear(15, 1), **bags)
    return sample(module, normal(3, 5), index(9, 12), torch.tensor([0, 3, 8]), index(2, 3).double())


def old_weight_norm() -> Sample:
    """Return layers with weight normalisation in its old form."""
    import warnings

    with warnings.catch_warnings(), torch.no_grad():  # a weight with a history cannot be copied
        warnings.simplefilter("ignore")
        first = nn.utils.weight_norm(nn.Linear(4, 8))
        last = nn.utils.weight_norm(nn.Linear(8, 3), dim=None)
    module = nn.Sequential(first, nn.RReLU(0.2, 0.2), last)
    return sample(module, normal(5, 4), loss=F.cross_entropy, targets=(index(3, 5),))


def distillation() -> Sample:
    """Return a student's loss with a teacher that is not trained, and mixed samples."""

    def loss(self, x, y):
        with torch.inference_mode():
            teacher = self.teacher(x) / 2
        mixed = 0.7 * x + 0.3 * x.flip(0)
        student = self.student(mixed)
        divergence = F.kl_div(
            (student / 2).log_softmax(-1),
            teacher.log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        return (
            4 * divergence
            + 0.7 * F.cross_entropy(student, y)
            + 0.3 * F.cross_entropy(student, y.flip(0))
        )

    return sample(Lossy(loss, teacher=_encoder(3), student=_encoder(3)), normal(5, 4), index(3, 5))


OTHERS = {
    "gcn": gcn,
    "gat": gat,
    "graph_sage": graph_sage,
    "gin": gin,
    "moe": moe,
    "switch": switch,
    "triplet": triplet,
    "hard_triplet": hard_triplet,
    "contrastive": contrastive,
    "arc_face": arc_face,
    "sim_clr": sim_clr,
    "byol": byol,
    "policy_gradient": policy_gradient,
    "ppo": ppo,
    "dqn": dqn,
    "sac": sac,
    "physics": physics,
    "siren": siren,
    "radiance_field": radiance_field,
    "neural_ode": neural_ode,
    "deep_sets": deep_sets,
    "recommendation": recommendation,
    "old_weight_norm": old_weight_norm,
    "distillation": distillation,
}
