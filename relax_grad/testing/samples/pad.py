"""Samples of padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np

from ._sample import Sample, register_samples

if TYPE_CHECKING:
    import torch

_N = {0: {0: "n"}}
_MODES = ("constant", "reflect", "replicate", "circular")
_CASES: tuple[
    tuple[str, tuple[str, ...], tuple[int, ...], tuple[int, ...], dict[int, dict[int, str]] | None],
    ...,
] = (
    ("images", _MODES, (2, 1, 3, 4), (0, 0, 0, 0, 1, 2, 3, 1), {0: {0: "n", 2: "h", 3: "w"}}),
    ("wider than the axis", _MODES[1:], (4,), (9, 7), _N),
    ("an axis of extent 1", _MODES[1:], (1, 2), (2, 3, 0, 0), _N),
    ("cropped on one side", _MODES, (4, 3), (-1, 2, 1, -2), _N),
    ("more cropped than there is", _MODES, (3,), (-5, 7), _N),
    ("cropped on both sides", _MODES[1:2], (5,), (-1, -2), _N),
    ("another axis empty", _MODES[3:], (0, 3), (0, 0, 1, 2), None),
)


_EMPTY: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("an empty axis", (0, 2), (1, 2, 0, 0)),
    ("nothing left", (2, 3), (-1, -1, 0, 0)),
    ("0-d", (), ()),
)


@register_samples("relax.nn.pad")
def pad(rng: np.random.Generator) -> Iterator[Sample]:
    for note, modes, shape, widths, symbolic in _CASES:
        for mode in modes:
            yield Sample(
                [rng.normal(size=shape)],
                {"pad_width": widths, "pad_mode": mode},
                symbolic=symbolic,
                torch=lambda torch, x, widths=widths, mode=mode: padded(torch, x, widths, mode),
                note=f"{mode}, {note}",
            )
    for note, shape, widths in _EMPTY:
        yield Sample(
            [rng.normal(size=shape)],
            {"pad_width": widths, "pad_value": 2.5},
            symbolic=None if 0 in shape or not shape else {0: {1: "m"}},
            torch=lambda torch, x, widths=widths: padded(torch, x, widths, "constant", 2.5),
            note=f"constant, {note}",
        )


@register_samples("relax.grad.pad_backward_data")
def pad_backward_data(rng: np.random.Generator) -> Iterator[Sample]:
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield Sample(
            [rng.normal(size=(2, 6)), (2, 3)],
            {"pad_width": (0, 0, 2, 1), "pad_mode": mode},
            note=mode,
        )


def padded(
    torch: ModuleType, x: torch.Tensor, widths: Sequence[int], mode: str, value: float = 0.0
) -> torch.Tensor:
    """Pad in PyTorch: by its own operator if that supports the widths, else by indices from NumPy's
    pad."""
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    images = zip(x.shape[2:], pairs[2:], strict=True)
    if x.ndim == 4 and not any(widths[:4]) and all(0 <= w < n for n, pair in images for w in pair):
        inner = [width for pair in pairs[:1:-1] for width in pair]
        return torch.nn.functional.pad(x, inner, mode, value if mode == "constant" else None)
    modes: dict[str, Literal["reflect", "edge", "wrap"]] = {
        "reflect": "reflect",
        "replicate": "edge",
        "circular": "wrap",
    }
    for axis, (before, after) in enumerate(pairs):
        added = max(before, 0), max(after, 0)
        if mode == "constant":
            behind = (0, 0) * (x.ndim - 1 - axis)
            x = torch.nn.functional.pad(x, (*behind, *added), value=value)
            places = np.arange(x.shape[axis])
        elif any(added):
            places = np.pad(np.arange(x.shape[axis]), added, modes[mode])
        else:
            places = np.arange(x.shape[axis])
        places = places[max(-before, 0) : len(places) - max(-after, 0)]
        x = x.index_select(axis, torch.tensor(places))
    return x
