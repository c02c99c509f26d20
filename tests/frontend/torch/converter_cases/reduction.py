"""Calls of PyTorch's reductions, scans and sorts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_operators import Case

from .operands import DTYPES, RNG, normal, whole


def reduction() -> Iterator[Case]:
    """Yield calls of reductions, scans, norms, and orders."""
    dims = (None, 0, -1, (0, 2), (-1, -2), ())
    for name in ("sum", "mean", "amax", "amin", "logsumexp"):
        function = getattr(torch, name)
        for dim in dims:
            if name in ("logsumexp",) and dim in (None, ()):
                continue
            for keep in (False, True) if dim not in (None,) else (False,):
                options = {} if dim is None else {"dim": dim, "keepdim": keep}
                yield Case(
                    f"{name}-{dim}-{keep}",
                    lambda x, f=function, o=options: f(x, **o),
                    (whole(2, 3, 4),),
                )
        for kind in (
            "f32",
            "bf16",
            *([] if name in ("mean", "logsumexp") else ["i64", "bool", "i32"]),
        ):
            if name in ("sum", "amax", "mean", "logsumexp"):
                yield Case(
                    f"{name}-{kind}",
                    lambda x, f=function: f(x, 1),
                    (normal(3, 4, dtype=DTYPES[kind]),),
                    kind == "f32",
                )
    yield Case(
        "sum-dtype", lambda x: x.sum(0, dtype=torch.float64), (normal(3, 4, dtype=torch.float32),)
    )
    yield Case(
        "mean-dtype", lambda x: x.mean(0, dtype=torch.float32), (normal(3, 4, dtype=torch.int64),)
    )
    yield Case("sum-0d", lambda x: x.sum(), (normal(),))
    yield Case("sum-0d-dim", lambda x: x.sum(-1), (normal(),))
    yield Case("amax-0d", lambda x: x.amax(0), (normal(),))
    for name in ("max", "min"):
        function = getattr(torch, name)
        yield Case(f"{name}-all", function, (whole(3, 4),))
        yield Case(f"{name}-all-i64", function, (whole(3, 4, dtype=torch.int64),))
        for keep in (False, True):
            yield Case(
                f"{name}-dim-{keep}",
                lambda x, f=function, k=keep: tuple(f(x, -1, keepdim=k)),
                (whole(3, 6),),
            )
        yield Case(
            f"{name}-dim-i64",
            lambda x, f=function: tuple(f(x, 0)),
            (whole(6, 4, dtype=torch.int64),),
        )
        yield Case(
            f"{name}-dim-bool",
            lambda x, f=function: tuple(f(x, 0)),
            (normal(6, 4, dtype=torch.bool),),
        )
        yield Case(
            f"{name}-dim-f32",
            lambda x, f=function: tuple(f(x, 1)),
            (normal(3, 4, dtype=torch.float32),),
        )
        yield Case(
            f"{name}-dim-bf16",
            lambda x, f=function: tuple(f(x, 1)),
            (normal(3, 4, dtype=torch.bfloat16),),
            False,
        )
        yield Case(
            f"{name}-dim-infinite",
            lambda x, f=function: tuple(f(x, 1)),
            (
                torch.tensor(
                    [[-math.inf] * 3, [math.inf] * 3, [1, -math.inf, math.inf], [1, math.nan, 2]]
                ),
            ),
            False,
        )
        yield Case(f"{name}-0d", lambda x, f=function: tuple(f(x, 0)), (normal(),))
        yield Case(f"arg{name}", lambda x, f=getattr(torch, f"arg{name}"): f(x), (whole(3, 4),))
        yield Case(
            f"arg{name}-dim",
            lambda x, f=getattr(torch, f"arg{name}"): f(x, 1, keepdim=True),
            (whole(3, 6),),
        )
        yield Case(
            f"arg{name}-i32",
            lambda x, f=getattr(torch, f"arg{name}"): f(x, -1),
            (whole(3, 6, dtype=torch.int32),),
        )
    for name in ("any", "all"):
        function = getattr(torch, name)
        for kind in ("bool", "f32", "i64"):
            yield Case(
                f"{name}-{kind}", function, (whole(3, 4, dtype=torch.float64).to(DTYPES[kind]),)
            )
            yield Case(
                f"{name}-dim-{kind}",
                lambda x, f=function: f(x, -1, keepdim=True),
                (whole(3, 2).to(DTYPES[kind]),),
            )
            yield Case(
                f"{name}-dims-{kind}",
                lambda x, f=function: f(x, (0, 1)),
                (whole(3, 2, 2).to(DTYPES[kind]),),
            )
    yield Case("prod", torch.prod, (normal(3, 4),))
    yield Case("prod-dim", lambda x: x.prod(-1, keepdim=True), (normal(3, 4),))
    yield Case(
        "prod-zero",
        lambda x: x.prod(1),
        (torch.tensor([[1.0, 0, 3], [0, 0, 2], [1, 2, 3]], dtype=torch.float64),),
    )
    yield Case("prod-i32", lambda x: x.prod(1), (whole(3, 4, dtype=torch.int32),))
    for name in ("var", "std"):
        function = getattr(torch, name)
        for options in (
            {},
            {"dim": 1},
            {"dim": (0, -1), "correction": 0, "keepdim": True},
            {"dim": -1, "correction": 2},
            {"dim": 1, "unbiased": False},
        ):
            yield Case(
                f"{name}-{options}", lambda x, f=function, o=options: f(x, **o), (normal(4, 5, 3),)
            )
        yield Case(
            f"{name}-equal", lambda x, f=function: f(x, 1), (torch.ones(2, 3, dtype=torch.float64),)
        )
        yield Case(
            f"{name}-bf16",
            lambda x, f=function: f(x, 1),
            (normal(2, 8, dtype=torch.bfloat16),),
            False,
        )
        yield Case(
            f"{name}_mean", lambda x, f=getattr(torch, f"{name}_mean"): f(x, 1), (normal(4, 5),)
        )
    yield Case("var-one", lambda x: x.var(1), (normal(3, 1),), False)
    for order in (2, 1, 0, math.inf, -math.inf, 3, 0.5, 2.5):
        yield Case(
            f"norm-{order}", lambda x, o=order: torch.linalg.vector_norm(x, o, 1), (normal(3, 4),)
        )
    yield Case("norm-zero", lambda x: x.norm(dim=1), (torch.zeros(2, 3, dtype=torch.float64),))
    yield Case("norm-3-zero", lambda x: x.norm(3, dim=1), (torch.zeros(2, 3, dtype=torch.float64),))
    yield Case("norm-fro", lambda x: torch.linalg.norm(x), (normal(3, 4),))
    yield Case("normalize", lambda x: F.normalize(x, dim=1), (normal(3, 4),))
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        function = getattr(torch, name)
        yield Case(name, lambda x, f=function: f(x, -1), (normal(3, 4),))
        yield Case(f"{name}-0", lambda x, f=function: f(x, 0), (normal(3, 4, dtype=torch.float32),))
    for kind in ("bool", "i32", "i64", "u8"):
        yield Case(f"cumsum-{kind}", lambda x: x.cumsum(0), (normal(4, 3, dtype=DTYPES[kind]),))
    yield Case(
        "cumsum-dtype", lambda x: x.cumsum(0, dtype=torch.float32), (normal(4, dtype=torch.int64),)
    )
    yield Case(
        "cumprod-zero",
        lambda x: x.cumprod(0),
        (torch.tensor([2.0, 0, 3, 0, 4], dtype=torch.float64),),
    )
    yield Case("cumsum-bf16", lambda x: x.cumsum(0), (normal(4, 3, dtype=torch.bfloat16),), False)
    for name in ("cummax", "cummin"):
        function = getattr(torch, name)
        yield Case(f"{name}-ties", lambda x, f=function: f(x, 1), (whole(3, 7),))
        yield Case(f"{name}-0", lambda x, f=function: f(x, 0), (normal(5, 3, dtype=torch.float32),))
        unordered = torch.tensor([1.0, math.inf, -math.inf, math.nan, 3.0, math.nan, 9.0])
        yield Case(f"{name}-nan", lambda x, f=function: f(x, 0), (unordered,), False)
        for kind in ("bool", "i64", "bf16"):
            data = whole(3, 7, dtype=DTYPES[kind])
            yield Case(f"{name}-{kind}", lambda x, f=function: f(x, -1), (data,), False)
    yield Case("cummax-scalar", lambda x: torch.cummax(x, 0), (normal(),))
    distinct = torch.randperm(24, generator=RNG).double().reshape(2, 3, 4)
    for descending in (False, True):
        yield Case(
            f"sort-{descending}",
            lambda x, d=descending: tuple(x.sort(-1, descending=d)),
            (distinct,),
        )
        yield Case(
            f"sort-1-{descending}",
            lambda x, d=descending: tuple(x.sort(1, descending=d)),
            (distinct,),
        )
        yield Case(
            f"sort-stable-{descending}",
            lambda x, d=descending: tuple(x.sort(dim=0, stable=True, descending=d)),
            (whole(20, 3),),
        )
        yield Case(
            f"argsort-{descending}", lambda x, d=descending: x.argsort(0, descending=d), (distinct,)
        )
        yield Case(
            f"topk-{descending}",
            lambda x, d=descending: tuple(x.topk(2, 1, largest=d)),
            (distinct,),
        )
    yield Case("sort-i64", lambda x: tuple(x.sort(-1)), (distinct.long(),))
    yield Case("topk-f32", lambda x: tuple(x.topk(3)), (distinct.float(),))
    yield Case("median-dim", lambda x: tuple(x.median(-1)), (distinct,))
    yield Case("median", lambda x: x.median(), (distinct,))
    yield Case("kthvalue", lambda x: tuple(x.kthvalue(2, 1, keepdim=True)), (distinct,))
    yield Case("histc", lambda x: torch.histc(x, 5, -1, 1), (normal(30),), False)
    yield Case("histc-own", lambda x: torch.histc(x, 4), (normal(30, dtype=torch.float32),), False)
    edges = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    for right in (False, True):
        yield Case(
            f"bucketize-{right}",
            lambda x, e, r=right: torch.bucketize(x, e, right=r),
            (whole(3, 4), edges),
        )
        yield Case(
            f"searchsorted-{right}",
            lambda x, e, r=right: torch.searchsorted(e, x, right=r),
            (whole(3, 4), edges),
        )
    yield Case(
        "searchsorted-rows",
        lambda x, e: torch.searchsorted(e, x),
        (whole(2, 3), torch.stack([edges, edges + 1])),
    )
    for dim in (0, 1, -1):
        yield Case(f"softmax-{dim}", lambda x, d=dim: x.softmax(d), (normal(2, 3, 4),))
        yield Case(f"log_softmax-{dim}", lambda x, d=dim: x.log_softmax(d), (normal(2, 3, 4),))
    yield Case(
        "softmax-bf16", lambda x: x.softmax(-1), (normal(2, 3, dtype=torch.bfloat16),), False
    )
    yield Case(
        "softmax-dtype",
        lambda x: x.softmax(-1, dtype=torch.float32),
        (normal(2, 3, dtype=torch.bfloat16),),
        False,
    )
    yield Case(
        "softmax-i64",
        lambda x: x.softmax(-1, dtype=torch.float32),
        (whole(2, 3, dtype=torch.int64),),
    )
    yield Case(
        "logsumexp-infinite",
        lambda x: x.logsumexp(1),
        (torch.tensor([[-math.inf, -math.inf], [0, -math.inf]]),),
        False,
    )
    holes = torch.tensor([[math.nan, 1, 3, 2, 7], [math.nan] * 5, [5, 4, math.nan, 6, math.nan]])
    holes = holes.double()
    yield Case("nanmedian-dim", lambda x: tuple(x.nanmedian(1, keepdim=True)), (holes[[0, 2]],))
    yield Case("nanmedian-dim-nan", lambda x: x.nanmedian(1).values, (holes,), False)
    yield Case("nanmedian", lambda x: x.nanmedian(), (holes,))
    yield Case("nanmedian-ties", lambda x: x.nanmedian(), (torch.tensor([2.0, math.nan, 2, 1, 3]),))
    yield Case("nanmedian-nan", lambda x: x.nanmedian(), (holes[1],))
    yield Case("nanmedian-i64", lambda x: tuple(x.nanmedian(0)), (torch.tensor([3, 1, 2]),))
