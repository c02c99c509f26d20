"""Hooks of modules in an import: parts of the graph, or errors that name them."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_zoo.parts import normal  # noqa: E402

from relax_grad.frontend.torch import UnsupportedOperatorError, from_module, wrap  # noqa: E402

nn = torch.nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x).tanh()).sin().sum()


def doubled(module, args):
    return (args[0] * 2,)


def squared(module, args, result):
    return result.square()


def in_place(module, args, result):
    result.mul_(3)


def test_hooks_that_change_tensors_are_parts_of_the_graph():
    torch.manual_seed(0)
    net = Net().double()
    net.first.register_forward_pre_hook(doubled)
    net.first.register_forward_hook(squared)
    net.second.register_forward_hook(in_place)
    importlib.import_module("torch.nn.utils.prune").random_unstructured(net.first, "weight", 0.5)
    nn.utils.weight_norm(net.second)
    data = normal(3, 4)
    gradients = []
    for model in (net, wrap(net, (data,))):
        net.zero_grad()
        loss = model(data)
        loss.backward()
        gradients.append([loss.detach(), *(param.grad.clone() for param in net.parameters())])
    assert len(gradients[0]) == 6
    torch.testing.assert_close(*gradients)


seen = []


def watching(module, args, result):
    seen.append(result)


def watching_inputs(module, args):
    seen.append(args)


def watching_and_returning(module, args, result):
    seen.append(result)
    return result


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (lambda net: net.first.register_forward_hook(watching), "watching of first"),
        (lambda net: net.register_forward_hook(watching), "watching of Net"),
        (lambda net: net.second.register_forward_pre_hook(watching_inputs), "watching_inputs of"),
        (lambda net: net.second.register_forward_hook(watching_and_returning), "watching_and_ret"),
        (
            lambda net: nn.modules.module.register_module_forward_hook(watching),
            "watching of all modules",
        ),
        (
            lambda net: nn.modules.module.register_module_forward_pre_hook(watching_inputs),
            "watching_inputs of all modules",
        ),
    ],
)
def test_hooks_that_only_look_are_refused(register, name):
    net = Net()
    handle = register(net)
    try:
        with pytest.raises(UnsupportedOperatorError) as caught:
            from_module(net, (torch.ones(3, 4),))
    finally:
        handle.remove()
        seen.clear()
    assert f"the forward hook {name}" in str(caught.value)
    assert "it runs once, in the import" in str(caught.value)
    assert "test_hooks.py:" in str(caught.value)
    assert list(from_module(net, (torch.ones(3, 4),)).outputs) == ["output"]


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda net: net.first.register_full_backward_hook(watching), "first has a backward hook"),
        (
            lambda net: net.register_full_backward_pre_hook(watching_inputs),
            r"\(itself\) has a backward hook",
        ),
        (
            lambda net: nn.modules.module.register_module_full_backward_hook(watching),
            "backward hook of all modules",
        ),
        (
            lambda net: net.first.weight.register_hook(abs),
            "first.weight has a hook of its gradient",
        ),
    ],
)
def test_hooks_of_gradients_are_refused(register, message):
    net = Net()
    handle = register(net)
    try:
        with pytest.raises(ValueError, match=message):
            from_module(net, (torch.ones(3, 4),))
    finally:
        handle.remove()


def test_hooks_that_a_wrapped_module_gets_later():
    net, data = Net(), torch.ones(3, 4)
    model = wrap(net, (data,))
    before = model(data)
    handle = net.first.register_forward_hook(squared)
    changed = model(data)
    torch.testing.assert_close(changed, net(data))
    assert not torch.allclose(changed, before)
    handle.remove()
    torch.testing.assert_close(model(data), before)
    model.register_forward_hook(squared)  # of the wrapped module itself: PyTorch calls it
    torch.testing.assert_close(model(data), before.square())
    net.first.register_full_backward_hook(watching)
    with pytest.raises(ValueError, match="first has a backward hook"):
        model(data)
