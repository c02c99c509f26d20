"""Layout strings against permutations of element positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import layouts, parts_of, places
from tvm import tirx

from relax_grad.ir.layout import Layout


@settings(deadline=None, derandomize=True)
@given(layouts("NCW"), layouts("NCW"), st.tuples(*[st.integers(1, 3)] * 3))
def test_indices_in_two_layouts(source, target, sizes):
    """The index maps of two layouts agree, separately and together; together, common parts become
    separate axes."""
    shape = [size * parts_of(source).get(name, 1) for name, size in zip("NCW", sizes, strict=True)]
    stored, expected = places(shape, "NCW", source), places(shape, "NCW", target)
    for own, other in ([Layout.of(source), Layout.of(target)], Layout.together(source, target)):
        extents = own.extents(stored.shape)
        filled_up = other.filled_up({name: tirx.IntImm("int64", n) for name, n in extents.items()})
        for index in np.ndindex(expected.shape):
            at = other.logical([tirx.IntImm("int64", i) for i in index])
            inside = all(int(at[name]) < extents[name] for name in filled_up)
            element = stored[tuple(map(int, own.stored(at)))] if inside else -1
            assert element == expected[index]


def test_symbolic_extents():
    """A symbolic extent is a multiple of the part that the layout splits off."""
    n = tirx.Var("n", "int64")
    split, plain = Layout.together("NCHW4c", "NCHW")
    extents = split.extents([1, n, 5, 6, 4])
    assert split.filled_up(extents) == []
    assert Layout.of("NCHW8c").filled_up(extents) == ["C"]
    assert plain.filled_up(extents) == []


@pytest.mark.parametrize(
    ("text", "names", "positions", "parts"),
    [
        ("NCHW", "NCHW", [0, 1, 2, 3], {}),
        ("N16cHWC", "NHWC", [0, 2, 3, 4], {"C": 16}),
        ("NC[2n4c]W", "NCW", [0, 1, 3], {"N": 2, "C": 4}),
    ],
)
def test_names_and_parts(text, names, positions, parts):
    layout = Layout.of(text)
    assert (layout.names, layout.positions(names), layout.parts) == (names, positions, parts)
