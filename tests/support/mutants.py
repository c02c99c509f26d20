"""Faults planted in the package, and whether its tests find them: ``make test-mutants``.

A mutant is the package with one small fault: a sign, an axis, a number that is off by one, a dtype,
a dropped term, a negated condition. The tests nearest to the changed module run first, then those
marked ``core``, until one fails. A mutant that survives is a fault that the suite would not see, or
no fault at all; a person decides which. The draw is fixed by ``--seed``, so that a run before and
after a change of the suite has the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import mirror
from affected import nearest_tests

__all__ = ["Mutant", "draw", "mutants_of", "outcome", "planted"]

#: The parts of the package, of which each has the same number of mutants.
ROOMS = (
    *("rules", "topi", "legalize", "op", "tir", "autodiff", "cpu/kernel", "cpu/passes"),
    *("cpu/dispatch", "frontend/torch", "frontend/onnx", "training"),
)

_SWAPPED: dict[type[ast.AST], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Mult: "+",
    ast.FloorDiv: "*",
}
_OPERATORS = {"add": "subtract", "subtract": "add", "maximum": "minimum", "minimum": "maximum"}
_DTYPES = {"float32": "float64", "float64": "float32", "int64": "int32", "bool": "int8"}


@dataclass(frozen=True)
class Mutant:
    """A fault: a replacement of the text between two positions of a file, in bytes."""

    path: str
    kind: str
    start: int
    stop: int
    text: str

    def applied(self, source: str) -> str:
        """Return the source of the file with the fault."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.stop :]).decode()

    def described(self, source: str) -> str:
        """Return the place of the fault, its kind, and the line with it."""
        line = source.encode()[: self.start].count(b"\n")
        changed = self.applied(source).splitlines()[line].strip()
        return f"{self.path}:{line + 1}: {self.kind}: {changed}"


class _Faults(ast.NodeVisitor):
    """The faults that can be planted in a module."""

    def __init__(self, path: str, source: str):
        self.found: list[Mutant] = []
        self._path = path
        lines = source.encode().splitlines(keepends=True)
        self._starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
        self._data = source.encode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._data[start:stop].decode()

    def _operand(self, node: ast.AST) -> str:
        """Return the text of an operand, whose parentheses do not belong to it."""
        text = self._text(node)
        return f"({text})" if isinstance(node, _COMPOSED) else text

    def _plant(self, kind: str, node: ast.AST, text: str) -> None:
        self.found.append(Mutant(self._path, kind, *self._span(node), text))

    # Messages, types and assertions are not behaviour.

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        left, right = self._operand(node.left), self._operand(node.right)
        if any(isinstance(side, _SEQUENCES) for side in (node.left, node.right)):
            return
        swapped = _SWAPPED.get(type(node.op))
        if swapped:
            self._plant("sign", node, f"({left} {swapped} {right})")
            self._plant("term", node, f"({left})")
        if isinstance(node.op, (ast.Add, ast.Sub)) and _is_integer(node.right):
            self._plant("offset", node.right, str(node.right.value + 1))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub):
            self._plant("sign", node, f"({self._text(node.operand)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if len(node.ops) == 1 and type(node.ops[0]) in _SWAPPED:
            sides = self._operand(node.left), self._operand(node.comparators[0])
            self._plant("offset", node, f"({sides[0]} {_SWAPPED[type(node.ops[0])]} {sides[1]})")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and _is_integer(node.slice) and node.slice.value < 2:
            self._plant("axis", node.slice, str(1 - node.slice.value))

    def visit_keyword(self, node: ast.keyword) -> None:
        self.generic_visit(node)
        if node.arg in ("axis", "axes") and _is_integer(node.value):
            self._plant("axis", node.value, str(node.value.value + 1))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value in _DTYPES:
            self._plant("dtype", node, repr(_DTYPES[node.value]))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute):
            return
        if function.attr in _OPERATORS:
            text = f"{self._text(function.value)}.{_OPERATORS[function.attr]}"
            self._plant("sign", function, text)
        elif function.attr == "negative" and len(node.args) == 1:
            self._plant("sign", node, f"({self._text(node.args[0])})")

    def _visit_condition(self, node: ast.If | ast.IfExp) -> None:
        self.generic_visit(node)
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if not raises:
            self._plant("condition", node.test, f"not ({self._text(node.test)})")

    visit_If = visit_IfExp = _visit_condition
    visit_AsyncFunctionDef = visit_FunctionDef


