"""Models that compute gradients themselves, against PyTorch: penalties, energies, inner loops,
torch.func."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, set_seeds  # noqa: E402

from relax_grad.frontend.torch import UnsupportedOperatorError, from_module  # noqa: E402

nn, F = torch.nn, torch.nn.functional
grad = torch.autograd.grad


@pytest.fixture(autouse=True)
def _seeded():
    set_seeds()


class Of(nn.Module):
    """A loss that is a function of the module and an input."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.function = function

    def energy(self, x):
        return self.scale * torch.tanh(self.norm(self.dense(x)))

    def forward(self, x):
        return self.function(self, x)


def run(function, **options):
    return check(Of(function).double(), (torch.randn(3, 4).double(),), forward=False, **options)


def penalty(m, x):
    x = x.detach().requires_grad_(True)
    energy = m.energy(x).sum()
    (gradient,) = grad(energy, x, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean() + energy


def without_graph(m, x):
    x = x.requires_grad_(True)
    (gradient,) = grad(m.energy(x).sum(), x)
    return (gradient * m.energy(x)).sum()


def inner_step(m, x):
    params, y = list(m.dense.parameters()), m.energy(x)
    gradients = grad(y, params, torch.full_like(y, 2.0), create_graph=True)
    faster = [param - 0.1 * gradient for param, gradient in zip(params, gradients, strict=True)]
    return F.linear(x, *faster).square().sum()


def second_derivative(m, x):
    first, other, none = grad(
        m.dense(x).tanh().sum(),
        [m.dense.weight, m.dense.bias, m.scale],
        create_graph=True,
        allow_unused=True,
    )
    assert none is None
    (second,) = grad(first.square().sum(), [m.dense.bias], create_graph=True)
    return (second * other).sum()


def without_gradients(m, x):
    with torch.no_grad():
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            energy = m.energy(z).sum()
        z = z - 0.1 * grad(energy, z)[0]
    return m.energy(z).square().sum()


def of_a_view(m, x):
    y = m.dense(x)
    z = y.view_as(y)
    return grad((z * y).sum(), [z], create_graph=True)[0].square().sum()


def functional(m, x):
    first = torch.func.grad(lambda a: (m.dense(a).tanh() * a).sum() * x.sum())(x)
    second, (value, number) = torch.func.grad_and_value(
        lambda a, b: ((m.dense(a) * b).square().sum(), 3 * a), argnums=1, has_aux=True
    )(x, m.scale)
    y, pull = torch.func.vjp(lambda a: m.dense(a).tanh() * m.scale, x)
    return ((first * pull(y)[0]).sum() * second.sum() * number).sum() + value


class Recomputed(torch.autograd.Function):
    """A checkpoint of one's own: its backward function differentiates."""

    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.function = function
        ctx.save_for_backward(x, *params)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *params = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, *grad(y, (x, *params), 2 * gradient)


def within_a_function(m, x):
    function = lambda a: m.dense(a).tanh()  # noqa: E731
    return Recomputed.apply(function, m.scale * x, *m.dense.parameters()).square().sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def of_a_function(m, x):
    z = x.detach().requires_grad_()
    energy = Doubled.apply(m.dense(z)).sum()
    return grad(energy, z, create_graph=True)[0].sum() * energy


@pytest.mark.parametrize(
    "function",
    [
        *(penalty, without_graph, inner_step, second_derivative, without_gradients, of_a_view),
        *(functional, within_a_function, of_a_function),
    ],
    ids=lambda function: function.__name__,
)
def test_gradients_within_the_model(function):
    run(function)


def test_a_symbolic_batch():
    check(
        Of(penalty).double(),
        (torch.randn(3, 4).double(),),
        forward=False,
        dynamic_shapes={"x": {0: "batch"}},
    )


def unused_second(m, x):
    (first,) = grad(m.dense(x).tanh().sum(), [m.dense.weight], create_graph=True)
    return grad(first.sum(), [m.dense.bias, m.scale], allow_unused=True)[0].sum()


class Outside(Recomputed):
    @staticmethod
    def backward(ctx, gradient):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.function(x)
        return None, None, *grad(y, params, gradient)


def outside(m, x):
    return Outside.apply(m.dense, m.dense(x), *m.dense.parameters()).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unused_second, "allow_unused is imported for first derivatives only"),
        (outside, "gradient.default: the differentiated tensor depends on others"),
        (lambda m, x: torch.func.functionalize(m.dense)(x).sum(), "call the function"),
        (
            lambda m, x: grad(m.dense(x), [m.scale], torch.ones(2, 3, 4), is_grads_batched=True),
            "is_grads_batched is not imported",
        ),
    ],
    ids=["unused", "outside", "functionalize", "batched"],
)
def test_gradients_that_are_refused_name_the_line(function, message):
    with pytest.raises(UnsupportedOperatorError, match=message) as caught:
        from_module(Of(function), (torch.randn(3, 4),))
    assert "test_gradients.py:" in str(caught.value)
