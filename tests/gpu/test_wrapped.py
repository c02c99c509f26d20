"""Wrapped modules whose functions are compiled for CUDA: emulated kernels, and a device."""

from __future__ import annotations

import contextlib
import copy

import pytest
import tvm

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from compile_cuda import compile_for_cuda, missing  # noqa: E402
from torch_elsewhere import elsewhere, train  # noqa: E402

from relax_grad.frontend.torch import wrap  # noqa: E402

nn = torch.nn


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


X, Y = torch.randn(4, 2, 6, 6), torch.randint(0, 3, (4,))


@pytest.mark.skipif(missing("g++") is not None, reason="g++ is not installed: no emulation")
def test_training_with_emulated_kernels():
    torch.manual_seed(0)
    model = wrap(network(), (X,))
    reference = copy.deepcopy(model._original)
    with contextlib.ExitStack() as stack:

        def emulated(module, _target, settings, _remedy):
            compiled = compile_for_cuda(module, settings["relax_pipeline"])
            assert (compiled.on_host, compiled.serial) == ([], [])
            stack.enter_context(compiled.emulate())
            return compiled.executable

        there = stack.enter_context(elsewhere(emulated))
        losses = train(model.cuda(), X.cuda(), Y.cuda())
        assert there.called == ["forward", "backward"] * 3
        model.cpu()
    assert losses == pytest.approx(train(reference, X, Y), rel=1e-5)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not (tvm.cuda().exist and torch.cuda.is_available()),
    reason="no CUDA device for TVM and PyTorch: a stand-in is trained instead",
)
def test_training_on_a_device():
    """Also in another stream than the default one, and after a move."""
    torch.manual_seed(0)
    model = wrap(network(), (X,))
    reference = copy.deepcopy(model._original)
    wanted = [loss for _ in range(3) for loss in train(reference, X, Y)]
    model.cuda()
    x, y = X.cuda(), Y.cuda()
    losses = train(model, x, y)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        losses += train(model, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    assert model(x).device == x.device
    losses += train(model.cpu(), X, Y)
    assert losses == pytest.approx(wanted, rel=1e-3)
