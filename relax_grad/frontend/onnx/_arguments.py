"""The types of the arguments of ``from_model``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The extents of inputs, by the names of the inputs. A string is a symbol.
Shapes = Mapping[str, Sequence[int | str]]

#: The symbols of axes of inputs, by the names of the inputs.
DynamicShapes = Mapping[str, Mapping[int, str]]
