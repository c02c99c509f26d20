"""The compiler of groups of functions to object files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tvm
from tvm import tirx

from ..._progress import advance, describe
from ...ir.module import unused
from ..threads import default_threads
from . import arguments
from .common import without_definitions
from .declarations import Declarations
from .directory import Directory
from .early import Early
from .entries import Entry
from .generic import shared
from .lower import SYMBOL, canonical_name, environment, is_generated, key, object_file
from .objects import Embedded, UnsupportedObject, embedded

#: The numbers of kernels and of short functions that are compiled together.
_KERNELS, _TOGETHER = 4, 16

#: The number that a family of functions counts at most: most of them share code.
_OF_FAMILY = 3


class Compiler:
    """A compiler of functions to object files. It runs in threads, and uses the object files of a
    directory.

    Parameters
    ----------
    target : tvm.target.Target
        The target of the compilation.
    directory : Directory or None
        The directory of object files.
    declarations : Declarations
        The declarations among the functions.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        directory: Directory | None,
        declarations: Declarations,
    ):
        self._target, self._directory, self._declarations = target, directory, declarations
        self._environment = [] if directory is None else environment(target)

    def begin(self, groups: Sequence[Sequence[tirx.PrimFunc]], early: Early) -> None:
        """Begin to compile groups of kernels in threads, with one core for the caller."""
        # TVM may compile a single group.
        threads = self._threads() - 1 if len(groups) > 1 else 0
        early.begin(groups, self._in_context(self._group), threads)

    def compile(
        self, functions: Sequence[tirx.PrimFunc], early: Early | None = None
    ) -> tuple[list[Embedded], dict[str, Entry]]:
        """Return the assembly of functions, and the entry of each function by its name."""
        early = Early(self._declarations) if early is None else early
        made = self._each(groups_of(functions, early), early)
        if self._directory is not None:
            self._directory.trim()
        return [unit for unit, _ in made], {n: e for _, own in made for n, e in own.items()}

    def _each(self, groups: Mapping[int, Sequence[tirx.PrimFunc]], early: Early) -> list[Unit]:
        describe(f"compiling {sum(map(len, groups.values()))} functions", len(groups))

        def counted(index: int, group: Sequence[tirx.PrimFunc]) -> Unit:
            made = self._group(index, group)
            advance()
            return made

        threads = self._threads()
        if threads == 1:
            return [counted(i, group) for i, group in groups.items()]
        begun = early.taken(groups)
        for future in begun.values():
            future.add_done_callback(lambda _: advance())
        others = {i: group for i, group in groups.items() if i not in begun}
        with ThreadPoolExecutor(threads) as executor:
            made = executor.map(self._in_context(counted), others, others.values())
            units = dict(zip(others, made, strict=True))
        return [begun[i].result() if i in begun else units[i] for i in groups]

    def _threads(self) -> int:
        """Return the number of threads: one with instruments, which expect one pass at a time."""
        return 1 if tvm.transform.PassContext.current().instruments else default_threads()

    def _in_context(
        self, compile_one: Callable[[int, Sequence[tirx.PrimFunc]], Unit]
    ) -> Callable[[int, Sequence[tirx.PrimFunc]], Unit]:
        """Return a function that compiles in a thread with the options of the pass context."""
        context = tvm.transform.PassContext.current()
        options = {"opt_level": context.opt_level, "config": dict(context.config)}

        def in_thread(index: int, group: Sequence[tirx.PrimFunc]) -> Unit:
            with tvm.transform.PassContext(**options), self._target:
                return compile_one(index, group)

        return in_thread

    def _group(self, index: int, group: Sequence[tirx.PrimFunc]) -> Unit:
        """Return the assembly of a group of functions that are compiled together, and their
        entries. The index of the group makes their labels unique."""
        functions: dict[str, tirx.PrimFunc] = {}
        called: dict[str, str] = {}
        for function in group:
            symbol = str(function.attrs["global_symbol"])
            name = unused(canonical_name(symbol), functions)
            functions[name] = function
            called[name] = symbol
        labels = {symbol: f"relax_grad_{index}_{i}" for i, symbol in enumerate(called.values())}
        if self._directory is None:
            return unit_of(self._compiled(functions), called, labels)
        contents = {
            name: self._declarations.content(function) for name, function in functions.items()
        }
        identity = key(contents, self._environment)
        stored = self._directory.load(identity)
        if stored is not None:
            try:
                return unit_of(Compiled.read(stored), called, labels)
            except UnsupportedObject:
                pass  # compiled again
        compiled = self._compiled(functions)
        result = unit_of(compiled, called, labels)
        self._directory.store(identity, compiled.written(), description=", ".join(functions))
        return result

    def _compiled(self, functions: Mapping[str, tirx.PrimFunc]) -> Compiled:
        """Compile functions together, after generating the declared ones."""
        is_checked = {
            name: arguments.parameters(function) is not None for name, function in functions.items()
        }
        defined = {
            name: without_definitions(self._declarations.defined(function))
            for name, function in functions.items()
        }
        # Code for several functions has no checks.
        scheduled = {
            name: function
            for name, function in defined.items()
            if is_checked[name] and not is_generated(function)
        }
        numbers: dict[str, tuple[str, tuple[int, ...]]] = {name: (name, ()) for name in defined}
        tensors: dict[str, int] = {}
        for code in shared(scheduled):
            first, *others = code.values
            defined[first] = code.function
            for name in others:
                del defined[name]
            if code.values[first]:
                tensors[first] = code.tensors
            numbers.update({name: (first, own) for name, own in code.values.items()})
        checked = [name for name in defined if is_checked[name]]
        return Compiled(object_file(defined, self._target, checked, tensors), numbers)


