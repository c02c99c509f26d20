"""The texts of calls for ``relax-grad doctor --plan``, such as
``conv:8x64x56x56,64x64x3x3,stride=2``: shapes, and options after them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

#: The largest extent of a tensor that kernels take: they count elements in int32.
MOST = 2**31 - 1

_NUMBERS = re.compile(r"[0-9]+(x[0-9]+)*")


@dataclass(frozen=True)
class Spec:
    """A call.

    Attributes
    ----------
    text : str
        The text.
    shapes : list[list[int]]
        The shapes.
    options : dict[str, str]
        The values of options, or their defaults.
    noun : str
        The call in errors, such as ``"convolution"``.
    """

    text: str
    shapes: list[list[int]]
    options: dict[str, str]
    noun: str

    def each_axis(self, name: str, rank: int, least: int = 1) -> list[int]:
        """Return the numbers of an option for all axes, of at least ``least``."""
        numbers = _numbers(self.options[name]) or []
        numbers = numbers * rank if len(numbers) == 1 else numbers
        if len(numbers) != rank or min(numbers) < least:
            raise ValueError(
                "stride and dilation (1 or more) and padding must be one number or "
                f"{rank}, such as {'x'.join(['1'] * rank)}, but the {self.noun} is {self.text!r}"
            )
        return numbers

    def check_sizes(self, shapes: Iterable[Sequence[int]]) -> None:
        """Raise ValueError if a tensor has more elements than kernels count."""
        if max(map(prod, shapes)) > MOST:
            raise ValueError(
                f"each tensor of a {self.noun} must have at most {MOST} elements, but it is "
                f"{self.text!r}"
            )


@dataclass(frozen=True)
class Form:
    """The form of the texts of a kind of calls.

    Attributes
    ----------
    noun, form : str
        The call in errors, such as ``"convolution"``, and the form of its texts.
    ranks : tuple[tuple[int, int], ...]
        The least and the most axes of each shape.
    options : Mapping[str, str]
        The options and their defaults.
    words : Mapping[str, Sequence[str]]
        The values of options that are words.
    """

    noun: str
    form: str
    ranks: tuple[tuple[int, int], ...]
    options: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def parse(self, text: str) -> Spec:
        """Return the call of a text, which begins with the kind and a colon.

        Raises
        ------
        ValueError
            If the text has another form, or an extent is 0.
        """
        parts, number = text.partition(":")[2].split(","), len(self.ranks)
        shapes = [_numbers(part) or [] for part in parts[:number]]
        given = dict(part.partition("=")[::2] for part in parts[number:])
        options = {**self.options, **given}
        is_formed = (
            len(shapes) == number
            and all(
                least <= len(shape) <= most
                for shape, (least, most) in zip(shapes, self.ranks, strict=True)
            )
            and not given.keys() - self.options.keys()
            and all(options[name] in words for name, words in self.words.items())
        )
        if not is_formed:
            raise self.error(text)
        if any(0 in shape for shape in shapes):
            raise ValueError(f"each extent of a {self.noun} must be at least 1, but it is {text!r}")
        return Spec(text, shapes, options, self.noun)

    def error(self, text: str) -> ValueError:
        """Return the error for a text of another form."""
        return ValueError(f"a {self.noun} must be {self.form}, but it is {text!r}")


def _numbers(text: str) -> list[int] | None:
    """Return the numbers of ``"3x4"``."""
    return [int(part) for part in text.split("x")] if _NUMBERS.fullmatch(text) else None
