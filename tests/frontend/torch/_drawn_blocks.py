"""Layers of drawn modules: with state, attributes, ties, NaN, views, hooks and custom gradients.

Each takes and returns rows of the same width. A layer has an attribute ``changes``: functions of
the layer that a training loop may call between two calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """A layer of ``width`` columns, whose options come from ``draw``."""

    changes: tuple[Callable, ...] = ()
    #: Values of ``form`` for which the trace fixes the number of rows.
    fixed: tuple[str, ...] = ()
    form = ""

    def __init__(self, draw: random.Random, width: int):
        super().__init__()
        self.width = width
        self.choices: dict[str, object] = {}
        self.prepare(draw)

    def prepare(self, draw: random.Random) -> None:
        """Make the members."""

    def choose(self, draw: random.Random, name: str, *options: object) -> None:
        """Set an attribute to one of the options."""
        self.choices[name] = draw.choice(options)
        setattr(self, name, self.choices[name])

    def buffers_of(self, **shapes: tuple[int, ...] | int) -> None:
        """Register buffers of drawn numbers, or of an integer."""
        for name, shape in shapes.items():
            value = torch.tensor(shape) if isinstance(shape, int) else torch.randn(shape)
            self.register_buffer(name, value)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.choices.items())


class Dense(Layer):
    def prepare(self, draw):
        self.dense = nn.Linear(self.width, self.width, bias=draw.random() < 0.7)
        self.choose(draw, "activation", torch.tanh, F.elu, F.silu, torch.sin)

    def forward(self, x):
        return self.activation(self.dense(x))


class Average(Layer):
    """A moving average, written without gradients."""

    changes = (lambda m: setattr(m, "momentum", 0.5), lambda m: m.mean.zero_())

    def prepare(self, draw):
        self.buffers_of(mean=(self.width,))
        self.choose(draw, "momentum", 0.1, 0.9)
        self.choose(draw, "is_read_first", True, False)
        self.choose(draw, "form", "lerp", "mul", "assign", "copy")

    def forward(self, x):
        before, new = self.mean.clone(), x.detach().mean(0)
        if self.training:
            with torch.no_grad():
                if self.form == "lerp":
                    self.mean.lerp_(new, self.momentum)
                elif self.form == "mul":
                    self.mean.mul_(1 - self.momentum).add_(new, alpha=self.momentum)
                elif self.form == "assign":
                    self.mean = self.mean * (1 - self.momentum) + new * self.momentum
                else:
                    self.mean.copy_(self.mean + (new - self.mean) * self.momentum)
        return x - (before if self.is_read_first else self.mean)


class Counter(Layer):
    """The number of calls, in an integer or a boolean."""

    changes = (lambda m: setattr(m, "warm", 1), lambda m: m.count.fill_(7))

    def prepare(self, draw):
        self.buffers_of(count=draw.choice([0, 1, 3]))
        self.register_buffer("seen", torch.zeros(self.width, dtype=torch.bool))
        self.choose(draw, "warm", 2, 3)
        self.choose(draw, "form", "add", "assign", "where")

    def forward(self, x):
        if self.form == "add":
            self.count += 1
        elif self.form == "assign":
            self.count = self.count + 1
        else:
            self.count.copy_(torch.where(self.count >= 4, 0, self.count + 1))
        self.seen = self.seen | (x > 0.5).any(0)
        count = self.count.clone()  # PyTorch saves it
        y = torch.where(count <= self.warm, x * 0.5, x / (1 + count))
        return torch.where(self.seen, y, -y)


class Swapped(Layer):
    """Buffers assigned crosswise."""

    def prepare(self, draw):
        self.buffers_of(first=(self.width,), second=(self.width,), third=(self.width,))
        self.choose(draw, "form", "swap", "delay", "rotate", "copy")

    def forward(self, x):
        new = x.detach().mean(0).tanh()
        y = x + self.first - 0.5 * self.second
        if self.form == "swap":
            self.first, self.second = self.second, self.first + new
        elif self.form == "delay":
            self.third = self.second
            self.second = self.first
            self.first = new
        elif self.form == "rotate":
            self.first, self.second, self.third = self.third * 0.5 + new, self.first, self.second
        else:
            kept = self.first.clone()
            self.first.copy_(self.second)
            self.second.copy_(self.third + kept)
            self.third.copy_(new)
        return y * self.third.cos()


class Queue(Layer):
    """The last means of batches, written at a place that is a buffer."""

    def prepare(self, draw):
        self.buffers_of(rows=(4, self.width), place=0)
        self.choose(draw, "form", "index", "index_copy", "where", "cat", "roll")

    def forward(self, x):
        row = x.detach().mean(0)
        if self.form == "index":
            self.rows[self.place % 4] = row
        elif self.form == "index_copy":
            self.rows.index_copy_(0, (self.place % 4)[None], row[None])
        elif self.form == "where":
            self.rows = torch.where((torch.arange(4) == self.place % 4)[:, None], row, self.rows)
        elif self.form == "cat":
            self.rows = torch.cat([self.rows[1:], row[None]])
        else:
            self.rows = self.rows.roll(1, 0)
            self.rows[0] = row
        self.place += 1
        weights = (x @ self.rows.T).softmax(-1)
        return x + weights @ self.rows


class _OwnForward(nn.BatchNorm1d):
    """A normalisation with a forward function of its own."""

    slope = 0.1

    def forward(self, x):
        return F.leaky_relu(super().forward(x), self.slope)


class _Corrected(nn.BatchNorm1d):
    def _check_input_dim(self, x):
        return


class Normalized(Layer):
    changes = (
        lambda m: setattr(m.norm, "momentum", 0.3),
        lambda m: setattr(m.norm, "eps", 1e-2),
        lambda m: m.norm.eval(),
    )

    def prepare(self, draw):
        self.choose(draw, "kind", nn.BatchNorm1d, _OwnForward, _Corrected)
        options = {
            "momentum": draw.choice([0.1, None, 0.5]),
            "affine": draw.random() < 0.7,
            "track_running_stats": draw.random() < 0.8,
        }
        self.norm = self.kind(self.width, **options)
        self.choose(draw, "is_twice", False, False, True)

    def forward(self, x):
        y = self.norm(x)
        return self.norm(y * 2 + x) if self.is_twice else y


class RowNormalized(Layer):
    changes = (lambda m: setattr(m.norm, "eps", 0.1),)

    def prepare(self, draw):
        self.norm = draw.choice(
            [nn.LayerNorm(self.width), nn.RMSNorm(self.width), nn.GroupNorm(2, self.width)]
        )

    def forward(self, x):
        return self.norm(x)


class Hidden(Layer):
    """A state that passes from call to call, and is detached."""

    def prepare(self, draw):
        self.cell = draw.choice([nn.GRUCell, nn.RNNCell])(self.width, self.width)
        self.buffers_of(hidden=(self.width,))

    def forward(self, x):
        new = self.cell(x, self.hidden.expand(x.shape[0], -1))
        self.hidden = new.detach().amax(0)
        return new


class Codebook(Layer):
    """Vector quantization: nearest rows, moving averages, a straight-through gradient."""

    changes = (lambda m: setattr(m, "decay", 0.5),)

    def prepare(self, draw):
        self.buffers_of(codes=(3, self.width), sizes=(3,))
        self.sizes.abs_().add_(1)
        self.choose(draw, "decay", 0.9, 0.99)

    def forward(self, x):
        flat = x.detach()
        distances = (flat[:, None] - self.codes).pow(2).sum(-1)
        hot = F.one_hot(distances.argmin(1), 3).to(x.dtype)
        if self.training:
            self.sizes.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
            sums = hot.T @ flat
            self.codes.mul_(self.decay).add_(sums / self.sizes[:, None], alpha=1 - self.decay)
        return x + (hot @ self.codes - x).detach() + x * 0.25


class Observed(Layer):
    """Rounding in a range that is observed."""

    changes = (lambda m: setattr(m, "levels", 3), lambda m: setattr(m, "is_on", False))

    def prepare(self, draw):
        self.buffers_of(low=(), high=())
        self.choose(draw, "levels", 15, 7)
        self.choose(draw, "is_on", True, True, False)

    def forward(self, x):
        if self.training:
            self.low = torch.minimum(self.low, x.detach().amin())
            self.high = torch.maximum(self.high, x.detach().amax())
        if not self.is_on:
            return x
        step = (self.high - self.low) / self.levels
        rounded = ((x.clamp(self.low, self.high) - self.low) / step).round() * step + self.low
        return x + (rounded - x).detach()


class Reparametrized(Layer):
    def prepare(self, draw):
        self.choose(draw, "form", "spectral", "weight", "orthogonal", "own")
        self.dense = nn.Linear(self.width, self.width)
        if self.form == "spectral":
            parametrizations.spectral_norm(self.dense)
        elif self.form == "weight":
            parametrizations.weight_norm(self.dense)
        elif self.form == "orthogonal":
            parametrizations.orthogonal(self.dense, orthogonal_map="matrix_exp")
        else:
            torch.nn.utils.parametrize.register_parametrization(self.dense, "weight", _Symmetric())

    def forward(self, x):
        return self.dense(x)


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Missing(Layer):
    """NaN among the inputs is replaced."""

    changes = (lambda m: setattr(m, "fill", -1.0),)

    def prepare(self, draw):
        self.buffers_of(means=(self.width,))
        self.choose(draw, "form", "where", "nan_to_num", "nanmean", "mask", "equal", "fill")
        self.choose(draw, "fill", 0.0, 0.5)

    def forward(self, x):
        holes = x.isnan()
        if self.form == "where":
            return torch.where(holes, self.means, x)
        if self.form == "nan_to_num":
            return x.nan_to_num(self.fill, 2.0, -2.0)
        if self.form == "nanmean":
            means = x.nanmean(0).nan_to_num()
            self.means = self.means * 0.5 + means.detach() * 0.5
            return torch.where(holes, means, x).clamp(-9, 9)
        if self.form == "mask":
            kept = x.masked_fill(holes, 0)
            return kept - kept.sum(0) / (~holes).sum(0).clamp(min=1)
        if self.form == "equal":
            return torch.where(x == x, x, x.new_full((), self.fill))
        return x.masked_fill(holes | x.isinf(), self.fill)


class Tied(Layer):
    """Extremes and orders, for inputs with ties."""

    def prepare(self, draw):
        self.scale = nn.Parameter(torch.randn(self.width))
        forms = ("amax", "max", "topk", "sort", "median", "maximum", "relu", "clamp", "pool")
        self.choose(draw, "form", *forms, "argmax", "cummax", "min", "equal", "prod")

    def forward(self, x):
        return x * self.scale + self.extreme(x.clamp(-4, 4).mul(2).round() * self.scale.sign() + x)

    def extreme(self, x):
        whole = (x * 2).round() + (x - x.detach())
        form = self.form
        if form in ("amax", "min", "max"):
            return whole.amax(0) if form == "amax" else getattr(whole, form)(1, True).values
        if form == "topk":
            # PyTorch guarantees no order of equal elements.
            return (whole + torch.arange(self.width) / 8).topk(2, 1).values.sum(1, True)
        if form == "sort":
            return whole.sort(dim=1, stable=True).values
        if form == "median":
            return whole.median()
        if form == "maximum":
            return torch.maximum(whole, whole.flip(1)) - torch.minimum(whole, whole * 0)
        if form == "relu":
            return F.relu(whole) + F.relu6(whole) + F.hardtanh(whole) + whole.abs()
        if form == "clamp":
            return whole.clamp(-1, 1) + whole.clamp(min=0) + whole.clamp(max=self.scale)
        if form == "pool":
            return F.max_pool1d(whole[:, None], 3, 1, 1)[:, 0]
        if form == "argmax":
            return whole.gather(1, whole.argmax(1, True)) + whole.argmin(1, True)
        if form == "cummax":
            return whole.cummax(1).values
        if form == "prod":
            return whole.clamp(-1, 1).prod(1, True)
        return (whole == whole.amax(1, True)).to(x.dtype) * x


class _Clipped(torch.autograd.Function):
    """The identity, with a gradient that is clipped."""

    @staticmethod
    def forward(ctx, x, weight, bound):
        ctx.bound = bound
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.clamp(-ctx.bound, ctx.bound) * weight, (gradient * x).sum(0), None


class _Split(torch.autograd.Function):
    """Two results, of which one has no gradient."""

    @staticmethod
    def forward(x, scale):
        return x * scale, x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, gradient, _):
        return None if gradient is None else gradient * ctx.scale, None


class Custom(Layer):
    changes = (lambda m: setattr(m, "bound", 0.5),)

    def prepare(self, draw):
        self.weight = nn.Parameter(torch.randn(self.width))
        self.choose(draw, "bound", 0.01, 0.1)
        self.choose(draw, "form", "clipped", "split", "both")

    def forward(self, x):
        if self.form != "split":
            x = _Clipped.apply(x, self.weight, self.bound)
        if self.form != "clipped":
            first, second = _Split.apply(x, 1.5)
            x = first * self.weight + second
        return x


class Written(Layer):
    """Writes to views of a copy."""

    fixed = ("rows",)
    changes = (lambda m: setattr(m, "factor", 3.0),)

    def prepare(self, draw):
        self.weight = nn.Parameter(torch.randn(self.width))
        self.choose(draw, "factor", 2.0, -1.0)
        self.choose(draw, "form", "columns", "rows", "index", "chunks", "transposed", "mask")

    def forward(self, x):
        y = x.clone()
        if self.form == "columns":
            y[:, ::2].mul_(self.factor)
            y[:, 1:] += y[:, :-1].clone() * self.weight[1:]
        elif self.form == "rows":
            y[1:] -= y[:-1].clone()
            y[:1].add_(self.weight)
        elif self.form == "index":
            y[:, [0, 2]] = self.weight[:2] * self.factor
            y[-1] = y[0] * 2
        elif self.form == "chunks":
            middle = y.shape[1] // 2
            first, second = y[:, :middle], y.narrow(1, middle, y.shape[1] - middle)
            first.mul_(self.factor)
            second.add_(first)
        elif self.form == "transposed":
            y.t()[0].mul_(self.weight[0])
            y.t().select(0, 1).sigmoid_()
        else:
            y[y > 0.5] = self.factor
            y.masked_fill_(y.detach() < -1, self.factor)
        return y * self.weight


class Hooked(Layer):
    changes = (lambda m: setattr(m, "shift", -0.5),)

    def prepare(self, draw):
        self.dense = nn.Linear(self.width, self.width)
        self.choose(draw, "shift", 0.25, 1.0)
        self.dense.register_forward_hook(lambda module, args, output: output * 0.5 + args[0])
        if draw.random() < 0.5:
            self.dense.register_forward_pre_hook(lambda module, args: (args[0].cos(),))

    def forward(self, x):
        return self.dense(x) + self.shift


class Shared(Layer):
    """A weight with three names, one of them transposed in use."""

    def prepare(self, draw):
        self.first = nn.Linear(self.width, self.width)
        self.second = nn.Linear(self.width, self.width, bias=False)
        self.second.weight = self.first.weight
        self.weight = self.first.weight

    def forward(self, x):
        return F.linear(self.second(self.first(x).tanh()), self.weight.T)


class Recomputed(Layer):
    changes = (lambda m: setattr(m.drop, "p", 1.0),)

    def prepare(self, draw):
        self.dense = nn.Linear(self.width, self.width)
        self.drop = nn.Dropout(draw.choice([0.0, 0.0, 1.0]))

    def forward(self, x):
        return x + checkpoint(lambda y: self.drop(self.dense(y).tanh()), x, use_reentrant=False)


class Rows(Layer):
    """Attention, sums and deviations across the rows of a batch."""

    def prepare(self, draw):
        self.choose(draw, "form", "attention", "std", "cumsum", "softmax", "norm", "gram", "var")
        self.weight = nn.Parameter(torch.randn(self.width))

    def forward(self, x):
        if self.form == "attention":
            return F.scaled_dot_product_attention(x[None], (x * self.weight)[None], x[None])[0]
        if self.form == "std":
            return x * self.weight / (1 + x.std(0, correction=0))
        if self.form == "var":
            return x * self.weight + x.var(0).nan_to_num(1.0)
        if self.form == "cumsum":
            return (x * self.weight).cumsum(0) / (torch.arange(x.shape[0])[:, None] + 1)
        if self.form == "softmax":
            return x * (x * self.weight).softmax(0) * x.shape[0]
        if self.form == "norm":
            return F.normalize(x * self.weight, dim=0)
        return torch.tanh(x @ (x.T @ (x * self.weight))) / x.shape[0]


class Configured(Layer):
    """Attributes of several types."""

    changes = (
        lambda m: setattr(m, "slope", 0.5),
        lambda m: setattr(m, "is_squared", not m.is_squared),
        lambda m: m.factors.__setitem__(1, 0.25),
        lambda m: m.table.__setitem__("shift", -1.0),
        lambda m: setattr(m, "activation", torch.cos),
        lambda m: m.mask.mul_(0.5),
        lambda m: setattr(m, "extra", 1.5),
    )

    def prepare(self, draw):
        self.choose(draw, "slope", 0.1, 0.0)
        self.choose(draw, "is_squared", True, False)
        self.factors, self.table = [1.0, 2.0], {"shift": 0.5}
        self.activation, self.mask = torch.tanh, torch.ones(self.width)

    def forward(self, x):
        y = F.leaky_relu(x, self.slope) * self.factors[1] + self.table["shift"]
        y = self.activation(y) * self.mask.to(x.dtype)
        y = y * self.extra if hasattr(self, "extra") else y
        return y**2 if self.is_squared else y


class Looked(Layer):
    """Rows of tables at places that depend on the data."""

    def prepare(self, draw):
        self.choose(draw, "padding", None, 0)
        self.table = nn.Embedding(5, self.width, padding_idx=self.padding)
        self.bags = nn.EmbeddingBag(5, self.width, mode=draw.choice(["sum", "mean"]))

    def forward(self, x):
        places = (x.detach().nan_to_num() * 2).long().clamp(-2, 2) + 2
        return x + self.table(places[:, 0]) + self.bags(places)


class Moded(Layer):
    """Other computations in evaluation; random numbers that have no effect."""

    def prepare(self, draw):
        self.buffers_of(most=())
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        if self.training:
            self.most = torch.maximum(self.most * 0.9, x.detach().abs().max())
            return self.drop(x / (self.most + 1))
        return x * self.most.clamp(0.5, 2)


class Differentiated(Layer):
    """Gradients and Jacobians within the module."""

    fixed = ("jvp",)

    def prepare(self, draw):
        self.weight = nn.Parameter(torch.randn(self.width))
        self.choose(draw, "form", "grad", "func", "vjp", "jvp", "vmap", "jacrev")

    def forward(self, x):
        def function(y):
            return (y * self.weight).sin().sum()

        if self.form == "grad":
            y = x * self.weight.cos()
            with torch.enable_grad():
                y = y.clone().requires_grad_() if not y.requires_grad else y
                (slope,) = torch.autograd.grad(function(y), y, create_graph=True)
            return slope
        if self.form == "func":
            return torch.func.grad(function)(x)
        if self.form == "vjp":
            value, pull = torch.func.vjp(lambda y: (y * self.weight).tanh(), x)
            return value + pull(value)[0]
        if self.form == "jvp":
            return torch.func.jvp(lambda y: (y * self.weight).tanh(), (x,), (x.cos(),))[1]
        if self.form == "vmap":
            return torch.func.vmap(torch.func.grad(function))(x)
        return torch.func.jacrev(lambda w: (x * w).tanh().sum(0))(self.weight).sum(0) * x


#: The layers, in the order of definition.
KINDS: tuple[type[Layer], ...] = tuple(Layer.__subclasses__())