#: The assembly of a group of functions, and their entries by name.
Unit = tuple[Embedded, dict[str, Entry]]


@dataclass(frozen=True)
class Compiled:
    """An object file.

    Attributes
    ----------
    data : bytes
        The object file.
    numbers : dict[str, tuple[str, tuple[int, ...]]]
        Of each function, the name of the function in the object file, and the numbers that it
        reads from a table.
    """

    data: bytes
    numbers: dict[str, tuple[str, tuple[int, ...]]]

    def written(self) -> bytes:
        """Return the contents of a file that :meth:`read` reads."""
        return json.dumps(self.numbers).encode() + b"\n" + self.data

    @staticmethod
    def read(stored: bytes) -> Compiled:
        """Return the object file of a file's contents; raise UnsupportedObject for others."""
        header, _, data = stored.partition(b"\n")
        try:
            numbers = {
                name: (code, tuple(map(int, own)))
                for name, (code, own) in json.loads(header).items()
            }
        except (ValueError, AttributeError, TypeError) as error:
            raise UnsupportedObject("no names of functions") from error
        return Compiled(data, numbers)


def unit_of(compiled: Compiled, called: Mapping[str, str], labels: Mapping[str, str]) -> Unit:
    """Return the assembly of an object file and the entries of its functions.

    Parameters
    ----------
    compiled : Compiled
        The object file.
    called : Mapping[str, str]
        The names by which a program calls the functions, by their names in the object file.
    labels : Mapping[str, str]
        The labels of the functions, by the names of calls.
    """
    if set(compiled.numbers) != set(called):
        raise UnsupportedObject("the functions of another group")
    codes = {code: labels[called[code]] for code, _ in compiled.numbers.values()}
    entries = {
        called[name]: Entry(labels[called[name]], codes[code], numbers)
        for name, (code, numbers) in compiled.numbers.items()
    }
    unit = embedded(compiled.data, {SYMBOL + code: label for code, label in codes.items()})
    return unit, entries


def groups_of(functions: Sequence[tirx.PrimFunc], early: Early) -> dict[int, list[tirx.PrimFunc]]:
    """Divide functions into groups that are compiled together: kernels, then the others, which are
    short. Each group has an index.

    If each were compiled alone, the setup and the end of a module would take a tenth of the time of
    a kernel, and half the time of a short function. Functions with equal names but for numbers may
    share their code, and are in one group. The groups do not depend on the number of threads, so
    that machines with different numbers of cores can share a directory.
    """
    groups, functions = early.divided(functions)
    kernels: list[tirx.PrimFunc] = []
    families: dict[str, list[tirx.PrimFunc]] = {}
    for function in functions:
        if is_generated(function):
            kernels.append(function)
        else:
            name = canonical_name(str(function.attrs["global_symbol"]))
            families.setdefault(name, []).append(function)
    short: list[list[tirx.PrimFunc]] = []
    room = 0
    for family in families.values():
        if room <= 0:
            short.append([])
            room = _TOGETHER
        short[-1] += family
        room -= min(len(family), _OF_FAMILY)
    return {**groups, **dict(enumerate(of_kernels(kernels) + short, early.number))}


def of_kernels(kernels: list[tirx.PrimFunc]) -> list[list[tirx.PrimFunc]]:
    """Divide kernels into groups."""
    return [kernels[i : i + _KERNELS] for i in range(0, len(kernels), _KERNELS)]
