"""The types of the arguments and of parts of the result of ``from_model``, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: The extents of inputs, by the names of the inputs. A string is a symbol.
Shapes = Mapping[str, Sequence[int | str]]

#: The symbols of axes of inputs, by the names of the inputs.
DynamicShapes = Mapping[str, Mapping[int, str]]


class Copy(NamedTuple):
    """A tensor that is another one, or its transpose; ``place`` is that in the file."""

    name: str
    original: str
    is_transposed: bool
    place: str

    def __str__(self) -> str:
        return f"{self.original}{', transposed' if self.is_transposed else ''}"


class Origin(NamedTuple):
    """The model of an import, the places of its tensors there by the names of the import, and the
    copies of tensors."""

    model: object
    places: dict[str, str]
    copies: Sequence[Copy]


def check_shapes(shapes: object) -> None:
    """Raise TypeError if a value is neither extents by the names of inputs nor None."""
    for name, extents in _mapping("shapes", shapes, '{"x": (1, 3, "height", "width")}').items():
        if isinstance(extents, (str, bytes)) or not isinstance(extents, Sequence):
            raise TypeError(
                f"shapes: {name} must have a sequence of extents, such as (1, 3, 64, 64), but it "
                f"has {extents!r}"
            )


def check_dynamic_shapes(dynamic_shapes: object) -> None:
    """Raise TypeError if a value is neither symbols by the names of inputs and their axes nor
    None."""
    for name, symbols in _mapping("dynamic_shapes", dynamic_shapes, '{"x": {0: "batch"}}').items():
        is_fitting = isinstance(symbols, Mapping) and all(
            isinstance(axis, int) and not isinstance(axis, bool) and isinstance(symbol, str)
            for axis, symbol in symbols.items()
        )
        if not is_fitting:
            raise TypeError(
                f'dynamic_shapes: {name} must have names by axes, such as {{0: "batch"}}, but it '
                f"has {symbols!r}"
            )


def check_constants(constants: object) -> None:
    """Raise TypeError if a value is neither values by the names of inputs nor None."""
    _mapping("constants", constants, '{"sr": 16000}')


def check_tied(tied: object) -> None:
    """Raise TypeError if a value is neither a truth value nor names by names."""
    if isinstance(tied, bool):
        return
    is_fitting = isinstance(tied, Mapping) and all(
        isinstance(name, str) for pair in tied.items() for name in pair
    )
    if not is_fitting:
        raise TypeError(
            "tied must be True, False or a mapping from the names of copies to the names of "
            f'their originals, such as {{"head.weight": "words.weight"}}, but it is {tied!r}'
        )


def _mapping(argument: str, value: object, example: str) -> Mapping[str, object]:
    """Return a mapping from the names of inputs, an empty one for None; raise TypeError for other
    values."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(
            f"{argument} must be a mapping from the names of inputs, such as {example}, but it "
            f"is {value!r}"
        )
    return value
