"""The sizes of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

from ..language.builder import Extent

#: The most units of a layer: int32 counts the elements of the copies of its weight.
MOST_UNITS = 2**13

#: The numbers of slopes and gates of each unit, by the name of the layer.
PARTS = {"lstm": (6, 4), "gru": (4, 3), "gru_reset": (5, 3), "rnn": (1, 1)}


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer. The numbers of steps and sequences may be symbolic (int32).

    Attributes
    ----------
    kind : str
        ``"lstm"``, ``"gru"``, ``"gru_reset"`` (the state is reset before the product),
        ``"rnn_tanh"`` or ``"rnn_relu"``; for the gradient also ``"rnn"``.
    steps, batch : int or tirx.PrimExpr
        The extents.
    size : int
        The number of units.
    """

    kind: str
    steps: Extent
    batch: Extent
    size: int

    @property
    def gates(self) -> int:
        return self._parts[1]

    @property
    def slopes(self) -> int:
        return self._parts[0]

    @property
    def _parts(self) -> tuple[int, int]:
        return PARTS["rnn" if self.kind.startswith("rnn") else self.kind]

    @property
    def resets_first(self) -> bool:
        """Whether the gate n of a GRU has a separate product."""
        return self.kind == "gru_reset"

    def shape(self, parts: int = 1) -> list[Extent]:
        """Return the shape of values of each step."""
        return [self.steps, self.batch, parts * self.size]

    def initial(self) -> list[Extent]:
        return [self.batch, self.size]

    def weight(self) -> list[int]:
        return [self.gates * self.size, self.size]
