"""Calls of PyTorch's products, convolutions, poolings and normalisations."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_operators import Case

from .operands import DTYPES, normal, unit, whole


def products() -> Iterator[Case]:
    """Yield products of matrices, attention, convolutions, pooling and normalisations."""
    for kind in ("f64", "f32", "bf16", "f16"):
        d = DTYPES[kind]
        exact = kind in ("f64", "f32")
        yield Case(f"mm-{kind}", torch.mm, (normal(3, 4, dtype=d), normal(4, 5, dtype=d)), exact)
        yield Case(
            f"bmm-{kind}", torch.bmm, (normal(2, 3, 4, dtype=d), normal(2, 4, 5, dtype=d)), exact
        )
        yield Case(
            f"linear-{kind}",
            F.linear,
            (normal(2, 3, 4, dtype=d), normal(5, 4, dtype=d), normal(5, dtype=d)),
            exact,
        )
        yield Case(
            f"addmm-{kind}",
            lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
            (normal(5, dtype=d), normal(3, 4, dtype=d), normal(4, 5, dtype=d)),
            exact,
        )
        yield Case(
            f"baddbmm-{kind}",
            lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
            (normal(2, 3, 5, dtype=d), normal(2, 3, 4, dtype=d), normal(2, 4, 5, dtype=d)),
            exact,
        )
        yield Case(
            f"conv2d-{kind}",
            lambda x, w, b: F.conv2d(x, w, b, 2, 1),
            (normal(2, 3, 5, 6, dtype=d), normal(4, 3, 3, 3, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"layer_norm-{kind}",
            lambda x, w, b: F.layer_norm(x, (4,), w, b),
            (normal(2, 3, 4, dtype=d), normal(4, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"group_norm-{kind}",
            lambda x, w, b: F.group_norm(x, 2, w, b),
            (normal(2, 4, 5, dtype=d), normal(4, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"rms_norm-{kind}",
            lambda x, w: F.rms_norm(x, (4,), w),
            (normal(2, 3, 4, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"attention-{kind}",
            F.scaled_dot_product_attention,
            tuple(normal(2, 2, 5, 4, dtype=d) for _ in range(3)),
            exact,
        )
    yield Case("mm-i64", torch.mm, (whole(3, 4, dtype=torch.int64), whole(4, 5, dtype=torch.int64)))
    for a, b in (
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 3)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 3)),
        ((2, 3, 4), (4,)),
        ((3, 4), (2, 4, 3)),
    ):
        yield Case(f"matmul-{a}-{b}", torch.matmul, (normal(*a), normal(*b)))
    yield Case("linear-plain", F.linear, (normal(4), normal(5, 4)))
    yield Case("bilinear", F.bilinear, (normal(2, 3), normal(2, 4), normal(5, 3, 4), normal(5)))
    yield Case(
        "addmm-beta-0",
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
        (torch.full((3, 5), math.nan, dtype=torch.float64), normal(3, 4), normal(4, 5)),
        False,
    )
    for p in (0, 1, 2, 3, math.inf):
        yield Case(
            f"cdist-{p}", lambda x, y, p=p: torch.cdist(x, y, p), (normal(2, 3, 4), normal(2, 5, 4))
        )
        yield Case(f"pdist-{p}", lambda x, p=p: F.pdist(x, p), (normal(4, 3),))
    halves = torch.tensor([[1.0, 3.0, 3.0, -2.0], [-1.0, -5.0, math.inf, 2.0], [-math.inf] * 4])
    for kind in ("bf16", "f16"):
        data = halves.to(DTYPES[kind])
        for name in ("max", "min", "argmax", "argmin", "sort", "argsort", "median"):
            yield Case(
                f"{name}-{kind}",
                lambda x, f=getattr(torch, name): f(x, dim=1),
                (data[:2] if "sort" in name or name == "median" else data,),
            )
        yield Case(f"topk-{kind}", lambda x: x.topk(3, 1), (data[:1, [0, 1, 3]],))
        yield Case(f"adaptive_max_pool-{kind}", lambda x: F.adaptive_max_pool1d(x, 2), (data[:2],))
    square = normal(2, 4, 4)
    for name in ("inv", "det", "slogdet", "matrix_exp"):
        yield Case(f"{name}-one", getattr(torch.linalg, name), (square[0],))
        yield Case(f"{name}-batch", getattr(torch.linalg, name), (square,))
    yield Case("matrix_exp-large", lambda x: torch.linalg.matrix_exp(x - x.mT), (square * 9,))
    yield Case("matrix_exp-f32", torch.linalg.matrix_exp, (square.float(),))
    yield Case("solve", torch.linalg.solve, (square, normal(2, 4, 3)))
    yield Case("solve-vector", torch.linalg.solve, (square[0], normal(4)))
    yield Case("solve-vectors", torch.linalg.solve, (square, normal(2, 4)))
    yield Case(
        "solve-right", lambda a, b: torch.linalg.solve(a, b, left=False), (square, normal(2, 3, 4))
    )
    yield Case("solve-exchanges", torch.linalg.solve, (torch.eye(4).double().flip(0), normal(4, 2)))
    positive_definite = square @ square.mT + torch.eye(4)
    for upper in (False, True):
        factor = torch.linalg.cholesky(positive_definite, upper=upper)
        for name, function, operands in (
            ("cholesky", torch.linalg.cholesky, (positive_definite,)),
            (
                "cholesky-one-triangle",
                torch.linalg.cholesky,
                (positive_definite + square.tril(-1),),
            ),
            ("cholesky_solve", torch.cholesky_solve, (normal(2, 4, 3), factor)),
            ("cholesky_inverse", torch.cholesky_inverse, (factor[0],)),
            ("cholesky_inverse-whole", torch.cholesky_inverse, (square[0] + 4 * torch.eye(4),)),
        ):
            yield Case(f"{name}-{upper}", lambda *x, f=function, u=upper: f(*x, upper=u), operands)
        for left, unit_diagonal in ((False, False), (True, False), (True, True)):
            options = {"upper": upper, "left": left, "unitriangular": unit_diagonal}
            yield Case(
                f"solve_triangular-{upper}-{left}-{unit_diagonal}",
                lambda a, b, o=options: torch.linalg.solve_triangular(a, b, **o),
                (square, normal(2, 4, 3) if left else normal(2, 3, 4)),
            )
    yield Case(
        "solve_triangular-broadcast",
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
        (square[0], normal(2, 4, 3)),
    )
    yield Case("householder", torch.linalg.householder_product, (normal(2, 5, 3), unit(2, 3)))
    q, k, v = (normal(2, 4, n, 8) for n in (5, 7, 7))
    for name, options in {
        "scale": {"scale": 0.3}, "causal": {"is_causal": True},
        "bool": {"attn_mask": normal(5, 7, dtype=torch.bool)},
        "bool-heads": {"attn_mask": normal(2, 1, 5, 7, dtype=torch.bool)},
        "float": {"attn_mask": normal(2, 4, 5, 7)},
        "infinite": {"attn_mask": torch.zeros(5, 7,
        dtype=torch.float64).masked_fill(normal(5, 7) > 0, -math.inf)},
        "empty-rows": {"attn_mask": torch.arange(5)[:, None].expand(5, 7) > 1},
        "empty-rows-float": {"attn_mask": torch.zeros(5, 7,
        dtype=torch.float64).masked_fill(torch.arange(5)[:, None] > 2, -math.inf)},
    }.items():  # fmt: skip
        yield Case(
            f"attention-{name}",
            lambda q, k, v, o=options: F.scaled_dot_product_attention(q, k, v, **o),
            (q, k, v),
        )
    yield Case(
        "attention-mask-gradient",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (q, k, v, normal(4, 5, 7)),
    )
    yield Case(
        "attention-groups",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (q, k[:, :2].clone(), v[:, :2].clone()),
    )
    yield Case(
        "attention-3d", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (q[0], k[0], v[0])
    )
    for rank in (1, 2, 3):
        conv = getattr(F, f"conv{rank}d")
        turned = getattr(F, f"conv_transpose{rank}d")
        extent = (7, 6, 5)[:rank]
        x = normal(2, 4, *extent)
        yield Case(
            f"conv{rank}d",
            lambda x, w, b, f=conv: f(x, w, b, 2, 1, 1),
            (x, normal(3, 4, *[3] * rank), normal(3)),
        )
        yield Case(
            f"conv{rank}d-groups",
            lambda x, w, f=conv: f(x, w, None, 1, 2, 2, 2),
            (x, normal(6, 2, *[3] * rank)),
        )
        yield Case(
            f"conv{rank}d-depthwise",
            lambda x, w, f=conv: f(x, w, None, 1, 1, 1, 4),
            (x, normal(4, 1, *[3] * rank)),
        )
        yield Case(
            f"conv{rank}d-same",
            lambda x, w, f=conv: f(x, w, None, 1, "same"),
            (x, normal(3, 4, *[2] * rank)),
        )
        yield Case(
            f"conv{rank}d-unbatched",
            lambda x, w, f=conv: f(x, w),
            (x[0], normal(3, 4, *[3] * rank)),
        )
        yield Case(
            f"conv_transpose{rank}d",
            lambda x, w, b, f=turned: f(x, w, b, 2, 1, 1),
            (x, normal(4, 3, *[3] * rank), normal(3)),
        )
        yield Case(
            f"conv_transpose{rank}d-groups",
            lambda x, w, f=turned: f(x, w, None, 1, 0, 0, 2),
            (x, normal(4, 3, *[2] * rank)),
        )
        yield Case(
            f"conv_transpose{rank}d-dilation",
            lambda x, w, f=turned: f(x, w, None, 1, 0, 0, 1, 2),
            (x, normal(4, 3, *[2] * rank)),
        )
        image = normal(2, 3, *(8, 7, 6)[:rank])
        avg, top = getattr(F, f"avg_pool{rank}d"), getattr(F, f"max_pool{rank}d")
        for name, args in {
            "plain": (2,),
            "stride": (3, 2, 1),
            "ceil": (3, 2, 1, True),
            "exclude": (3, 2, 1, False, False),
            "ceil-exclude": (3, 2, 1, True, False),
        }.items():
            yield Case(f"avg_pool{rank}d-{name}", lambda x, f=avg, a=args: f(x, *a), (image,))
        if rank > 1:
            yield Case(
                f"avg_pool{rank}d-divisor", lambda x, f=avg: f(x, 2, 2, 1, False, True, 5), (image,)
            )
        for name, args in {
            "plain": (2,),
            "stride": (3, 2, 1),
            "dilation": (2, 1, 0, 2),
            "ceil": (3, 2, 1, 1, True),
        }.items():
            yield Case(f"max_pool{rank}d-{name}", lambda x, f=top, a=args: f(x, *a), (image,))
            data = image[:, :2] if name == "plain" else whole(1, 2, *(8, 7, 6)[:rank])
            yield Case(
                f"max_pool{rank}d-indices-{name}",
                lambda x, f=top, a=args: f(x, *a, return_indices=True),
                (data,),
            )
        yield Case(
            f"max_unpool{rank}d",
            lambda x, f=top, u=getattr(F, f"max_unpool{rank}d"): u(
                *f(x, 2, return_indices=True), 2, output_size=x.shape
            ),
            (image,),
        )
        yield Case(
            f"max_unpool{rank}d-overlap",
            lambda x, f=top, u=getattr(F, f"max_unpool{rank}d"): u(
                *f(x, 3, 2, 1, return_indices=True), 3, 2, 1, output_size=x.shape
            ),
            (image,),
        )
        lowest = torch.full((1, 2, *[4] * rank), -math.inf, dtype=torch.float64)
        yield Case(
            f"max_pool{rank}d-indices-lowest",
            lambda x, f=top: f(x, 2, 2, 1, return_indices=True),
            (lowest,),
            False,
        )
        yield Case(
            f"max_pool{rank}d-ties",
            lambda x, f=top: f(x, 3, 2, 1),
            (whole(2, 3, *(8, 7, 6)[:rank]),),
        )
        yield Case(f"max_pool{rank}d-unbatched", lambda x, f=top: f(x, 2), (image[0],))
        for size in (1, 2, 3, 5):
            yield Case(
                f"adaptive_avg_pool{rank}d-{size}",
                lambda x, f=getattr(F, f"adaptive_avg_pool{rank}d"), s=size: f(x, s),
                (image,),
            )
        for size in (1, 3):
            yield Case(
                f"adaptive_max_pool{rank}d-{size}",
                lambda x, f=getattr(F, f"adaptive_max_pool{rank}d"), s=size: f(
                    x, s, return_indices=True
                ),
                (image,),
            )
    yield Case("layer_norm-plain", lambda x: F.layer_norm(x, (3, 4)), (normal(2, 3, 4),))
    yield Case("group_norm-plain", lambda x: F.group_norm(x, 3), (normal(2, 6, 3, 2),))
    yield Case("instance_norm", lambda x: F.instance_norm(x), (normal(2, 3, 4, 5),))
    yield Case("local_response_norm", lambda x: F.local_response_norm(x, 2), (normal(2, 3, 4, 5),))
    image = normal(2, 3, 4, 5)
    for mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
        for name, options in {
            "double": {"scale_factor": 2},
            "size": {"size": (7, 3)},
            "fraction": {"scale_factor": 1.7},
        }.items():
            yield Case(
                f"interpolate-{mode}-{name}",
                lambda x, m=mode, o=options: F.interpolate(x, mode=m, **o),
                (image,),
            )
        if mode.startswith("bi"):
            yield Case(
                f"interpolate-{mode}-corners",
                lambda x, m=mode: F.interpolate(x, size=(6, 8), mode=m, align_corners=True),
                (image,),
            )
            yield Case(
                f"interpolate-{mode}-antialias",
                lambda x, m=mode: F.interpolate(x, size=(2, 3), mode=m, antialias=True),
                (image,),
            )
    yield Case(
        "interpolate-bf16",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (image.bfloat16(),),
        False,
    )
    yield Case("interpolate-linear", lambda x: F.interpolate(x, size=7, mode="linear"), (image[0],))
    yield Case(
        "interpolate-trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (normal(1, 2, 3, 2, 3),),
    )
    yield Case(
        "interpolate-nearest3", lambda x: F.interpolate(x, scale_factor=2), (normal(1, 2, 3, 2, 3),)
    )
    yield Case("interpolate-nearest1", lambda x: F.interpolate(x, size=7), (image[0],))
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (False, True):
                yield Case(
                    f"grid_sample-{mode}-{padding}-{corners}",
                    lambda x, g, m=mode, p=padding, c=corners: F.grid_sample(x, g, m, p, c),
                    (image, normal(2, 3, 4, 2)),
                )
    yield Case(
        "grid_sample-3d",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (normal(1, 2, 3, 4, 3), normal(1, 2, 3, 2, 3) * 0.6),
    )
    for corners in (False, True):
        yield Case(
            f"affine_grid-{corners}",
            lambda x, t, c=corners: F.grid_sample(
                x, F.affine_grid(t, (2, 3, 6, 5), c), align_corners=c
            ),
            (image, normal(2, 2, 3) * 0.5),
        )
    yield Case(
        "grouped_mm",
        lambda x, w, o: torch._grouped_mm(x, w, o),
        (
            normal(16, 16, dtype=torch.bfloat16),
            normal(3, 16, 16, dtype=torch.bfloat16),
            torch.tensor([3, 9, 16], dtype=torch.int32),
        ),
        False,
    )
