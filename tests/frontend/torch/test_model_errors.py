"""Modules that cannot be imported exactly: errors that name their lines."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

F, nn = torch.nn.functional, torch.nn
checkpoint = torch.utils.checkpoint.checkpoint

from torch_models import Of, perceptron  # noqa: E402

from relax_grad.frontend.torch import (  # noqa: E402
    UnsupportedOperatorError,
    from_module,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


OUTSIDE = nn.Parameter(torch.ones(4))


def hooked(m, x):
    y = m.dense(x)
    y.register_hook(lambda g: 2 * g)
    return y.sum()


def hooked_node(m, x):
    y = m.dense(x)
    y.grad_fn.register_prehook(lambda gradients: tuple(2 * grad for grad in gradients))
    return y.sum()


def packed(m, x):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.half(), lambda tensor: tensor
    ):
        return m.dense(x).exp().sum()


def unfrozen(m, x):
    m.dense.requires_grad_(False)
    y = m.dense(x)
    m.dense.requires_grad_(True)
    return (y * m.dense(x)).sum()


def written_detached(m, x):
    y = m.dense(x)
    y.detach().add_(1)
    return (y * y).sum()


def written_without_gradient(m, x):
    y = m.dense(x)
    with torch.no_grad():
        y[0].clamp_(0, 1)
    return (y * y).sum()


def written_parameter(m, x):
    with torch.no_grad():
        m.scale.clamp_(0, 1)
    return (m.scale * x).sum()


def written_input(m, x):
    x.add_(1)
    return (m.scale * x).sum()


def counting(m, x):
    m.steps += 1
    return (m.dense(x) * m.steps).sum()


def data_dependent(m, x):
    return m.dense(x).sum() if x.sum() > 0 else x.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (hooked, "Tensor.register_hook: hooks of gradients are not imported"),
        (hooked_node, "Tensor.grad_fn: the graph of PyTorch's gradients is not imported"),
        (
            lambda m, x: m.dense(x).sum() * (1 if m.scale.grad is None else 2),
            "Tensor.grad: the gradients that PyTorch keeps are not imported",
        ),
        (packed, "saved_tensors_hooks: hooks of saved tensors are not imported"),
        (unfrozen, "Tensor.requires_grad: the flag of a parameter changes"),
        (
            lambda m, x: m.dense(x).sum().backward(),
            "torch.autograd.backward: it writes to parameter.grad",
        ),
        (lambda m, x: (m.dense(x) * OUTSIDE).sum(), "is no parameter of the module"),
        (written_detached, "aten.add_.Tensor: it writes to a tensor that needs a gradient"),
        (
            written_without_gradient,
            "aten.clamp_.default: it writes to a tensor that needs a gradient",
        ),
        (written_parameter, "writes? to (a tensor|the parameter)"),
        (written_input, "a write to the input"),
        (counting, "a write to the attribute steps of Of"),
        (data_dependent, "torch.export cannot trace the module"),
        (lambda m, x: torch.linalg.eigvalsh(m.dense(x)[:, :3]).sum(), "eigh.*has no converter"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_operations_that_cannot_be_exact_are_errors_with_their_line(function, message):
    with pytest.raises(UnsupportedOperatorError, match=message) as caught:
        from_module(Of(function), (torch.randn(3, 4),))
    if function is not counting:
        assert "test_model_errors.py:" in str(caught.value)


def test_one_error_lists_everything():
    def function(m, x):
        y = torch.poisson(m.dense(x))
        z = torch.linalg.eigvalsh(m.dense(x)[:, :3])
        return y.sum() + z.sum() + torch.special.bessel_j0(m.scale).sum()

    with pytest.raises(UnsupportedOperatorError) as caught:
        from_module(Of(function), (torch.randn(3, 4),))
    assert str(caught.value).count("\n    at ") == 3


def test_hooks_of_parameters_are_refused():
    model = perceptron(3, 2)
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"the parameter 0.weight has a hook of its gradient"):
        from_module(model, (torch.randn(2, 3),), loss=torch.sum)
    handle.remove()
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="there is a backward hook of all modules"):
        from_module(model, (torch.randn(2, 3),), loss=torch.sum)
    handle.remove()
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the submodule 0 has a backward hook"):
        from_module(model, (torch.randn(2, 3),), loss=torch.sum)