#: What binds less than some operator, or is split over lines.
_COMPOSED = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda, ast.UnaryOp)

#: What is concatenated rather than added.
_SEQUENCES = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


def _is_integer(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a file of the package."""
    faults = _Faults(path, source)
    faults.visit(ast.parse(source))
    return faults.found


def draw(root: Path, number: int, seed: int, rooms: tuple[str, ...] = ROOMS) -> list[Mutant]:
    """Return mutants of all rooms in turn, and within a room of all kinds alike."""
    generator = random.Random(seed)
    by_room = [_shuffled(_of_room(root, room), generator) for room in rooms]
    chosen = []
    while len(chosen) < number and any(by_room):
        chosen += [mutants.pop() for mutants in by_room if mutants]
    return chosen[:number]


def _of_room(root: Path, room: str) -> list[Mutant]:
    files = sorted((root / "relax_grad" / room).rglob("*.py"))
    return [
        mutant
        for path in files
        for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    ]


def _shuffled(mutants: list[Mutant], generator: random.Random) -> list[Mutant]:
    """Return mutants in random order, the kinds in turn."""
    kinds: dict[str, list[Mutant]] = {}
    for mutant in generator.sample(mutants, len(mutants)):
        kinds.setdefault(mutant.kind, []).append(mutant)
    rounds = max(map(len, kinds.values()), default=0)
    turns = [[of[n] for of in kinds.values() if n < len(of)] for n in range(rounds)]
    return [mutant for turn in reversed(turns) for mutant in turn]


class planted:
    """A context in which a file of a copy of the repository has a fault."""

    def __init__(self, root: Path, mutant: Mutant):
        self._path = root / mutant.path
        self._mutant = mutant

    def __enter__(self) -> None:
        self._source = self._path.read_text("utf-8")
        self._path.write_text(self._mutant.applied(self._source), "utf-8")

    def __exit__(self, *_) -> None:
        self._path.write_text(self._source, "utf-8")


def outcome(root: Path, mutant: Mutant, seconds: float) -> str:
    """Return the first test that finds a fault in a copy of the repository, or "survived".

    Parameters
    ----------
    seconds : float
        The time after which no further test starts. A test that hangs has found the fault when
        three times this time is over.
    """
    nearest = nearest_tests(mutant.path, root)
    with planted(root, mutant):
        for selection in (nearest, ["-m", "core and not slow"]):
            found = selection and _failure(root, selection, seconds)
            if found:
                return found
    return "survived"


def _failure(root: Path, selection: list[str], seconds: float) -> str | None:
    """Return the first test of a selection that fails, or None."""
    environment = {**os.environ, "PYTHONPATH": str(root), "TIME_LIMIT": str(seconds), "CI": "true"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    try:
        process = subprocess.run(
            [*command, *selection],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3 * seconds,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {3 * seconds:g} s"
    if process.returncode in (0, 5):
        return None
    failed = [line for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ")[1] if failed else f"exit status {process.returncode}"


def _outcomes(mutants: list[Mutant], seconds: float, workers: int) -> Iterator[tuple[Mutant, str]]:
    """Yield mutants and their outcomes, in their order; each worker has a copy."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copies: Queue[Path] = Queue()
        for number in range(workers):
            copies.put(_copy(Path(folder, str(number))))

        def run(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return outcome(copy, mutant, seconds)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(workers) as pool:
            yield from zip(mutants, pool.map(run, mutants), strict=True)


def _copy(folder: Path) -> Path:
    """Return a copy of the files that git tracks."""
    listed = subprocess.run(
        ["git", "-C", mirror.ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(mirror.ROOT / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=100, help="faults to plant (100)")
    parser.add_argument("--seed", type=int, default=0, help="the draw (0)")
    parser.add_argument("--seconds", type=float, default=120, help="tests of a fault (120 s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument("--rooms", nargs="*", default=ROOMS, help="folders of the package")
    options = parser.parse_args()
    mutants = draw(mirror.ROOT, options.number, options.seed, tuple(options.rooms))
    survivors = 0
    for mutant, result in _outcomes(mutants, options.seconds, options.workers):
        survivors += result == "survived"
        source = (mirror.ROOT / mutant.path).read_text("utf-8")
        print(f"{mutant.described(source)}\n    {result}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} faults found, {survivors} survived")


if __name__ == "__main__":
    main()
