"""The choice of variables by an argument such as ``wrt``: as variables, by name, or by position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from tvm import relax

from .._validation import alternatives, is_integer

T = TypeVar("T")


class Choices(Generic[T]):
    """The variables, or the names of such, that an argument may choose.

    Parameters
    ----------
    owner : str
        The function that has them, for errors.
    noun : str
        The noun of one, such as ``"parameter"``.
    candidates : Iterable[tuple[str, T]]
        The candidates in order, with their names. Several may have the same name.
    by_position : bool
        Whether an integer chooses a candidate too.
    """

    def __init__(
        self,
        owner: str,
        noun: str,
        candidates: Iterable[tuple[str, T]],
        *,
        by_position: bool = False,
    ):
        self._owner, self._noun, self._by_position = owner, noun, by_position
        self._candidates: list[T] = []
        self._named: dict[str, list[T]] = {}
        for name, candidate in candidates:
            self._candidates.append(candidate)
            self._named.setdefault(name, []).append(candidate)

    def find(self, argument: str, item: object) -> T:
        """Return the candidate that an item of an argument chooses.

        Parameters
        ----------
        argument : str
            The name of the argument, for errors.
        item : relax.Var or str or int
            The item.

        Raises
        ------
        ValueError
            If the item chooses no candidate, or several of one name.
        """
        name = item if isinstance(item, str) else getattr(item, "name", "")
        namesakes = self._named.get(name, []) if isinstance(name, str) else []
        if isinstance(item, str):
            if len(namesakes) == 1:
                return namesakes[0]
            if namesakes:
                remedy = "a position" if self._by_position else "the variable itself"
                raise ValueError(
                    f"{argument}: {item!r} is ambiguous, as {len(namesakes)} {self._noun}s of "
                    f"{self._owner} have this name; give {remedy}"
                )
        elif isinstance(item, relax.Var):
            for namesake in namesakes:
                if item.same_as(namesake):
                    return namesake
        elif self._by_position and is_integer(item):
            place = int(item)  # type: ignore[call-overload]  # is_integer has said so
            if 0 <= place < len(self._candidates):
                return self._candidates[place]
        message = f"{argument}: {self._owner} has no {self._noun} {item!r}"
        if isinstance(item, relax.Var) and namesakes:
            remedy = "the name or a position" if self._by_position else "the name"
            message += f"; it is a different variable with the name {item.name}, so give {remedy}"
        else:
            message += f"; {alternatives(str(name), list(self._named))}"
        raise ValueError(message)

    def select(self, argument: str, items: Iterable) -> list[T]:
        """Return the candidates that the items of an argument choose, in the order of the items.

        Raises
        ------
        ValueError
            As :meth:`find`, or if two items choose the same candidate.
        """
        selected: dict[T, None] = {}
        for item in items:
            candidate = self.find(argument, item)
            if candidate in selected:
                name = getattr(candidate, "name", candidate)
                raise ValueError(f"{argument}: {name} appears more than once")
            selected[candidate] = None
        return list(selected)
