"""Calls of PyTorch's operators that move elements, and of those that read and write them at
computed places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_operators import Case

from .operands import RNG, index, normal, whole


def moving() -> Iterator[Case]:
    """Yield calls of operators that move elements, and of paddings."""
    x = normal(2, 3, 4)
    # PyTorch's own gradient of it fails torch.autograd.gradcheck: it is that of the written
    # elements.
    yield Case(
        "as_strided_scatter",
        lambda x: x.as_strided_scatter(x[0, :2] * 3, (2, 4), (6, 1), 1),
        (normal(2, 3, 4),),
        False,
    )
    for name, function in {
        "view": lambda x: x.view(6, 4), "view-1": lambda x: x.view(-1, 2),
        "flatten": lambda x: x.flatten(1),
        "unflatten": lambda x: x.unflatten(-1, (2, 2)), "squeeze": lambda x: x[:, :1].squeeze(1),
        "unsqueeze": lambda x: x.unsqueeze(-2),
        "expand": lambda x: x[:, :1].expand(-1, 5, -1),
        "expand-new": lambda x: x.expand(2, 2, 3, 4), "permute": lambda x: x.permute(2, 0, -2),
        "transpose": lambda x: x.transpose(-1, 0), "t": lambda x: x[0].t(),
        "movedim": lambda x: x.movedim(0, -1),
        "split": lambda x: x.split(2, -1), "split-uneven": lambda x: x.split(3, -1),
        "split-sizes": lambda x: x.split([1, 2], 1),
        "chunk": lambda x: x.chunk(2, 2), "unbind": lambda x: x.unbind(1),
        "unbind-1": lambda x: x[:, :1].unbind(1),
        "slice": lambda x: x[:, 1:, ::2], "slice-negative": lambda x: x[..., -3:-1],
        "slice-beyond": lambda x: x[:, :100, 2:9],
        "select": lambda x: x[:, -1], "select-2": lambda x: x[1, ..., 2],
        "narrow": lambda x: x.narrow(-1, 1, 2),
        "flip": lambda x: x.flip(0, -1), "roll": lambda x: x.roll(1, -1),
        "roll-2": lambda x: x.roll((-1, 5), (0, 2)), "roll-flat": lambda x: x.roll(5),
        "repeat": lambda x: x.repeat(2, 1, 3, 1), "tile": lambda x: x.tile(2),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
        "repeat_interleave-flat": lambda x: x.repeat_interleave(2), "tril": lambda x: x.tril(-1),
        "triu": lambda x: x.triu(1),
        "diagonal": lambda x: x.diagonal(0, 1, 2), "diagonal-1": lambda x: x.diagonal(1, 0, -1),
        "diagonal-2": lambda x: x.diagonal(-1, 2, 1),
        "diag": lambda x: x[0].diag(), "diag_embed": lambda x: x[0].diag_embed(1),
        "trace": lambda x: x[0].trace(),
        "as_strided": lambda x: x.contiguous().as_strided((2, 3), (1, 2), 1),
        "unfold": lambda x: x.unfold(2, 3, 1),
        "unfold-1": lambda x: x.unfold(1, 2, 1), "cat": lambda x: torch.cat([x, x * 2], -2),
        "cat-int": lambda x: torch.cat([x, torch.ones(2, 3, 1, dtype=torch.int64)], -1),
        "stack": lambda x: torch.stack([x, x.exp()], -1), "rot90": lambda x: x.rot90(1, (1, 2)),
        "swapaxes": lambda x: x.swapaxes(0, 1),
        "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
        "meshgrid-xy": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="xy"),
        "cat-empty": lambda x: torch.cat([torch.zeros(0, dtype=torch.float64), x[0, 0]]),
        "hstack": lambda x: torch.hstack([x, x]),
        "clone": lambda x: x.clone() * 2, "contiguous": lambda x: x.transpose(0, 1).contiguous(),
        "select_scatter": lambda x: x.select_scatter(x[:, 0] * 2, 1, -1),
        "slice_scatter": lambda x: x.slice_scatter(x[..., :2] * 3, -1, 0, None, 2),
        "slice_scatter-end": lambda x: x.slice_scatter(x[:, :1].exp(), 1, -1),
        "fill_diagonal": lambda x: (x[0] * 2).fill_diagonal_(3.0),
        "triu_indices": lambda x: x[0][torch.triu_indices(3, 4, 1).unbind()],
        "tril_indices-tensor": lambda x: x[0, 0, 0] * torch.tril_indices(3, 4, -1),
        "diagonal_scatter": lambda x: x.diagonal_scatter(x[:, :, 0].exp(), 0, 1, 2),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 1, 4, 6), 2),
        "channel_shuffle": lambda x: F.channel_shuffle(x.reshape(1, 4, 2, 3), 2),
        "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
        "einsum-trace": lambda x: torch.einsum("bij->bj", x),
        "outer": lambda x: torch.outer(x[0, 0], x[1, 1]), "kron": lambda x: torch.kron(x[0], x[1]),
        "cross": lambda x: torch.cross(x, x.flip(1), dim=1), "diff": lambda x: x.diff(dim=-1),
        "cdist": lambda x: torch.cdist(x, x.flip(1)),
        "cosine_similarity": lambda x: F.cosine_similarity(x, x.exp(), dim=-1),
        "trapezoid": lambda x: torch.trapezoid(x, dim=-1),
        "in-place": lambda x: _set(x), "atleast_3d": lambda x: torch.atleast_3d(x[0]),
        "empty": lambda x: x[:, :0], "zero-size-sum": lambda x: x[:, :0].sum(1) + x[:, 0],
    }.items():  # fmt: skip
        yield Case(name, function, (x,))
    yield Case("tril-bool", lambda x: x.tril(), (normal(4, 4, dtype=torch.bool),))
    yield Case("triu-i64", lambda x: x.triu(1), (whole(4, 4, dtype=torch.int64),))
    yield Case("cat-bool", lambda x: torch.cat([x, ~x]), (normal(4, dtype=torch.bool),))
    yield Case("flip-bool", lambda x: x.flip(0), (normal(4, dtype=torch.bool),))
    for mode in ("constant", "reflect", "replicate", "circular"):
        value = 1.5 if mode == "constant" else None
        yield Case(
            f"pad1-{mode}", lambda x, m=mode, v=value: F.pad(x, (1, 2), m, v), (normal(2, 3, 5),)
        )
        yield Case(
            f"pad2-{mode}",
            lambda x, m=mode, v=value: F.pad(x, (1, 2, 2, 0), m, v),
            (normal(1, 2, 4, 5),),
        )
        yield Case(
            f"pad3-{mode}",
            lambda x, m=mode, v=value: F.pad(x, (1, 0, 2, 1, 1, 1), m, v),
            (normal(1, 2, 3, 4, 3),),
        )
        if mode != "circular":
            yield (
                Case(
                    f"pad2-{mode}-unbatched",
                    lambda x, m=mode, v=value: F.pad(x, (1, 2, 1, 0), m, v),
                    (normal(2, 4, 5),),
                )
                if mode != "constant"
                else Case("pad-0", lambda x: F.pad(x, (0, 0)), (normal(3),))
            )
    yield Case("pad-negative", lambda x: F.pad(x, (-1, 2, 1, -2)), (normal(3, 5),))
    yield Case("pad-bool", lambda x: F.pad(x, (1, 1), value=True), (normal(3, dtype=torch.bool),))
    yield Case("pad-i64", lambda x: F.pad(x, (1, 1), value=-100), (normal(3, dtype=torch.int64),))
    yield Case("fold", lambda x: F.fold(x, (4, 5), 2, padding=1, stride=2), (normal(2, 12, 9),))
    yield Case(
        "fold-dilation", lambda x: F.fold(x, (5, 6), (2, 3), dilation=2), (normal(2, 12, 6),)
    )
    yield Case(
        "unfold-image",
        lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=1, stride=2),
        (normal(2, 3, 5, 6),),
    )
    for name, function in {
        "arange": lambda x: torch.arange(5) + x,
        "arange-step": lambda x: torch.arange(1, 6, 2, dtype=torch.float64).sum() * x,
        "arange-float": lambda x: torch.arange(0.5, 3.0, 0.5)[:5] + x,
        "full": lambda x: torch.full((5,), 2.5) + x,
        "zeros_like": lambda x: torch.zeros_like(x) + x, "ones": lambda x: torch.ones(5) * x,
        "eye": lambda x: torch.eye(5)[0] * x, "linspace": lambda x: torch.linspace(0, 1, 5) * x,
        "new_full": lambda x: x.new_full((5,), 3) + x,
        "one_hot": lambda x: F.one_hot(torch.tensor([1, 0, 4]), 5) * x,
        "tensor": lambda x: x * torch.tensor([1.0, 2, 3, 4, 5]),
        "full_like": lambda x: torch.full_like(x, 4) * x,
        "eye-m": lambda x: torch.eye(3, 5).sum(0) * x,
        "logspace": lambda x: torch.logspace(0, 1, 5) * x,
        "tril_indices": lambda x: x[torch.tril_indices(5, 5)[0]],
    }.items():  # fmt: skip
        yield Case(name, function, (normal(5),))


def _set(x):
    y = x.clone()
    y[:, 1] = 0.0
    y[:, :, 2] *= 2
    y[0, 0, 0] += 3
    return y


def indexing() -> Iterator[Case]:
    """Yield calls of operators that read and write elements at computed places."""
    x = normal(4, 5, 6)
    i, j = index(4, 3), index(5, 3)
    signed = index(4, 3) - 2
    for name, function, operands in (
        ("one", lambda x, i: x[i], (x, i)), ("one-negative", lambda x, i: x[i], (x, signed)),
        ("matrix", lambda x, i: x[i], (x, index(4, 2, 3))),
        ("middle", lambda x, i: x[:, i], (x, j)), ("last", lambda x, i: x[..., i], (x, j)),
        ("two", lambda x, i, j: x[i, j], (x, i, j)),
        ("two-last", lambda x, i, j: x[:, i, j], (x, j, j)),
        ("apart", lambda x, i, j: x[i, :, j], (x, i, j)),
        ("slice", lambda x, i: x[1:3, i, ::2], (x, j)),
        ("broadcast", lambda x, i, j: x[i[:, None], j[None]], (x, i, j)),
        ("apart-broadcast", lambda x, i, j: x[i[:, None], :, j[None]], (x, i, j)),
        ("three", lambda x, i, j: x[i, j, j], (x, i, j)), ("none", lambda x, i: x[None, i], (x, i)),
        ("negative-apart", lambda x, i, j: x[i, 1:, -j], (x, signed, j)),
        ("i32", lambda x, i: x[i], (x, i.int())), ("mixed-int", lambda x, i: x[i, 2], (x, i)),
        ("mixed-int-slice", lambda x, i: x[2, :, i], (x, i)),
        ("list", lambda x: x[[0, 2, 2]], (x,)), ("bool-data", lambda x, i: x[i], (x > 0, i)),
        ("i64-data", lambda x, i, j: x[i, j], (whole(4, 5, dtype=torch.int64), i, j)),
        ("f32", lambda x, i: x[:, i], (x.float(), j)),
        ("bf16", lambda x, i: x[:, i], (x.bfloat16(), j)),
    ):  # fmt: skip
        yield Case(f"index-{name}", function, operands, name != "bf16")
    for name, dim, shape in (
        ("0", 0, (3, 5, 6)),
        ("1", 1, (4, 2, 6)),
        ("-1", -1, (2, 3, 8)),
        ("small", 1, (2, 7, 3)),
    ):
        high = x.shape[dim]
        yield Case(f"gather-{name}", lambda x, i, d=dim: x.gather(d, i), (x, index(high, *shape)))
    yield Case("gather-bool", lambda x, i: x.gather(1, i), (x[0] > 0, index(6, 5, 2)))
    yield Case("take", torch.take, (x, index(120, 3, 2) - 60))
    yield Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (x, index(5, 4, 2, 6)))
    yield Case("index_select", lambda x, i: x.index_select(-2, i), (x, j))
    yield Case("index_select-bool", lambda x, i: x.index_select(0, i), (x > 0, i))
    distinct = torch.tensor([3, 0, 2])
    for accumulate in (False, True):
        for name, places, shape in (
            ("0", (distinct,), (3, 5, 6)), ("0-broadcast", (distinct,), (6,)),
            ("0-scalar", (distinct,), ()), ("01", (distinct, distinct), (3, 6)),
            ("1", (None, distinct), (4, 3, 6)),
            ("12", (None, distinct, distinct), (4, 3)), ("02", (distinct, None, distinct), (3, 5)),
            ("2", (None, None, distinct), (4, 5, 3)), ("all", (distinct, distinct, distinct), (3,)),
            ("grid", (distinct[:, None], torch.tensor([1, 4])), (3, 2, 6)),
            ("negative", (distinct - 4,), (3, 5, 6)),
        ):  # fmt: skip
            indices = [place for place in places if place is not None]

            def put(x, v, *tensors, places=places, accumulate=accumulate):
                tensors = list(tensors)
                positions = [None if place is None else tensors.pop(0) for place in places]
                return torch.ops.aten.index_put(x, positions, v, accumulate)

            yield Case(f"index_put-{name}-{accumulate}", put, (x, normal(*shape), *indices))
    yield Case(
        "index_put-duplicates",
        lambda x, v, i: x.index_put((i,), v, accumulate=True),
        (x, normal(3, 5, 6), torch.tensor([1, 1, 3])),
    )
    yield Case(
        "index_put-mask", lambda x, v, m: torch.ops.aten.index_put(x, [m], v), (x, normal(), x > 0)
    )
    yield Case(
        "index_put-mask-rows",
        lambda x, v, m: torch.ops.aten.index_put(x, [m], v),
        (x, normal(6), x[..., 0] > 0),
    )
    yield Case(
        "index_put-mask-add",
        lambda x, v, m: torch.ops.aten.index_put(x, [m], v, True),
        (x, normal(1), x > 0),
    )
    yield Case("assign", lambda x, v, i: _assign(x, v, i), (x, normal(3, 6), distinct))
    yield Case("assign-mask", lambda x: _assign_mask(x), (x,))
    yield Case(
        "index_put-i64",
        lambda x, i: x.index_put((i,), torch.tensor(7)),
        (whole(5, dtype=torch.int64), distinct),
    )
    yield Case(
        "index_put-bool",
        lambda x, i: x.index_put((i,), torch.tensor(True)),
        (normal(5, dtype=torch.bool), distinct),
    )
    for dim in (0, 1, -1):
        shape = [4, 5, 6]
        shape[dim] = 3
        yield Case(
            f"index_add-{dim}",
            lambda x, s, i, d=dim: x.index_add(d, i, s, alpha=2),
            (x, normal(*shape), torch.tensor([1, 1, 3])),
        )
        yield Case(
            f"index_copy-{dim}",
            lambda x, s, i, d=dim: x.index_copy(d, i, s),
            (x, normal(*shape), distinct),
        )
        yield Case(f"index_fill-{dim}", lambda x, i, d=dim: x.index_fill(d, i, 2.5), (x, distinct))
        where = index(3, 3, 3, 2)
        permuted = (
            torch.stack([torch.randperm(3, generator=RNG) for _ in range(6)])
            .reshape(3, 2, 3)
            .permute(2, 0, 1)
            if dim == 0
            else None
        )
        src = normal(3, 3, 3)
        part = src[..., :2].clone()  # PyTorch has no gradient for a larger source
        base = normal(4, 5, 6)
        if permuted is not None:
            yield Case("scatter-0", lambda x, i, s: x.scatter(0, i, s), (base, permuted, part))
        yield Case(f"scatter-value-{dim}", lambda x, i, d=dim: x.scatter(d, i, 1.5), (base, where))
        yield Case(
            f"scatter_add-{dim}", lambda x, i, s, d=dim: x.scatter_add(d, i, s), (base, where, part)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin"):
            for own in (True, False):
                yield Case(
                    f"scatter_reduce-{reduce}-{own}-{dim}",
                    lambda x, i, s, d=dim, r=reduce, o=own: x.scatter_reduce(
                        d, i, s, r, include_self=o
                    ),
                    (base, where, src[..., :2].clone()),
                )
    for reduce in ("amax", "amin"):
        yield Case(
            f"scatter_reduce-{reduce}-ties",
            lambda x, i, s, r=reduce: x.scatter_reduce(0, i, s, r),
            (whole(5, 4), index(5, 9, 4), whole(9, 4)),
        )
    yield Case(
        "scatter_reduce-i64",
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
        (whole(5, dtype=torch.int64), index(5, 9), whole(9, dtype=torch.int64)),
    )
    yield Case(
        "scatter_add-f32",
        lambda x, i, s: x.scatter_add(0, i, s),
        (normal(5, dtype=torch.float32), index(5, 9), normal(9, dtype=torch.float32)),
    )
    yield Case(
        "scatter-i64",
        lambda x, i: x.scatter(1, i, 1),
        (whole(3, 5, dtype=torch.int64), index(5, 3, 1)),
    )
    yield Case(
        "scatter-bool",
        lambda x, i: x.scatter(1, i, True),
        (normal(3, 5, dtype=torch.bool), index(5, 3, 1)),
    )
    yield Case(
        "scatter-reduce-add",
        lambda x, i, s: x.scatter(0, i, s, reduce="add"),
        (normal(5), index(5, 4), normal(4)),
        False,
    )
    yield Case(
        "masked_scatter",
        lambda x, m, s: x.masked_scatter(m, s),
        (normal(3, 4), normal(3, 4, dtype=torch.bool), normal(20)),
    )
    yield Case(
        "masked_scatter-broadcast",
        lambda x, m, s: x.masked_scatter(m, s),
        (normal(3, 4), normal(4, dtype=torch.bool), normal(20)),
    )
    for padding in (None, 0, 2, -1):
        yield Case(
            f"embedding-{padding}",
            lambda w, i, p=padding: F.embedding(i, w, padding_idx=p),
            (normal(5, 3), index(5, 4, 6)),
        )
    yield Case(
        "embedding-i32",
        lambda w, i: F.embedding(i, w),
        (normal(5, 3), index(5, 4, dtype=torch.int32)),
    )
    for mode in ("sum", "mean", "max"):
        weight, places, offsets = normal(7, 3), index(7, 9), torch.tensor([0, 2, 2, 6])
        yield Case(
            f"embedding_bag-{mode}",
            lambda w, i, o, m=mode: F.embedding_bag(i, w, o, mode=m),
            (weight, places, offsets),
        )
        yield Case(
            f"embedding_bag-{mode}-matrix",
            lambda w, i, m=mode: F.embedding_bag(i, w, mode=m),
            (weight, index(7, 3, 4)),
        )
        yield Case(
            f"embedding_bag-{mode}-padding",
            lambda w, i, o, m=mode: F.embedding_bag(i, w, o, mode=m, padding_idx=2),
            (weight, places, offsets),
        )
    yield Case(
        "embedding_bag-weights",
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
        (weight, places, offsets, normal(9)),
    )
    yield Case(
        "embedding_bag-last",
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum", include_last_offset=True),
        (weight, places, torch.tensor([0, 4, 9])),
    )
    rows = torch.tensor([3, 0, 3, 1])
    for reduce in ("prod", "mean", "amax", "amin"):
        for own in (True, False):
            yield Case(
                f"index_reduce-{reduce}-{own}",
                lambda x, i, s, r=reduce, o=own: x.index_reduce(1, i, s, r, include_self=o),
                (whole(3, 5), rows, whole(3, 4)),
            )
    yield Case(
        "index_reduce-i64",
        lambda x, i, s: x.index_reduce(-1, i, s, "mean"),
        (whole(3, 5, dtype=torch.int64), rows, whole(3, 4, dtype=torch.int64)),
    )


def _assign(x, v, i):
    y = x.clone()
    y[1:4, 2] = v
    y[i, 1] = v * 2
    return y


def _assign_mask(x):
    y = x.clone()
    y[y > 0] = 0.0
    return y
