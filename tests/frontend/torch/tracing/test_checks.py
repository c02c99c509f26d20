"""Functions of PyTorch that are replaced in a trace, at the edges of their bounds."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from relax_grad.frontend.torch import wrap  # noqa: E402

nn, F = torch.nn, torch.nn.functional

#: Operands by names.
OPERANDS = {
    "mean": torch.tensor([0.0, 1.0, 2.0, 3.0]),
    "target": torch.tensor([0.0, 1.5, 1.0, 1.0]),
    "variance": torch.tensor([0.0, 1e-7, 1e-6, 2.0]),
    "scores": torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]),
    "weight": torch.tensor([1.0, 2.0, 0.5]),
}


class Losses(nn.Module):
    """Losses with elements below, at and above their bounds."""

    def forward(self, mean, target, variance, scores, weight):
        classes = torch.tensor([0, 2])
        return {
            "gaussian": F.gaussian_nll_loss(mean, target, variance, full=True, reduction="none"),
            "gaussian_eps": F.gaussian_nll_loss(mean, target, variance, eps=0.5),
            "gaussian_column": F.gaussian_nll_loss(
                mean[:, None].expand(4, 2), target[:, None], variance, reduction="sum"
            ),
            "gaussian_number": F.gaussian_nll_loss(mean, target, 0.25),
            "margin": F.multi_margin_loss(scores, classes, reduction="none"),
            "margin_square": F.multi_margin_loss(scores, classes, p=2, weight=weight),
            "margin_one": F.multi_margin_loss(scores[1], classes[1], margin=0.5, reduction="sum"),
        }


def test_losses_at_their_bounds():
    """The bound of a variance passes the gradient; a class at the margin has none."""
    results = []
    for module in (Losses(), wrap(Losses(), tuple(OPERANDS.values()))):
        operands = [operand.clone().requires_grad_() for operand in OPERANDS.values()]
        operands[-1].requires_grad_(False)
        outputs = module(*operands)
        total = sum((i * value.sum() for i, value in enumerate(outputs.values(), 1)))
        results.append((outputs, torch.autograd.grad(total, operands[:-1])))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
