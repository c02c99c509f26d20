"""Whole training steps in Relax, PyTorch and JAX, and their memory use."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

import _memory
import frameworks
import torch
from _contestants import contestants, difference, flat
from _models import MLP, STEPS, Llama, Step, UNet, ViT, resnet9

RESNET = Step(
    "ResNet-9",
    lambda: resnet9(width=4),
    lambda: (torch.randn(2, 3, 16, 16), torch.randint(0, 10, (2,))),
)
VIT = Step(
    "ViT",
    lambda: ViT(32, 24, 1, 10),
    lambda: (torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))),
)
LLAMA = Step(
    "Llama",
    lambda: Llama(50, 8, 24, 1),
    lambda: (torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (2, 8))),
)
MLP_ = Step("MLP", lambda: MLP(12, 16, 5), lambda: (torch.randn(4, 12), torch.randint(0, 5, (4,))))
UNET = Step(
    "U-Net", lambda: UNet(4, 2), lambda: (torch.randn(1, 3, 8, 8), torch.randint(0, 4, (1, 8, 8)))
)


@pytest.mark.parametrize(
    "step",
    [MLP_, *(pytest.param(s, marks=pytest.mark.slow) for s in (VIT, LLAMA, UNET, RESNET))],
    ids=lambda step: step.name,
)
def test_contestants_agree_on_loss_and_gradients(step):
    by_name = contestants(step, ["relax_grad", "torch", *_jax()])
    loss, gradients = by_name["torch"].results
    assert loss.shape == ()
    assert gradients.shape == (sum(p.numel() for p in step.network().parameters()),)
    assert np.abs(gradients).max() > 1e-3
    for contestant in by_name.values():
        assert difference(contestant.results, [loss, gradients]) < 1e-4
    calls, different = by_name["relax_grad"].kernels
    assert calls >= different > 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [("", 1e-5), (", bfloat16", 2e-2)])
def test_steps_update_alike(dtype, error):
    """relax_grad's step, which writes to its arguments, has the losses of PyTorch."""
    columns = ["torch", f"relax_grad{dtype}", f"torch{dtype}"]
    wanted, *others = (own.run for own in contestants(MLP_, columns).values())
    for _ in range(3):
        loss = wanted()[0].item()
        np.testing.assert_allclose([_first(run()) for run in others], loss, rtol=error)


def _first(results) -> float:
    return float(flat(results[0])[0])


def test_the_chart_has_steps_of_the_benchmark():
    chosen = frameworks.rows(None).values()
    assert len(chosen) == len(frameworks.NAMES)
    assert all(hasattr(step.network(), "scores") for step in [*chosen][:1])


def test_steps_have_names_of_their_own():
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_memory_of_a_call_excludes_earlier_allocations():
    size = 64 << 20
    kept = [np.ones(size // 8)]
    grown = _memory.growth(lambda: np.ones(size // 8), lambda: None)
    assert 0.9 * size < grown < 1.2 * size
    assert kept


def _jax() -> list[str]:
    try:
        import jax  # noqa: F401
    except ImportError:
        return []
    return ["jax"]
