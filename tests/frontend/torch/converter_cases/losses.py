"""Calls of PyTorch's losses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_operators import Case

from .operands import index, normal, positive, whole


def losses() -> Iterator[Case]:
    """Yield losses, which torch.export decomposes."""
    logits, target = normal(6, 4), index(4, 6)
    ignored = target.clone()
    ignored[1] = -100
    weight = positive(4)
    for reduction in ("mean", "sum", "none"):
        for name, options in {
            "plain": {},
            "smooth": {"label_smoothing": 0.2},
            "weight": {"weight": weight},
            "both": {"weight": weight, "label_smoothing": 0.1},
            "ignored": {"ignore_index": 2},
        }.items():
            yield Case(
                f"cross_entropy-{name}-{reduction}",
                lambda x, t, o=options, r=reduction: F.cross_entropy(x, t, reduction=r, **o),
                (logits, target if name == "ignored" else ignored),
            )
        yield Case(
            f"nll-{reduction}",
            lambda x, t, r=reduction: F.nll_loss(x, t, weight, reduction=r),
            (logits, ignored),
        )
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
            yield Case(
                f"{name}-{reduction}",
                lambda x, y, f=getattr(F, name), r=reduction: f(
                    x, y.detach() if f is F.soft_margin_loss else y, reduction=r
                ),
                (whole(4, 3), whole(4, 3)),
            )
        yield Case(
            f"kl-{reduction}",
            lambda x, y, r=reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=r),
            (normal(4, 3), normal(4, 3)),
        )
        yield Case(
            f"bce-{reduction}",
            lambda x, y, r=reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
            (normal(4, 3), normal(4, 3)),
        )
        yield Case(
            f"bce-logits-{reduction}",
            lambda x, y, r=reduction: F.binary_cross_entropy_with_logits(
                x, y.sigmoid(), pos_weight=weight[:3], reduction=r
            ),
            (normal(4, 3), normal(4, 3)),
        )
    yield Case(
        "cross_entropy-images",
        lambda x, t: F.cross_entropy(x, t),
        (normal(2, 4, 3, 3), index(4, 2, 3, 3)),
    )
    yield Case(
        "cross_entropy-shares",
        lambda x, t: F.cross_entropy(x, t.softmax(1), label_smoothing=0.1),
        (logits, normal(6, 4)),
    )
    yield Case(
        "cross_entropy-none-left",
        lambda x, t: F.cross_entropy(x, t),
        (logits, torch.full((6,), -100)),
        False,
    )
    yield Case("poisson_nll", F.poisson_nll_loss, (normal(4, 3), positive(4, 3)))
    yield Case("triplet", F.triplet_margin_loss, tuple(normal(4, 3) for _ in range(3)))
    yield Case("margin_ranking", F.margin_ranking_loss, (normal(4), normal(4), normal(4).sign()))
    yield Case("hinge_embedding", F.hinge_embedding_loss, (normal(4), normal(4).sign()))
    yield Case(
        "cosine_embedding", F.cosine_embedding_loss, (normal(4, 3), normal(4, 3), normal(4).sign())
    )
    yield Case("multi_margin", F.multi_margin_loss, (logits, target))
    labels = torch.tensor([[0, 2, -1, 1], [3, 3, 0, -1], [-1, 1, 2, 3], [2, 0, 1, 3]])
    for reduction in ("none", "mean", "sum"):
        for name, data in (("", normal(4, 4)), ("-kinks", whole(4, 4))):
            yield Case(
                f"multilabel_margin-{reduction}{name}",
                lambda x, y, r=reduction: F.multilabel_margin_loss(x, y, reduction=r),
                (data, labels),
            )
    yield Case("multilabel_margin-row", F.multilabel_margin_loss, (normal(4), labels[0]))
    yield Case(
        "multilabel_soft_margin",
        lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).to(x)),
        (normal(4, 3), normal(4, 3)),
    )
