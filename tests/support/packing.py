"""Layouts with and without split axes, as permutations of the elements of an array."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import strategies as st


@st.composite
def layouts(draw, plain: str, split: str = "NC"):
    """Draw a layout: the axes of ``plain`` in any order, with parts split off some of the axes in
    ``split``."""
    parts = [f"{draw(st.integers(2, 3))}{name.lower()}" for name in split if draw(st.booleans())]
    if len(parts) > 1 and draw(st.booleans()):
        parts = [f"[{''.join(draw(st.permutations(parts)))}]"]
    return "".join(draw(st.permutations([*plain, *parts])))


def parts_of(layout: str) -> dict[str, int]:
    """Return the split axes with the extents of their parts: ``{"C": 4}`` for ``"NCHW4c"``."""
    return {name.upper(): int(size) for size, name in re.findall(r"(\d+)([a-z])", layout)}


def places(shape, plain: str, layout: str) -> np.ndarray:
    """Return for each element of a tensor in ``layout`` its position in the ``plain`` tensor; -1
    for padding."""
    parts = parts_of(layout)
    sizes = [parts.get(name, 1) for name in plain]
    numbers = np.arange(np.prod(shape)).reshape(shape)
    fill = [(0, -extent % size) for extent, size in zip(shape, sizes, strict=True)]
    numbers = np.pad(numbers, fill, constant_values=-1)
    # Two axes for each: the rest of the axis, and its part.
    halves = [
        half
        for extent, size in zip(numbers.shape, sizes, strict=True)
        for half in (extent // size, size)
    ]
    letters = "".join(re.findall("[A-Za-z]", layout))
    order = [2 * plain.index(letter.upper()) + letter.islower() for letter in letters]
    unsplit = [axis for axis in range(len(halves)) if axis not in order]
    numbers = numbers.reshape(halves).transpose(order + unsplit)
    extents = iter(numbers.shape)
    stored = []
    for axis in re.findall(r"\[.*?\]|[A-Za-z]", layout):
        held = [next(extents) for _ in re.findall("[A-Za-z]", axis)]
        stored.append(int(np.prod(held)))
    return numbers.reshape(stored)


def in_layout(array: np.ndarray, plain: str, layout: str) -> np.ndarray:
    """Store an array with the axes ``plain`` in a layout."""
    at = places(array.shape, plain, layout)
    return np.where(at < 0, array.dtype.type(0), array.ravel()[at])
