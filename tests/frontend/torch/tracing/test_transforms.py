"""Models that compute with torch.func.vmap, jvp, jacfwd, jacrev and hessian, against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, set_seeds  # noqa: E402

from relax_grad.frontend.torch import UnsupportedOperatorError, from_module, wrap  # noqa: E402

nn, F = torch.nn, torch.nn.functional
func = torch.func
LAYER = nn.Linear(3, 2)


class Next(torch.autograd.Function):
    """A function of whole numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(place):
        return place + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, cotangent):
        return None


def per_sample_gradients(w, x):
    return func.vmap(func.grad(lambda row: ((row * w).tanh() * w.exp()).exp().sum()))(x)


def keyword_and_places(w, x):
    return func.vmap(lambda row, other: row @ other, in_dims=(0, None), out_dims=-1)(x, w)


def nested(w, x):
    return func.vmap(func.vmap(lambda a, b: a * b.sin()))(x, x * w)


def softmax(w, x):
    return func.vmap(lambda row: F.softmax(row * w, 0)[None] * row, out_dims=1, chunk_size=2)(x)


def detached(w, x):
    return func.vmap(lambda row: (row * w).detach() * w.tanh() + (w.data * row).sum() * w)(x)


def without_gradient(w, x):
    with torch.no_grad():
        scales = func.vmap(lambda row: row * w)(x)
    return scales * w


def tangent(w, x):
    value, slope = func.jvp(lambda data: (data * w).sigmoid(), (x,), (x * w,))
    return value * slope


def jacobian(w, x):
    return func.jacfwd(lambda data: (data * w).sin().sum(1))(x)


def reverse(w, x):
    """With several operands, and further results."""
    both = func.jacrev(lambda a, b: (a * b).sin(), argnums=(0, 1))(x[0], w)
    rows, rest = func.jacrev(lambda v: ((x * v).tanh().sum(0), v.cos()), has_aux=True)(w)
    return sum(part.sum(0) for part in both) * rest + rows.sum(0)


def in_chunks(w, x):
    parts = (func.jacrev(lambda v: (x[0] * v).exp(), chunk_size=size)(w) for size in (1, 2))
    return sum(parts) @ x.T


def nested_jacobians(w, x):
    def function(v):
        return (x[0] * v).exp().sum()

    return (
        func.jacrev(func.jacrev(function))(w)
        + func.jacrev(func.jacfwd(function))(w)
        + func.grad(lambda v: func.jacrev(function)(v).pow(2).sum())(w)
    )


def of_parameters(w, x):
    states = {"weight": w.expand(2, 3), "bias": w[:2]}
    jacobian = func.jacrev(lambda s: func.functional_call(LAYER, s, (x,)).tanh().sum(0))(states)
    return sum(part.pow(2).sum() for part in jacobian.values()) * w


def second(w, x):
    return func.hessian(lambda data: (data * w).tanh().sum())(x[0])


def models(w, x):
    states = {"weight": w.expand(4, 2, 3), "bias": w[:2].expand(4, 2)}
    return func.vmap(lambda s, d: func.functional_call(LAYER, s, (d,)), in_dims=(0, None))(
        states, x
    )


def whole_numbers(w, x):
    return func.vmap(lambda row, place: row[Next.apply(place)] * w)(x, torch.tensor([1, 0]))


def of_autograd(w, x):
    return torch.autograd.functional.jacobian(
        lambda data: (data * w).sin().sum(1), x, create_graph=True
    )


FUNCTIONS = (
    *(per_sample_gradients, keyword_and_places, nested, softmax, detached, without_gradient),
    *(tangent, jacobian, second, models, whole_numbers, of_autograd),
    *(reverse, in_chunks, nested_jacobians, of_parameters),
)


class Sum(nn.Module):
    """The sum of functions, each of a weight of its own."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        self.weights = nn.ParameterList(torch.randn(3).double() for _ in functions)

    def forward(self, x):
        results = (f(w, x * x.cos()) for f, w in zip(self.functions, self.weights, strict=True))
        return sum((result * result.detach().cos()).sum() for result in results)


def test_values_and_gradients():
    set_seeds()
    check(Sum(FUNCTIONS), (torch.randn(2, 3).double(),), forward=False)


def test_symbolic_rows():
    """Also of a tensor that the function reads without taking it as an argument."""
    set_seeds()
    functions = reverse, second, in_chunks, per_sample_gradients
    module, data = Sum(functions), torch.randn(3, 3).double()
    wrapped = wrap(module, (data,), dynamic_shapes={"x": {0: "rows"}})
    for rows in (3, 2, 5):
        data = torch.randn(rows, 3).double()
        torch.testing.assert_close(wrapped(data), module(data))
        gradients = (
            torch.autograd.grad(m(data), [*module.parameters()]) for m in (wrapped, module)
        )
        torch.testing.assert_close(*gradients)


class Scaled(torch.autograd.Function):
    """A function that vmap takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(data):
        return data * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 3


def _within_no_grad(w, x):
    with torch.no_grad():
        return w * x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda w, x: func.vmap(lambda row: _within_no_grad(w, row) * w)(x), r"detach\(\) there"),
        (lambda w, x: func.vmap(lambda row: Scaled.apply(row * w))(x), "call it outside"),
        (lambda w, x: func.linearize(lambda data: data * w, x)[0], "use torch.func.jvp"),
    ],
    ids=["no_grad", "Function", "linearize"],
)
def test_refused(function, message):
    with pytest.raises(UnsupportedOperatorError, match=message):
        from_module(Sum([function]), (torch.randn(2, 3).double(),))
