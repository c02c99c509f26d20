"""The roles of a model's tensors, and the batches that an import takes."""

from __future__ import annotations

from typing import NamedTuple


class Role(NamedTuple):
    """The role of a constant of a model, and the reason."""

    kind: str
    reason: str


class Explanation(dict[str, Role]):
    """The roles of constants by their names. As text, a table.

    Attributes
    ----------
    batch : str
        The numbers of rows that the import takes, and the reason if there is only one; the last
        line of the text. It is empty if the import has symbolic extents.
    """

    #: Tells the numbers of rows as text, by a second import.
    _rows: object = ""

    @property
    def batch(self) -> str:
        return str(self._rows)

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:{width}}  {role.kind:8}  {role.reason}" for name, role in self.items()]
        return "\n".join([*lines, *([f"batch: {self.batch}"] if self.batch else [])])
