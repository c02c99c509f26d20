"""Kernels that are compiled while the passes of a pipeline run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from tvm import tirx

from .declarations import Declarations

_Unit = TypeVar("_Unit")

#: The symbol of a kernel, and the digest of its content.
_Member = tuple[str, str]


class Early(Generic[_Unit]):
    """Groups of declared kernels, which threads compile while a pipeline runs its next passes.

    A later pass may change, replace or remove a kernel. The result for a group is used only if all
    its kernels are unchanged at the end. Leaving the context ends the threads.

    Parameters
    ----------
    declarations : Declarations
        The declarations among the kernels.

    Attributes
    ----------
    number : int
        The number of groups.
    """

    def __init__(self, declarations: Declarations):
        self._declarations = declarations
        self.number = 0
        self._groups: dict[_Member, int] = {}
        self._begun: dict[int, tuple[list[_Member], Future[_Unit]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Early:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def begin(
        self,
        groups: Sequence[Sequence[tirx.PrimFunc]],
        compile_one: Callable[[int, Sequence[tirx.PrimFunc]], _Unit],
        threads: int,
    ) -> None:
        """Note groups of kernels, and begin to compile them.

        Parameters
        ----------
        groups : Sequence[Sequence[tirx.PrimFunc]]
            Groups of declarations with global symbols.
        compile_one : Callable
            Takes the index of a group and the group; returns the compiled group.
        threads : int
            The number of threads. Without threads, the groups are only noted: groups are the keys
            of cached object files, and do not depend on threads.
        """
        self.number = len(groups)
        self._threads = ThreadPoolExecutor(threads) if threads > 0 else None
        for i, group in enumerate(groups):
            members = list(map(self._member, group))
            self._groups.update(dict.fromkeys(members, i))
            if self._threads is not None:
                self._begun[i] = members, self._threads.submit(compile_one, i, group)

    def divided(
        self, functions: Sequence[tirx.PrimFunc]
    ) -> tuple[dict[int, list[tirx.PrimFunc]], list[tirx.PrimFunc]]:
        """Return the unchanged kernels by the index of their group, and the other functions."""
        groups: dict[int, list[tirx.PrimFunc]] = {}
        others: list[tirx.PrimFunc] = []
        for function in functions:
            is_declared = self.number > 0 and self._declarations.has(function)
            i = self._groups.get(self._member(function)) if is_declared else None
            (others if i is None else groups.setdefault(i, [])).append(function)
        return groups, others

    def taken(self, groups: Mapping[int, Sequence[tirx.PrimFunc]]) -> dict[int, Future[_Unit]]:
        """Return the results for groups of :meth:`divided` that threads have begun to compile, and
        let threads begin no other group."""
        return {
            i: future
            for i, (members, future) in self._begun.items()
            if not future.cancel() and list(map(self._member, groups.get(i, []))) == members
        }

    def _member(self, function: tirx.PrimFunc) -> _Member:
        return str(function.attrs["global_symbol"]), self._declarations.content(function)
